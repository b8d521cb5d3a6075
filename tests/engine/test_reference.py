"""The model in float32 against the float64 reference: logits, discrete choices, cached values.

Each case states what its run must exercise, and a test measures that it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mlx_engine.layer_plan import LayerKind
from tests.engine.quiet import MARGIN, quiet_tokens
from tests.engine.support import (
    Subject,
    build,
    compare_cache,
    compare_choices,
    compare_logits,
    tiny_config,
    visible_rows,
)
from tests.reference.forward import Trace

# Widths, ratios, spans and counts unlike the tiny configuration's, none a power of two that could
# be mistaken for another.
UNEVEN = tiny_config(
    num_hidden_layers=11,
    compress_ratios=[0, 4, 4, 0, 3, 3, 3, 2, 2, 2, 2, 0, 0],
    kv_source_layer_ids=[1, 4, 7],
    index_source_layer_ids=[1, 2, 4, 6, 7, 8, 10],
    candidate_source_layer_id=7,
    candidate_topk_blocks=3,
    candidate_block_size=3,
    index_topk=5,
    sliding_window=5,
    hidden_size=96,
    num_attention_heads=6,
    o_groups=3,
    head_dim=96,
    qk_rope_head_dim=24,
    q_lora_rank=96,
    index_n_heads=3,
    index_head_dim=64,
    moe_intermediate_size=32,
    n_routed_experts=9,
    num_experts_per_tok=3,
    norm_topk_prob=False,
    routed_scaling_factor=0.8,
    gate_temp=1.3,
    swiglu_limit=2.0,
    hc_mult=3,
    hc_sinkhorn_iters=4,
    engram_layer_ids=[0, 3, 7],
    engram_max_ngram_size=3,
    engram_n_heads=3,
    engram_head_dim=64,
    engram_compressed_vocab_size=80,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 8,
        "beta_fast": 16,
        "beta_slow": 1,
        "original_max_position_embeddings": 20,
    },
)
ONE_TO_ONE = tiny_config(
    compress_ratios=[1] * 8 + [0, 0],
    kv_source_layer_ids=[0, 3],
    index_source_layer_ids=[0, 1, 3, 5, 6],
    candidate_source_layer_id=3,
    engram_layer_ids=[0],
)
WINDOWS_ONLY = tiny_config(
    num_hidden_layers=3,
    compress_ratios=[0] * 5,
    kv_source_layer_ids=[],
    index_source_layer_ids=[],
    candidate_source_layer_id=-1,
    engram_layer_ids=[0],
    sliding_window=7,
)

EVERYWHERE = {"window wraps", "past the YaRN length"}
LAYERS = {"swa layers", "full layers", "reuse layers", "reindex layers"}
PRUNED = {"top-k prunes", "reindex chooses otherwise"}
CANDIDATES = {"twice the candidate capacity", "candidates prune", "source ignores candidates"}


@dataclass(frozen=True)
class Case:
    """A configuration, the length of the sequence, and what the run must exercise."""

    config: dict[str, Any]
    T: int
    shows: set[str]


CASES = {
    "tiny": Case(
        tiny_config(),
        45,
        EVERYWHERE | LAYERS | PRUNED | CANDIDATES | {"pending group", "engram"},
    ),
    "uneven": Case(
        UNEVEN,
        47,
        EVERYWHERE | LAYERS | PRUNED | CANDIDATES | {"pending group", "engram"},
    ),
    # The rows beyond the candidates must stay out, although the top-k has room for them.
    "too few candidates": Case(
        tiny_config(candidate_topk_blocks=1, candidate_block_size=3, index_topk=6),
        41,
        EVERYWHERE
        | LAYERS
        | PRUNED
        | CANDIDATES
        | {"fewer candidates than top-k", "pending group", "engram"},
    ),
    "one to one": Case(
        ONE_TO_ONE,
        41,
        (EVERYWHERE | LAYERS | PRUNED | CANDIDATES | {"engram"}) - {"swa layers"},
    ),
    "no candidates": Case(
        tiny_config(candidate_source_layer_id=-1, hc_mult=2),
        39,
        EVERYWHERE | LAYERS | PRUNED | {"pending group", "engram"},
    ),
    "all rows": Case(
        tiny_config(index_topk=64, candidate_topk_blocks=64),
        35,
        EVERYWHERE | LAYERS | {"pending group", "engram"},
    ),
    "windows only": Case(
        WINDOWS_ONLY, 37, {"window wraps", "past the YaRN length", "swa layers", "engram"}
    ),
    "engram off": Case(
        tiny_config(engram_layer_ids=[]),
        43,
        EVERYWHERE | LAYERS | PRUNED | CANDIDATES | {"pending group"},
    ),
}
cases = pytest.mark.parametrize("name", CASES)


def subject_of(name: str) -> tuple[Subject, list[int]]:
    case = CASES[name]
    ids = quiet_tokens(name)
    assert len(ids) == case.T
    return build(case.config, 0), ids


def exercised(subject: Subject, trace: Trace) -> set[str]:
    """What a run of the reference went through, measured on its trace."""
    config, T = subject.config, len(trace.logits)
    found = {f"{plan.kind.value} layers" for plan in subject.model.plans}
    if T > config.sliding_window:
        found.add("window wraps")
    if T > config.yarn.original_max_position_embeddings:
        found.add("past the YaRN length")
    if any(T % config.compress_ratios[source] for source in config.kv_source_layer_ids):
        found.add("pending group")
    if config.engram is not None:
        found.add("engram")
    for plan in subject.model.plans:
        if plan.kind not in (LayerKind.FULL, LayerKind.REINDEX):
            continue
        assert plan.kv_source is not None
        visible, chosen = visible_rows(plan, T), trace.chosen[plan.layer]
        if plan.kind is LayerKind.FULL and np.any(chosen.sum(1) < visible.sum(1)):
            found.add("top-k prunes")
        if plan.kind is LayerKind.REINDEX and np.any(chosen != trace.chosen[plan.kv_source]):
            found.add("reindex chooses otherwise")
        if not plan.is_candidate_source:
            continue
        candidates = trace.candidates[plan.layer]
        if visible.shape[1] > 2 * config.candidate_topk_blocks * config.candidate_block_size:
            found.add("twice the candidate capacity")
        if np.any(visible & ~candidates):
            found.add("candidates prune")
        if np.any(chosen & ~candidates):
            found.add("source ignores candidates")
        if np.any(candidates.sum(1) < np.minimum(visible.sum(1), config.index_topk)):
            found.add("fewer candidates than top-k")
    return found


@cases
def test_a_case_exercises_what_it_is_for(name: str) -> None:
    subject, ids = subject_of(name)
    trace = subject.trace(ids)
    assert exercised(subject, trace) == CASES[name].shows
    assert 2.5 < trace.logits.std() < 3.5
    # No rounding or selection that float32 could decide otherwise.
    assert min(trace.margins.values()) > MARGIN
    assert np.abs(trace.logits - subject.trace(ids, is_rounded=False).logits).max() > 0.1


def schedules(T: int) -> dict[str, Sequence[int]]:
    return {"one piece": [T], "odd chunks": [1, 2, 17, 5, T - 25], "steps": [1] * T}


@cases
@pytest.mark.parametrize("schedule", ["one piece", "odd chunks", "steps"])
def test_with_cache_roundings(name: str, schedule: str) -> None:
    subject, ids = subject_of(name)
    trace, run = subject.trace(ids), subject.run(ids, schedules(len(ids))[schedule])
    compare_choices(subject, run, trace)
    compare_cache(run, trace)
    compare_logits(run, trace, 1e-3)


@cases
@pytest.mark.parametrize("schedule", ["one piece", "odd chunks", "steps"])
def test_without_cache_roundings(name: str, schedule: str) -> None:
    subject, ids = subject_of(name)
    trace = subject.trace(ids, is_rounded=False)
    run = subject.run(ids, schedules(len(ids))[schedule], is_rounded=False)
    compare_choices(subject, run, trace)
    compare_logits(run, trace, 5e-5)
