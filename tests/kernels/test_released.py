"""Every operation with kernels at the released widths, as `ds41 bench kernels` has them.

Of one token and of eight with all of the emulator's checks, and the bytes that their formulas say;
of more without, since that would take hours. A sweep of minutes, beside the families' own tests.
"""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_engine.kernel_bench import fault_of
from mlx_engine.kernel_cases import Case, cases
from mlx_engine.kernel_inputs import Numbers, Sizes
from mlx_engine.ops import launch
from tests.kernels.moved import moved
from tests.msl import emulator
from tests.msl.emulator import Report

pytestmark = pytest.mark.slow

FEW = 8
# One copy of everything, more tokens than few rows are, and keys for a choice in two levels.
SIZES = Sizes(few_tokens=FEW, many_tokens=40, keys=20_000, cold_bytes=1)
# Of many tokens experts have whole tiles and parts of one.
FEW_EXPERTS = replace(SIZES, experts=4, num_experts_per_tok=2)
CASES = cases(SIZES)


@pytest.mark.parametrize("case", CASES, ids=[f"{c.family}-{c.name}-{c.tokens}" for c in CASES])
def test_at_the_released_widths(case: Case, kernels_on: list[Report]) -> None:
    is_few = case.tokens <= FEW
    sizes = SIZES if is_few or case.family != "experts" else FEW_EXPERTS
    work = case.prepare(sizes, case.tokens, Numbers())
    with emulator.using(checked=is_few, limit_s=900):
        found = work.compute(work.inputs, 0)
    with launch.using(None):
        assert fault_of(found, work.compute(work.inputs, 0)) == ""
    if is_few and kernels_on:
        unique = sum(moved(report).unique_bytes for report in kernels_on)
        assert unique == pytest.approx(work.n_bytes, rel=0.01)
    mx.clear_cache()
