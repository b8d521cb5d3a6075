"""Runs a body over inputs named a, b, ... and one output, out: what most tests here need."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.msl.conftest import KernelFactory

Array: TypeAlias = NDArray[Any]

LANES = np.arange(32)
BEGIN = "uint i = thread_position_in_grid.x; uint l = thread_index_in_simdgroup;\n"
INTEGERS = mx.array(np.random.default_rng(0).integers(1, 1 << 20, 64, dtype=np.int32))
FLOATS = mx.random.normal((64,), key=mx.random.key(1))


def run(
    metal_kernel: KernelFactory,
    source: str,
    inputs: Sequence[mx.array | float],
    *,
    threads: int,
    shape: Sequence[int],
    dtype: mx.Dtype,
    threadgroup: int = 64,
    template: Sequence[tuple[str, mx.Dtype | int | bool]] = (),
    header: str = "",
    init_value: float | None = None,
    atomic_outputs: bool = False,
) -> mx.array:
    """`i` is the thread's number and `l` its lane; the grid has one dimension."""
    kernel = metal_kernel(
        name="known",
        input_names=list("abcdef"[: len(inputs)]),
        output_names=["out"],
        source=BEGIN + source,
        header=header,
        atomic_outputs=atomic_outputs,
    )
    (out,) = kernel(
        inputs=list(inputs),
        template=list(template),
        grid=(threads, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        output_shapes=[tuple(shape)],
        output_dtypes=[dtype],
        init_value=init_value,
    )
    return out
