"""Every planted fault must be noticed: mutations.toml lists them with the check that does.

Run as a module this file writes docs/mutations.md, the same list for people.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.mutations import Mutation, planted, read_mutations
from tests.engine.quiet import MARGIN, quiet_tokens
from tests.engine.support import (
    Mismatch,
    Run,
    Subject,
    build,
    compare_cache,
    compare_choices,
    compare_logits,
    load,
    tiny_config,
)
from tests.unit import test_attention, test_formats, test_ops, test_state

DOCUMENT = Path(__file__).parents[2] / "docs" / "mutations.md"
MUTATIONS = read_mutations()

# The tiny configuration with everything audible: few Sinkhorn rounds, an epsilon that matters, a
# clamp that many activations reach, a router temperature, too few candidates for the top-k.
CONFIG = tiny_config(
    hc_sinkhorn_iters=3,
    hc_eps=0.02,
    swiglu_limit=1.5,
    gate_temp=1.3,
    index_topk=6,
    candidate_topk_blocks=2,
)
IDS = quiet_tokens("loud")
T = len(IDS)
IN_CHUNKS = [1, 2, 17, 5, 1, 1, 18]


def run(subject: Subject, chunks: list[int] | None = None, *, is_rounded: bool) -> Run:
    return subject.run(IDS, chunks, is_rounded=is_rounded)


def compared_logits(chunks: list[int] | None) -> Callable[[Subject, Subject], None]:
    """The unrounded logits against the reference's."""

    def check(sound: Subject, mutant: Subject) -> None:
        trace = sound.trace(IDS, is_rounded=False)
        compare_logits(run(mutant, chunks, is_rounded=False), trace, 5e-5)

    return check


def compared_choices(sound: Subject, mutant: Subject) -> None:
    """Experts, rows and candidates against the reference's."""
    trace = sound.trace(IDS)
    compare_choices(mutant, run(mutant, is_rounded=True), trace)


def compared_cache(sound: Subject, mutant: Subject) -> None:
    """The cached values against the reference's."""
    compare_cache(run(mutant, is_rounded=True), sound.trace(IDS))


def compared_prefills(sound: Subject, mutant: Subject) -> None:
    """Short prefill against full prefill: the last logits, and every window."""
    model = mutant.model
    logits: list[NDArray[np.float32]] = []
    windows: list[NDArray[np.float32]] = []
    for is_narrow in (False, True):
        state = mutant.state(is_rounded=False)
        boundary = model.encode(IDS, state, mutant.engram_rows(IDS, 0, T))
        streams, pre = model.decode(boundary, state, is_narrow=is_narrow)
        logits.append(np.array(model.head(streams[-1:], pre[-1:]), np.float32))
        rows = mx.stack([window.rows for window in state.windows]).view(mx.float32)
        windows.append(np.array(rows, np.float32))
    for full, short in (logits, windows):
        if not np.abs(short - full).max() <= 5e-5:
            raise Mismatch("short and full prefill differ")


def unit(test: Callable[[], object]) -> Callable[[Subject, Subject], None]:
    """A unit test as it stands."""

    def check(sound: Subject, mutant: Subject) -> None:
        try:
            test()
        except AssertionError as error:
            raise Mismatch(str(error)) from error

    return check


# By module of tests/unit and name of the test: how it is called.
UNIT_TESTS: dict[str, Callable[[], object]] = {
    "test_attention::test_top_k_gives_ties_to_the_lowest_index": (
        test_attention.test_top_k_gives_ties_to_the_lowest_index
    ),
    "test_ops::test_rope_far_out_agrees_with_float64": lambda: (
        test_ops.test_rope_far_out_agrees_with_float64(False)
    ),
    "test_ops::test_engram_gate": test_ops.test_engram_gate,
    "test_formats::test_a_small_block_has_the_scale_of_the_floor": lambda: [
        test_formats.test_a_small_block_has_the_scale_of_the_floor(*case)
        for case in test_formats.FLOORS
    ],
    "test_formats::test_a_block_beyond_the_largest_e4m3_scale_is_clipped": (
        test_formats.test_a_block_beyond_the_largest_e4m3_scale_is_clipped
    ),
    "test_formats::test_every_midpoint_and_its_neighbours": lambda: (
        test_formats.test_every_midpoint_and_its_neighbours("index", 0)
    ),
    "test_state::test_a_gap_drops_the_rows_before_it": (
        test_state.test_a_gap_drops_the_rows_before_it
    ),
}
CHECKS: dict[str, Callable[[Subject, Subject], None]] = {
    "logits": compared_logits(None),
    "logits in chunks": compared_logits(IN_CHUNKS),
    "choices": compared_choices,
    "cached values": compared_cache,
    "short prefill": compared_prefills,
    **{name: unit(test) for name, test in UNIT_TESTS.items()},
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_model_passes(name: str) -> None:
    subject = build(CONFIG, 0)
    assert min(subject.trace(IDS).margins.values()) > MARGIN
    CHECKS[name](subject, subject)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_planted_fault_is_noticed(mutation: Mutation) -> None:
    sound = build(CONFIG, 0)
    with planted(mutation), closing(load(CONFIG, 0)) as mutant, pytest.raises(Mismatch):
        CHECKS[mutation.caught_by](sound, mutant)


@pytest.mark.parametrize("module", sorted({mutation.module for mutation in MUTATIONS}))
def test_planting_alone_changes_nothing(module: str) -> None:
    of_module = [mutation for mutation in MUTATIONS if mutation.module == module]
    for mutation in of_module:
        with planted(mutation):
            pass
    no_fault = replace(of_module[0], new=of_module[0].old)
    with planted(no_fault), closing(load(CONFIG, 0)) as mutant:
        CHECKS["choices"](build(CONFIG, 0), mutant)


def document() -> str:
    """docs/mutations.md."""
    lines = [
        "# Mutations",
        "",
        "Faults that are planted in the model one at a time, and the test that fails with each.",
        "`tests/engine/test_mutations.py` plants them; this file is made from its table by",
        "`python -m tests.engine.test_mutations`.",
        "",
        "Two are missing, because no result shows them: another positive factor on all index head",
        "weights leaves the order of the scores, and an expert's weight may as well multiply after",
        "its down product.",
        "",
        "| fault | in | test that fails |",
        "|---|---|---|",
    ]
    for mutation in MUTATIONS:
        test = f"engine/test_mutations.py::test_the_model_passes[{mutation.caught_by}]"
        if mutation.caught_by in UNIT_TESTS:
            module, _, name = mutation.caught_by.partition("::")
            test = f"unit/{module}.py::{name}"
        path = mutation.module.replace(".", "/")
        lines.append(f"| {mutation.name} | `{path}.py` | `{test}` |")
    return "\n".join(lines) + "\n"


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run python -m tests.engine.test_mutations"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
