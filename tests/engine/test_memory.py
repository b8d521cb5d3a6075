"""What a step allocates beside its state, as the context grows."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_engine.model
from mlx_engine.formats import INDEX
from mlx_engine.ops.indexer import IndexQueries, choose_rows
from mlx_engine.session import Session
from tests.engine.support import Subject, build, tiny_config


def _long_session(subject: Subject, tokens: int) -> Session:
    """A session whose compressed rows are random, as long as if it had read so many tokens."""
    config = subject.config
    session = Session(subject.model, subject.reader)
    session.sync(list(range(3, 19)))
    state = session.state
    for source in config.kv_source_layer_ids:
        for rows, fmt, width in (
            (state.compressed[source], state.formats.compressed, config.head_dim),
            (state.index_keys[source], state.formats.index, config.index_head_dim),
        ):
            count = tokens // config.compress_ratios[source] - rows.length
            rows.append(fmt.pack(mx.random.normal((count, width))))
    for window in state.windows:
        window.end += tokens - state.position
    state.position = tokens
    # Two steps: the first may grow a buffer, and an open group closes.
    for token_id in (5, 6):
        mx.eval(session.step(token_id))
    return session


def _step_bytes(session: Session) -> int:
    """The most bytes that a step holds beyond what was held before it."""
    spare = [
        rows.buffer.shape[0] - rows.length
        for rows in (*session.state.compressed.values(), *session.state.index_keys.values())
    ]
    assert min(spare) > 0, "this step would grow a buffer"
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(session.step(7), *session.state.arrays())
    return mx.get_peak_memory() - before


def test_a_step_copies_nothing_that_grows_with_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = build(tiny_config(max_position_embeddings=1 << 20), 0)

    # The scan of the index keys is the one thing that reads all of the context; its own bound is
    # tested below.
    def first_rows(queries: IndexQueries, *_: Any, k: int, **__: Any) -> tuple[mx.array, None]:
        return mx.broadcast_to(mx.arange(k, dtype=mx.int32), (queries.q.shape[0], k)), None

    monkeypatch.setattr(mlx_engine.model, "choose_rows", first_rows)
    short, long = (_step_bytes(_long_session(subject, n)) for n in (1_000, 100_000))
    assert long <= short + 4096


def test_the_index_scan_of_a_chunk_is_bounded() -> None:
    H, D, k = 8, 32, 16
    peaks: list[int] = []
    for S in (1 << 13, 1 << 15):
        Q = 128
        keys = INDEX.pack(mx.random.normal((S, D)))
        queries = IndexQueries(
            q=mx.random.normal((Q, H, D)),
            head_weights=mx.random.normal((Q, H)),
            visible=mx.array(np.arange(S - Q, S, dtype=np.int32)),
        )
        mx.eval(keys, queries.q, queries.head_weights)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(choose_rows(queries, keys, INDEX, k=k, block_size=8)[0])
        peaks.append(mx.get_peak_memory() - before)
    # All scores of the longer context would take four times as much.
    assert peaks[1] < 2 * peaks[0]
