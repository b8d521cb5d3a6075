"""Choosing compressed rows and attending to them, against plain float64 arithmetic."""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_engine.config_file import parse_config
from mlx_engine.formats import INDEX, CacheFormats
from mlx_engine.ops.attention import SelectedRows, WindowRows, sparse_attention
from mlx_engine.ops.indexer import (
    IndexKeys,
    IndexQueries,
    candidate_blocks,
    choose_rows,
    index_scores,
    mask_candidates,
    select_rows,
)
from mlx_engine.ops.rope import rotation
from mlx_engine.ops.topk import top_k
from tests.reference.random_tensors import TINY_CONFIG
from tests.reference.rope import rope, rope_frequencies
from tests.unit.arrays import INF, Float, close, f32, host, normal

TINY = parse_config(TINY_CONFIG)
FORMATS = CacheFormats()
ODD_SIZES = [1, 31, 33, 63, 65, 127, 129]
# Heads and their width.
H, D = 3, 64


# Selection


def test_top_k_gives_ties_to_the_lowest_index() -> None:
    scores = f32(
        [
            [1, 3, 2, 3, 3, 0],
            [0.0, -0.0, 0.0, -0.0, -1, 0.0],
            [-0.0, 0.0, -INF, -0.0, 0.0, -INF],
            [-INF, -INF, 5, -INF, -INF, -INF],
            [-2, -1, -2, -1, -3, -2],
            [INF, 1e38, INF, -1e38, INF, INF],
        ]
    )
    expected = [[1, 3, 4], [0, 1, 2], [0, 1, 3], [0, 1, 2], [0, 1, 3], [0, 2, 4]]
    assert np.array(top_k(scores, 3)).tolist() == expected
    assert np.array(top_k(scores, 6)).tolist() == [list(range(6))] * 6


few_scores = st.lists(st.sampled_from([-INF, -2.5, -0.0, 0.0, 1e-40, 1.0, INF]), min_size=1)


@settings(max_examples=150, deadline=None)
@given(few_scores | st.lists(st.floats(width=32, allow_nan=False), min_size=1), st.integers(1, 9))
def test_top_k_is_a_stable_sort(scores: list[float], k: int) -> None:
    k = min(k, len(scores))
    row = np.array(scores, np.float32)
    best = np.sort(np.argsort(-row.astype(np.float64), kind="stable")[:k])
    assert np.array(top_k(mx.array(row[None]), k)).tolist() == [best.tolist()]


def test_select_rows_leaves_out_what_is_not_visible() -> None:
    scores = f32([[-INF, 2, -INF, 7], [-INF] * 4, [1, 1, 1, 1]])
    found = np.sort(host(select_rows(scores, 3)), axis=1)
    assert found.tolist() == [[-1, 1, 3], [-1, -1, -1], [0, 1, 2]]
    assert np.array(select_rows(scores, 9)).shape == (3, 4)


def listed(chosen: mx.array) -> list[list[int]]:
    """The indices of each row without the -1 of none."""
    return [[i for i in row if i >= 0] for row in np.array(chosen, np.int32).tolist()]


