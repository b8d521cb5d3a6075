"""What runs the kernels in these tests, and what is known of their launches afterwards."""

import math
import platform
from collections.abc import Callable, Generator
from typing import Any, cast

import mlx.core as mx
import pytest

from mlx_engine.ops import launch
from mlx_engine.ops.launch import KernelFactory
from tests.kernels.counted import Launches
from tests.msl import emulator
from tests.msl.conftest import require_emulator
from tests.msl.emulator import EmulatedKernel


def poisoned(**arguments: Any) -> Callable[..., list[mx.array]]:
    """The GPU's kernel with outputs that start as NaN; the emulator itself sees unwritten bytes."""
    kernel = cast(KernelFactory, mx.fast.metal_kernel)(**arguments)

    def run(**call: Any) -> list[mx.array]:
        floats = all(mx.issubdtype(dtype, mx.floating) for dtype in call["output_dtypes"])
        return kernel(**call | ({"init_value": math.nan} if floats else {}))

    return run


@pytest.fixture
def kernels_on() -> Generator[Launches]:
    """Within the test, operations compute with their kernels: the launches, in order.

    None on Apple silicon, where the GPU runs them and nothing is counted.
    """
    if platform.system() == "Darwin" and mx.metal.is_available():
        with launch.using(poisoned):
            yield None
        return
    require_emulator()
    with launch.using(EmulatedKernel), emulator.recording() as reports:
        yield reports
