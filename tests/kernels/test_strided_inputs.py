"""Every operation with kernels on an input that does not lie row by row: as on one that does."""

import mlx.core as mx
import pytest

from mlx_engine.kernel_cases import Case, cases
from mlx_engine.kernel_inputs import Numbers
from tests.kernels.test_kernel_bench import SMALL
from tests.msl import emulator
from tests.msl.emulator import Report

CASES = [case for case in cases(SMALL) if case.tokens <= SMALL.few_tokens]


def strided(x: mx.array) -> mx.array:
    """The same values, every other one of a wider array's."""
    return mx.repeat(x, 2, axis=-1)[..., ::2]


@pytest.mark.parametrize("case", CASES, ids=[f"{c.family}-{c.name}-{c.tokens}" for c in CASES])
def test_an_input_with_gaps(case: Case, kernels_on: list[Report]) -> None:
    work = case.prepare(SMALL, case.tokens, Numbers())
    with emulator.using(checked=False):
        right = work.compute(work.inputs, 0)
        found = work.compute(tuple(strided(x) for x in work.inputs), 0)
    for ours, wanted in zip(found, right, strict=True):
        a, b = (x.reshape(-1).view(mx.uint8) for x in (ours, wanted))
        assert mx.array_equal(a, b).item()
