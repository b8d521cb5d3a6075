"""What a step allocates beside its state, as the context grows."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_engine.model
import mlx_engine.ops.indexer
from mlx_engine import memory
from mlx_engine.formats import INDEX
from mlx_engine.model import Model
from mlx_engine.ops.indexer import IndexKeys, IndexQueries, choose_rows
from mlx_engine.session import Prefill, Session
from mlx_engine.sessions import Sessions
from mlx_engine.state_transfer import export_rows, export_tail
from tests.engine.support import Subject, build, tiny_config


def _long_session(subject: Subject, tokens: int) -> Session:
    """A session whose compressed rows are random, as long as if it had read so many tokens."""
    config = subject.config
    session = Session(subject.model, subject.reader)
    session.sync(list(range(3, 19)))
    state = session.state
    for source in config.kv_source_layer_ids:
        rows, keys = state.compressed[source], state.index_keys[source]
        count = tokens // config.compress_ratios[source] - rows.length
        rows.append(state.formats.compressed.pack(mx.random.normal((count, config.head_dim))))
        keys.append(*INDEX.encode(mx.random.normal((count, config.index_head_dim))))
    for window in state.windows:
        window.end += tokens - state.position
    state.position = tokens
    session.restore([0] * tokens, state)
    session.checkpoints.clear()
    # Two steps: the first may grow a buffer, and an open group closes.
    for token_id in (5, 6):
        mx.eval(session.step(token_id))
    return session


# Of the same bytes: what a graph no longer needs is freed sooner or later while it runs.
MEASURES = 4


def _step_bytes(session: Session, prepare: Callable[[Session], object]) -> int:
    """The most bytes that a step holds beyond what was held before it, once `prepare` is done."""
    found: list[int] = []
    for _ in range(MEASURES):
        prepare(session)
        spare = [rows.buffer.shape[0] - rows.length for rows in session.state.compressed.values()]
        assert min(spare) > 0, "this step would grow a buffer"
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(session.step(7), *session.state.arrays())
        found.append(mx.get_peak_memory() - before)
    return min(found)


def _nothing(session: Session) -> None:
    pass


def _keep_checkpoint(session: Session) -> None:
    session.checkpoints.append(session.state.checkpoint())


def _rewind(session: Session) -> None:
    """Go back to a checkpoint that lies steps behind."""
    _keep_checkpoint(session)
    for token_id in (4, 5, 6):
        mx.eval(session.step(token_id))
    session.rewind(session.checkpoints[-1].position)


def _export(session: Session) -> None:
    """Hand over rows and a tail, which stay in numpy."""
    mx.eval(session.state.arrays())
    at = session.state.position
    kept.append(
        (export_rows(session.state, at - 2000, at), export_tail(session.state.checkpoint()))
    )


kept: list[Any] = []


@pytest.mark.parametrize("prepare", [_nothing, _keep_checkpoint, _rewind, _export])
def test_a_step_copies_nothing_that_grows_with_the_context(
    prepare: Callable[[Session], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = build(tiny_config(max_position_embeddings=1 << 20), 0)

    # The choice of rows reads all index keys and sorts all scores; its own bound is tested below.
    def first_rows(queries: IndexQueries, *_: Any, k: int, **__: Any) -> tuple[mx.array, None]:
        return mx.broadcast_to(mx.arange(k, dtype=mx.int32), (queries.q.shape[0], k)), None

    monkeypatch.setattr(mlx_engine.model, "choose_rows", first_rows)
    short, long = (_step_bytes(_long_session(subject, n), prepare) for n in (2_000, 100_000))
    # The scales of half as many index keys as tokens are the least that could have been copied.
    assert long <= short + 16_384


@pytest.mark.parametrize(
    ("chunk_tokens", "prefill"), [(256, "short"), (256, "full"), (2048, "full")]
)
def test_a_prefill_takes_no_more_than_the_memory_check_counts(
    chunk_tokens: int, prefill: Prefill
) -> None:
    subject = build(tiny_config(max_position_embeddings=1 << 20), 0)
    model = Model(subject.config, subject.model.weights, mx.bfloat16)
    session = Session(model, subject.reader, prefill=prefill, chunk_tokens=chunk_tokens)
    ids = np.random.default_rng(0).integers(3, 255, chunk_tokens * 5 // 4).tolist()
    mx.eval(*session.state.arrays())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(session.sync(ids))
    taken = mx.get_peak_memory() - before
    needed = memory.needs(subject.config, len(ids), chunk_tokens)
    allowed = needed.total_bytes - needed.weights_bytes - needed.state_bytes
    # One session's part of the budget; what is left of that is for others.
    own = memory.held_bytes(subject.config, len(ids)) + 2 * memory.checkpoint_bytes(subject.config)
    assert taken <= allowed + own


def test_the_state_takes_what_the_memory_check_counts() -> None:
    subject = build(tiny_config(), 0)
    session = Session(subject.model, subject.reader)
    session.sync(list(range(3, 40)))
    state = session.state
    rows = list(state.compressed.values())
    for keys in state.index_keys.values():
        rows += [keys.codes, keys.scales]
    assert sum(each.view().nbytes for each in rows) == memory.growing_bytes(subject.config, 37)
    windows = sum(window.rows.nbytes for window in state.windows)
    assert windows == memory.window_bytes(subject.config)
    assert session.state_bytes <= memory.held_bytes(subject.config, 37)
    assert state.checkpoint().n_bytes == memory.checkpoint_bytes(subject.config)


@pytest.mark.parametrize("n", [2, 300, 700, 1500])
def test_a_session_takes_what_the_budget_counts(n: int) -> None:
    subject = build(tiny_config(max_position_embeddings=1 << 20), 0)
    session = Session(subject.model, subject.reader)
    ids = np.random.default_rng(0).integers(3, 250, n).tolist()
    session.sync(ids)
    held = memory.held_bytes(subject.config, n)
    assert held / 2 < session.state_bytes <= held


def _choice_bytes(Q: int, S: int) -> int:
    """The most bytes that a choice among S rows by Q queries holds beyond queries and keys."""
    H, D = 8, 128
    keys = IndexKeys(*INDEX.encode(mx.random.normal((S, D))), INDEX)
    queries = IndexQueries(
        q=mx.random.normal((Q, H, D)),
        head_weights=mx.random.normal((Q, H)),
        visible=mx.array(np.arange(S - Q, S, dtype=np.int32)),
    )
    mx.eval(keys.codes, keys.scales, queries.q, queries.head_weights)
    found: list[int] = []
    for _ in range(MEASURES):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(choose_rows(queries, keys, k=16, block_size=8)[0])
        found.append(mx.get_peak_memory() - before)
    return max(found)


def test_a_step_scans_the_index_keys_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tiles so small that those in flight do not count.
    monkeypatch.setattr(mlx_engine.ops.indexer, "SCAN_VALUES", 1 << 15)
    short, long = _choice_bytes(1, 1 << 17), _choice_bytes(1, 1 << 18)
    # What is left is the scores and their sort keys, not the heads' products nor the keys' 68 B.
    assert long - short < 48 * (1 << 17)


def test_the_scan_of_a_chunk_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_engine.ops.indexer, "SCAN_VALUES", 1 << 19)
    short, long = (_choice_bytes(128, S) for S in (1 << 13, 1 << 15))
    # All scores of the longer context would take four times as much.
    assert long < 2 * short


def test_prefills_by_turns_take_no_more_than_the_memory_check_counts() -> None:
    subject = build(tiny_config(max_position_embeddings=1 << 20), 0)
    config, chunk_tokens = subject.config, 256
    model = Model(config, subject.model.weights, mx.bfloat16)
    sessions = Sessions(
        model,
        subject.reader,
        budget_bytes=memory.default_session_bytes(config, 4096),
        chunk_tokens=chunk_tokens,
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 255, (memory.ANSWERS, chunk_tokens * 5 // 2)).tolist()
    readings = [sessions.read(prompt) for prompt in prompts]
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        for reading in readings:
            next(reading)
    taken = mx.get_peak_memory() - before
    half_read = [live.session for live in sessions._room.lives]  # pyright: ignore[reportPrivateUsage]
    assert all(not session.is_whole for session in half_read)
    needed = memory.needs(config, len(prompts[0]), chunk_tokens)
    allowed = needed.total_bytes - needed.weights_bytes - needed.state_bytes
    assert taken <= allowed + sessions.n_bytes
