"""What runs the kernels of a test: the GPU, the emulator, or nothing."""

import os
import platform
from collections.abc import Callable
from typing import TypeAlias, cast

import mlx.core as mx
import pytest

from tests.msl import toolchain
from tests.msl.emulator import EmulatedKernel

KernelFactory: TypeAlias = Callable[..., Callable[..., list[mx.array]]]


def require_emulator() -> None:
    """Skips where no kernel can be executed; CI sets DS41_REQUIRE_EMULATOR=1 and fails instead."""
    reason = toolchain.unavailable()
    if reason and os.environ.get("DS41_REQUIRE_EMULATOR") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def metal_kernel() -> KernelFactory:
    """`mx.fast.metal_kernel` on Apple silicon, its emulation elsewhere."""
    if platform.system() == "Darwin" and mx.metal.is_available():
        return cast(KernelFactory, mx.fast.metal_kernel)
    require_emulator()
    return EmulatedKernel


@pytest.fixture
def emulated_kernel() -> type[EmulatedKernel]:
    """The emulation alone, for tests of what a GPU does not tell."""
    require_emulator()
    return EmulatedKernel
