"""Every operation with kernels on arrays that do not lie row by row: as on those that do.

The inputs, and all that is packed: index keys, a ring, compressed rows, and weights too.
"""

import mlx.core as mx
import pytest

from mlx_engine.formats import PackedFormat
from mlx_engine.kernel_cases import Case, cases
from mlx_engine.kernel_inputs import Numbers
from tests.kernels.counted import Launches
from tests.kernels.test_kernel_bench import SMALL
from tests.msl import emulator

CASES = [case for case in cases(SMALL) if case.tokens <= SMALL.few_tokens]


def strided(x: mx.array) -> mx.array:
    """The same values, every other one of a wider array's."""
    return mx.repeat(x, 2, axis=-1)[..., ::2]


class StridedNumbers(Numbers):
    """The same numbers, those that are packed with gaps."""

    def words(self, *shape: int) -> mx.array:
        return strided(super().words(*shape))

    def scales(self, *shape: int, middle: int) -> mx.array:
        return strided(super().scales(*shape, middle=middle))

    def packed(self, fmt: PackedFormat, D: int, rows: int, count: int) -> list[mx.array]:
        return [strided(x) for x in super().packed(fmt, D, rows, count)]


def test_gaps_are_gaps() -> None:
    x = strided(mx.arange(12).reshape(3, 4))
    mx.eval(x)
    assert not memoryview(x).c_contiguous  # pyright: ignore[reportArgumentType]
    assert mx.array_equal(x, mx.arange(12).reshape(3, 4)).item()


@pytest.mark.parametrize("case", CASES, ids=[f"{c.family}-{c.name}-{c.tokens}" for c in CASES])
def test_arrays_with_gaps(case: Case, kernels_on: Launches) -> None:
    work = case.prepare(SMALL, case.tokens, Numbers())
    gaps = case.prepare(SMALL, case.tokens, StridedNumbers())
    with emulator.using(checked=False):
        right = work.compute(work.inputs, 0)
        found = gaps.compute(tuple(strided(x) for x in gaps.inputs), 0)
    assert kernels_on is None or kernels_on
    for ours, wanted in zip(found, right, strict=True):
        a, b = (x.reshape(-1).view(mx.uint8) for x in (ours, wanted))
        assert mx.array_equal(a, b).item()
