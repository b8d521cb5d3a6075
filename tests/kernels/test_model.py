"""The whole model with its kernels: the reference's choices and cached rows, and its logits.

A prefill chunk that takes the kernels for many rows, then single steps. The model is small, but
every family of kernels computes in it, and each launch is checked as in the families' own tests.
"""

from contextlib import nullcontext
from itertools import accumulate, pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.engram import read_ahead
from mlx_engine.layer_plan import LayerKind
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.session import Session
from mlx_engine.state import SessionState
from tests.engine.quiet import MARGIN, quiet_tokens
from tests.engine.support import (
    Subject,
    build,
    compare_cache,
    compare_choices,
    compare_logits,
    tiny_config,
)
from tests.kernels.counted import Launches

# Wide enough for the kernels, which want whole groups of 64 channels, and a window long enough for
# attention to be split; all layer kinds are in it.
CONFIG = tiny_config(index_head_dim=64, sliding_window=20)
PROMPT = 35
CHUNKS = [PROMPT, 1, 1, 1, 1]

# A launch of each family, of the prefill and of the steps.
LAUNCHED = {
    *("mhc_enter", "mhc_between", "mhc_finish", "mhc_expand", "mhc_collapse_norm"),
    *("fp8_rows", "fp8_rows_pair", "fp8_tiles", "plain_rows", "plain_rows_pair", "plain_tiles"),
    *("attention_front", "attention_front_in_ring", "attend_slices", "merge_slices"),
    *("pooled_rows", "encoded_keys", "index_queries", "index_scores", "index_scores_of_blocks"),
    *("best_rows", "best_blocks", "best_rows_of_blocks", "router_scores", "router_choose"),
    *("moe_gate_up", "moe_down", "moe_list_tiles", "moe_gate_up_tiles", "moe_down_tiles"),
    *("engram_rows", "engram_gate"),
}


def subject_and_ids() -> tuple[Subject, list[int]]:
    subject, ids = build(CONFIG, 0), quiet_tokens("kernels")
    assert len(ids) == sum(CHUNKS)
    return subject, ids


def test_every_layer_kind_and_no_close_call() -> None:
    subject, ids = subject_and_ids()
    assert {plan.kind for plan in subject.model.plans} == set(LayerKind)
    assert subject.config.engram is not None
    assert min(subject.trace(ids).margins.values()) > MARGIN


def test_in_float32(kernels_on: Launches) -> None:
    """Choices and cached values are those of float64, logits as near to them as MLX's are."""
    subject, ids = subject_and_ids()
    trace, run = subject.trace(ids), subject.run(ids, CHUNKS)
    if kernels_on is not None:
        assert {report.kernel for report in kernels_on} == LAUNCHED
    compare_choices(subject, run, trace)
    compare_cache(run, trace)
    compare_logits(run, trace, 1e-3)


def test_short_prefill(kernels_on: Launches) -> None:
    """Where the upper layers compute a part of the chunk's tokens."""
    subject, ids = subject_and_ids()
    session = Session(subject.model, subject.reader, prefill="short", chunk_tokens=PROMPT)
    logits = np.array(session.sync(ids[:PROMPT]), np.float32)
    np.testing.assert_allclose(logits, subject.trace(ids).logits[PROMPT - 1], rtol=0, atol=1e-3)


def test_in_bfloat16(kernels_on: Launches) -> None:
    """Steps after a prompt that MLX computed: correlations above 0.99 with MLX's own logits.

    Both round to bf16 at the same places, but sum in another order, so that some values fall on the
    other side of a rounding's edge; tests/engine/test_bfloat16.py says what 0.99 stands for. The
    median of the steps is taken, since a close call may pick another expert.
    """
    subject, ids = subject_and_ids()
    model = Model(subject.config, subject.model.weights, mx.bfloat16)

    def steps(*, with_kernels: bool) -> NDArray[np.float64]:
        # Not in a session, whose checkpoint at the prompt's end would cut the prompt in two.
        state = SessionState(subject.config)
        logits: list[NDArray[np.float64]] = []
        for first, last in pairwise(accumulate(CHUNKS, initial=0)):
            on = first >= PROMPT and with_kernels
            rows = read_ahead(subject.reader, np.array(ids), first, last)
            with nullcontext() if on else launch.using(None):
                logits.append(np.array(model.forward(ids[first:last], state, rows)[-1], np.float64))
        return np.stack(logits[1:])

    found, own = steps(with_kernels=True), steps(with_kernels=False)
    assert kernels_on is None or {r.kernel for r in kernels_on} >= {"moe_down", "merge_slices"}
    correlations = [np.corrcoef(a, b)[0, 1] for a, b in zip(found, own, strict=True)]
    assert np.median(correlations) > 0.99
    assert not np.array_equal(found, own)