def test_candidate_blocks_keep_the_best_and_the_newest() -> None:
    scores = np.full((5, 7), -INF)
    visible = np.array([0, 1, 4, 7, 7])
    for query, n in enumerate(visible):
        scores[query, :n] = [5, 1, 9, 2, 3, 8, -4][:n]
    scores[4] = 0  # ties go to the lowest
    two = candidate_blocks(f32(scores), mx.array(visible), block_size=2, topk_blocks=2)
    # Of four blocks the newest is half a block with the worst score.
    assert listed(two) == [[], [0], [0, 1], [1, 3], [0, 3]]
    every = candidate_blocks(f32(scores), mx.array(visible), block_size=2, topk_blocks=9)
    assert listed(every) == [[], [0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    masked = host(mask_candidates(f32(scores), two, 2))
    inside = np.zeros((5, 7), np.bool_)
    inside[1, 0] = inside[2, :4] = inside[3, [2, 3, 6]] = inside[4, [0, 1, 6]] = True
    assert np.array_equal(masked, np.where(inside, scores, -INF))


def index_queries(Q: int, S: int) -> tuple[IndexQueries, IndexKeys, NDArray[np.float64]]:
    """Queries, keys, and the scores in float64, -inf where not visible."""
    codes, scales = INDEX.encode(f32(normal(0, S, D)))
    keys = IndexKeys(codes, scales, INDEX)
    key = host(INDEX.decode(codes, scales)).astype(np.float64)
    q = host(INDEX.decode(*INDEX.encode(f32(normal(1, Q, H, D))))).astype(np.float64)
    weights = normal(2, Q, H)
    visible = np.random.default_rng(3).integers(0, S + 1, Q)
    scores = (weights[..., None] * np.maximum(q @ key.T, 0)).sum(axis=1)
    scores = np.where(np.arange(S) < visible[:, None], scores, -INF)
    return IndexQueries(f32(q), f32(weights), mx.array(visible)), keys, scores


@pytest.mark.parametrize(("Q", "S"), [(1, 1), (3, 33), (65, 7), (31, 129)])
def test_index_scores(Q: int, S: int) -> None:
    queries, keys, expected = index_queries(Q, S)
    found = host(index_scores(queries.q, queries.head_weights, keys, queries.visible))
    assert np.array_equal(found > -INF, expected > -INF)
    close(f32(np.where(found > -INF, found, 0)), np.where(expected > -INF, expected, 0))


@pytest.mark.parametrize("tile_values", [1, 2 * H * 50, 1 << 20])
def test_choose_rows_in_tiles_of_any_size(
    tile_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_engine.ops.indexer.SCAN_VALUES", tile_values)
    Q, S, k, size = 33, 50, 6, 4
    queries, keys, scores = index_queries(Q, S)
    choose = partial(choose_rows, queries, keys, k=k, block_size=size)
    rows, none = choose()
    assert none is None
    again, blocks = choose(topk_blocks=2)
    assert blocks is not None and mx.array_equal(again, rows)
    few, _ = choose(candidates=blocks)

    def best(scores: NDArray[Any]) -> list[list[int]]:
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        found = np.take_along_axis(scores, order, axis=1) > -INF
        return [sorted(o[f].tolist()) for o, f in zip(order, found, strict=True)]

    assert listed(rows) == best(scores)
    expected = candidate_blocks(f32(scores), queries.visible, block_size=size, topk_blocks=2)
    assert listed(blocks) == listed(expected)
    assert listed(few) == best(host(mask_candidates(f32(scores), expected, size)))
    assert listed(few) != listed(rows)


# Attention


def rounded_rows(kind: str, seed: int, n: int) -> tuple[mx.array, Float]:
    """Packed rows and their values."""
    fmt = getattr(FORMATS, kind)
    rows = fmt.pack(f32(normal(seed, n, D)))
    return rows, host(fmt.unpack(rows, D)).astype(np.float64)


def attend_plainly(q: Float, keys: Float, seen: NDArray[np.bool_], sinks: Float) -> Float:
    """softmax(q k / sqrt(D)) k over the keys [S, D] that each query sees [Q, S], with a sink."""
    scores = np.where(seen[:, None], q @ keys.T / np.sqrt(D), -INF)
    top = np.maximum(scores.max(-1, keepdims=True), sinks[None, :, None])
    e = np.exp(scores - top)
    return e / (e.sum(-1, keepdims=True) + np.exp(sinks[None, :, None] - top)) @ keys


def check_attention(
    Q: int, W: int, first_query: int, S: int, chosen: str, *, is_ring: bool = False
) -> None:
    end, oldest = first_query + Q, max(0, first_query - W + 1)
    position = np.arange(first_query, end)
    packed, window = rounded_rows("window", 1, end - oldest)
    at_position = np.arange(oldest, end)
    age = position[:, None] - at_position
    seen, keys, selected = (age >= 0) & (age < W), window, None
    if chosen != "none":
        rows, values = rounded_rows("compressed", 2, S)
        visible = np.random.default_rng(3).integers(0, S + 1, Q)
        mask, ids = np.arange(S) < visible[:, None], None
        if chosen == "some":
            k = min(5, S)
            listed = np.argsort(normal(4, Q, S), axis=1)[:, :k]
            listed = np.where(listed < visible[:, None], listed, -1)
            mask = (np.arange(S)[:, None] == listed[:, None]).any(axis=-1)
            ids = mx.array(listed.astype(np.int32))
        selected = SelectedRows(rows, mx.array(visible.astype(np.int32)), ids)
        seen, keys = np.concatenate([seen, mask], axis=1), np.concatenate([window, values])
    q, sinks = 2 * normal(5, Q, H, D), normal(6, H)
    # The output is turned back at the query's position.
    frequencies = rope_frequencies(TINY.qk_rope_head_dim, TINY.rope_theta, None)
    expected = rope(attend_plainly(q, keys, seen, sinks), position, frequencies, inverse=True)
    if is_ring:
        assert Q == 1 and end - oldest == W
        packed = mx.roll(packed, end % W, 0)
    found = sparse_attention(
        f32(q),
        first_query,
        WindowRows(packed, None if is_ring else oldest),
        selected,
        f32(sinks),
        sliding_window=W,
        at=rotation(TINY, position, is_compressed=False),
        formats=FORMATS,
    )
    close(found, expected, 3e-6)


@pytest.mark.parametrize("Q", ODD_SIZES)
@pytest.mark.parametrize("chosen", ["none", "all", "some"])
def test_attention_of_odd_sizes(Q: int, chosen: str) -> None:
    check_attention(Q, W=16, first_query=0, S=33, chosen=chosen)
    check_attention(Q, W=16, first_query=100, S=65, chosen=chosen)


@pytest.mark.parametrize("W", ODD_SIZES)
def test_attention_at_window_boundaries(W: int) -> None:
    for first_query in {0, 1, W - 1, W, W + 1}:
        check_attention(1, W, first_query, S=1, chosen="all")
        check_attention(67, W, first_query, S=1, chosen="some")
    check_attention(1, W, first_query=2 * W, S=7, chosen="some", is_ring=True)


def test_a_sink_takes_weight_and_adds_no_value() -> None:
    rows, values = rounded_rows("window", 0, 1)
    at = rotation(TINY, np.array([0]), is_compressed=False)
    for sink, share in ((-100.0, 1.0), (0.0, 0.5), (100.0, 0.0)):
        out = sparse_attention(
            mx.zeros((1, 1, D)),
            0,
            WindowRows(rows, 0),
            None,
            mx.array([sink]),
            sliding_window=4,
            at=at,
            formats=FORMATS,
        )
        close(out[0], share * values)
