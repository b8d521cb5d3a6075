"""Every kernel at the released widths: the operations of `ds41 bench kernels`, and the others.

Of one token and of eight with all of the emulator's checks, and the bytes that their formulas say;
of more without, since that would take hours. A sweep of minutes, beside the families' own tests.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_engine.kernel_bench import fault_of
from mlx_engine.kernel_cases import Case, cases
from mlx_engine.kernel_inputs import Numbers, Sizes
from mlx_engine.ops import launch
from tests.kernels.counted import Launches, counted
from tests.kernels.more_cases import more_cases
from tests.kernels.test_probes import KERNELS
from tests.msl import emulator

FEW, MANY = 8, 40
# One copy of everything, more tokens than few rows are, and keys for a choice in two levels.
SIZES = Sizes(few_tokens=FEW, many_tokens=MANY, keys=20_000, cold_bytes=1)
# Of many tokens experts have whole tiles and parts of one. Sums are as long as ever, but for those
# of Engram's product, and there are fewer of them: rows of the head and keys.
SIZES_OF_MANY = replace(
    SIZES,
    experts=4,
    num_experts_per_tok=2,
    engram_columns=4,
    head_rows=2048,
    keys=4096,
    candidate_topk_blocks=256,
)


def every_case() -> list[Case]:
    """All operations for one, few and many tokens; a draw has one."""
    found = {(case.family, case.name): case for case in cases(SIZES)}
    counts = (1, FEW, MANY)
    return [
        *(
            replace(case, tokens=T)
            for case in found.values()
            for T in (counts[:1] if case.family == "sampling" else counts)
        ),
        *more_cases(counts),
    ]


CASES = every_case()


def sizes_of(case: Case) -> Sizes:
    return SIZES if case.tokens <= FEW else SIZES_OF_MANY


def test_every_kernel_has_a_case() -> None:
    """Launches are recorded here and not computed."""
    launched: dict[str, Case] = {}

    def record(*, name: str, **_: Any) -> Callable[..., list[mx.array]]:
        def run(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            launched[name] = case
            pairs = zip(output_shapes, output_dtypes, strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in pairs]

        return run

    for case in CASES:
        work = case.prepare(sizes_of(case), case.tokens, Numbers())
        with launch.using(record):
            work.compute(work.inputs, 0)
        assert case in launched.values(), "it launches nothing"
    assert set(launched) == {kernel.name for kernel in KERNELS}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[f"{c.family}-{c.name}-{c.tokens}" for c in CASES])
def test_at_the_released_widths(case: Case, kernels_on: Launches) -> None:
    is_few = case.tokens <= FEW
    work = case.prepare(sizes_of(case), case.tokens, Numbers())
    with emulator.using(checked=is_few, limit_s=900):
        found = work.compute(work.inputs, 0)
    with launch.using(None):
        assert fault_of(found, work.compute(work.inputs, 0)) == ""
    if kernels_on is not None:
        assert kernels_on
        unique = sum(counted(report).unique_bytes for report in kernels_on)
        assert not is_few or unique == pytest.approx(work.n_bytes, rel=0.01)
    mx.clear_cache()
