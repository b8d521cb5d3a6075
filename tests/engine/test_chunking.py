"""However a prompt is cut, and however little the upper layers see, the result is the same."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import mlx_engine.model
from mlx_engine.session import Prefill, Session
from tests.engine.quiet import quiet_tokens
from tests.engine.support import (
    Subject,
    build,
    compare_cache,
    compare_choices,
    compare_logits,
    tiny_config,
)
from tests.unit.arrays import host
from tests.unrounded import UNROUNDED

# An odd length leaves a group of two open; it wraps the window of 8 and prunes rows of all kinds.
IDS = quiet_tokens("tiny")
T = len(IDS)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return build(tiny_config(), 0)


@pytest.mark.parametrize("is_rounded", [True, False], ids=["rounded", "unrounded"])
def test_a_cut_at_every_position(subject: Subject, is_rounded: bool) -> None:
    trace = subject.trace(IDS, is_rounded=is_rounded)
    for cut in range(1, T):
        run = subject.run(IDS, [cut, T - cut], is_rounded=is_rounded)
        compare_choices(subject, run, trace)
        compare_logits(run, trace, 1e-3 if is_rounded else 5e-5)


@pytest.mark.parametrize("is_rounded", [True, False], ids=["rounded", "unrounded"])
@pytest.mark.parametrize("chunks", [[T], [1] * T, [5] * 9, [1, 9, 2, 8, 25]], ids=str)
def test_one_piece_one_token_at_a_time_and_between(
    subject: Subject, chunks: list[int], is_rounded: bool
) -> None:
    trace = subject.trace(IDS, is_rounded=is_rounded)
    run = subject.run(IDS, chunks, is_rounded=is_rounded)
    compare_choices(subject, run, trace)
    compare_logits(run, trace, 1e-3 if is_rounded else 5e-5)
    if is_rounded:
        compare_cache(run, trace)


def _random_ids(count: int) -> list[int]:
    return np.random.default_rng(0).integers(3, 250, count).tolist()


def _after(
    subject: Subject, prefill: Prefill, chunk_tokens: int, ids: list[int], *, is_rounded: bool
) -> tuple[NDArray[np.float32], list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """Logits and windows after a prompt, then the logits of ten more steps."""
    formats = None if is_rounded else UNROUNDED
    session = Session(
        subject.model,
        subject.reader,
        prefill=prefill,
        chunk_tokens=chunk_tokens,
        formats=formats,
    )
    logits = host(session.sync(ids[:-10]))
    state, D = session.state, subject.config.head_dim
    windows = [host(state.formats.window.unpack(w.rows, D)) for w in state.windows]
    steps = [host(session.step(token_id)) for token_id in ids[-10:]]
    return logits, windows, steps


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 30, 200])
def test_short_prefill_equals_full(subject: Subject, chunk_tokens: int) -> None:
    ids = _random_ids(80)
    config = subject.config
    reach = config.reach_tokens(config.last_kv_source)
    assert reach < 70, "the prompt must be longer than what the upper layers need"
    full = _after(subject, "full", 16, ids, is_rounded=False)
    short = _after(subject, "short", chunk_tokens, ids, is_rounded=False)
    np.testing.assert_allclose(short[0], full[0], atol=5e-5)
    for layer, (ours, expected) in enumerate(zip(short[1], full[1], strict=True)):
        np.testing.assert_allclose(ours, expected, atol=5e-5, err_msg=f"window of layer {layer}")
    np.testing.assert_allclose(short[2], full[2], atol=5e-5)


def test_short_prefill_leaves_the_same_window_codes(subject: Subject) -> None:
    full = _after(subject, "full", 200, IDS, is_rounded=True)
    short = _after(subject, "short", 200, IDS, is_rounded=True)
    for layer, (ours, expected) in enumerate(zip(short[1], full[1], strict=True)):
        np.testing.assert_array_equal(ours, expected, err_msg=f"window of layer {layer}")
    np.testing.assert_allclose(short[0], full[0], atol=1e-3)


def test_short_prefill_computes_less(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"short": 0, "full": 0}
    moe: Callable[..., mx.array] = mlx_engine.model.moe
    for prefill in ("short", "full"):

        def counted(x: mx.array, *rest: Any, kind: str = prefill, **options: float) -> mx.array:
            rows[kind] += x.shape[0]
            return moe(x, *rest, **options)

        monkeypatch.setattr(mlx_engine.model, "moe", counted)
        Session(subject.model, subject.reader, prefill=prefill).sync(_random_ids(70))
    layers, split = subject.config.num_hidden_layers, subject.config.last_kv_source
    upper = sum(subject.config.reach_tokens(layer + 1) for layer in range(split, layers))
    assert rows["full"] == 70 * layers
    # The upper layers run up to the checkpoint at 68, and on the two tokens after it.
    last = sum(min(2, subject.config.reach_tokens(layer + 1)) for layer in range(split, layers))
    assert rows["short"] == 70 * split + upper + last


def test_a_second_prompt_with_a_gap_wider_than_the_window(subject: Subject) -> None:
    """The upper layers skip the middle of a long continuation, so their old rows must go."""
    ids = _random_ids(120)
    sessions = [
        Session(subject.model, subject.reader, prefill=prefill, formats=UNROUNDED)
        for prefill in ("short", "full")
    ]
    for session in sessions:
        session.sync(ids[:20])
    short, full = (host(session.sync(ids)) for session in sessions)
    np.testing.assert_allclose(short, full, atol=5e-5)
