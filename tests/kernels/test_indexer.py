"""The indexer's kernels against float64 and, choice for choice, against their reference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine.formats import INDEX
from mlx_engine.ops import indexer, launch, topk
from mlx_engine.ops.indexer import IndexKeys, IndexQueries, choose_rows, choose_rows_reference
from mlx_engine.ops.indexer_bytes import choose_rows_traffic
from mlx_engine.ops.topk import Selection, select_metal
from tests.kernels.counted import Launches, check_traffic
from tests.msl import emulator
from tests.msl.emulator import Order
from tests.unit.arrays import INF, f32, host
from tests.unrounded import Unrounded

Ints = NDArray[np.int64]
ODD_SIZES = [1, 31, 33, 63, 65, 127, 129]


def packed_keys(S: int, D: int, *, low: int, high: int, seed: int = 0) -> IndexKeys:
    """Keys of random codes, all sixteen of them, with scale bytes low .. high."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << 32, (S, D // 8), dtype=np.uint32)
    scales = random.integers(low, high + 1, (S, D // 32)).astype(np.uint8)
    return IndexKeys(mx.array(codes), mx.array(scales), INDEX)


def some_queries(Q: int, S: int, H: int, D: int, dtype: mx.Dtype = mx.float32) -> IndexQueries:
    random = np.random.default_rng(1)
    q = INDEX.decode(*INDEX.encode(f32(random.standard_normal((Q, H, D)))))
    weights = f32(random.standard_normal((Q, H)))
    visible = random.integers(0, S + 1, Q)
    visible[-1] = S
    return IndexQueries(q.astype(dtype), weights, mx.array(visible.astype(np.int32)))


def whole_queries(Q: int, S: int, H: int, D: int) -> IndexQueries:
    """Small integers: whatever the order of a sum, f32 holds it, and ties are many."""
    random = np.random.default_rng(2)
    q = random.integers(-2, 3, (Q, H, D))
    visible = np.maximum(S - 3 * np.arange(Q)[::-1], 0)
    weights = random.integers(-1, 2, (Q, H))
    return IndexQueries(f32(q), f32(weights), mx.array(visible.astype(np.int32)))


def check_scores(queries: IndexQueries, keys: IndexKeys) -> None:
    """Within the error of a f32 sum in any order, whose every term is exact."""
    _, H, D = queries.q.shape
    S = keys.codes.shape[0]
    found = host(indexer.index_scores_metal(queries, keys, None, 1)).astype(np.float64)
    q = host(queries.q).astype(np.float64)
    key = host(INDEX.decode(keys.codes, keys.scales)).astype(np.float64)
    weights = host(queries.head_weights).astype(np.float64)
    expected = (weights[..., None] * np.maximum(q @ key.T, 0)).sum(axis=1)
    size = (np.abs(weights)[..., None] * (np.abs(q) @ np.abs(key).T)).sum(axis=1)
    seen: NDArray[np.bool_] = np.arange(S) < host(queries.visible)[:, None]
    assert np.array_equal(found > -INF, seen)
    bound = (D + H + 1) * 2.0**-24 * size
    assert (np.abs(found - expected)[seen] <= bound[seen]).all()


@pytest.mark.parametrize("S", ODD_SIZES)
def test_scores_of_odd_sizes(S: int, kernels_on: Launches) -> None:
    check_scores(some_queries(3, S, 9, 64), packed_keys(S, 64, low=122, high=130))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("H", "D"), [(1, 64), (4, 32), (32, 128), (33, 96)])
def test_scores_of_every_width(H: int, D: int, dtype: mx.Dtype, kernels_on: Launches) -> None:
    check_scores(some_queries(2, 40, H, D, dtype), packed_keys(40, D, low=122, high=130))


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 240), (240, 240)])
def test_scores_of_extreme_scales(low: int, high: int, kernels_on: Launches) -> None:
    check_scores(some_queries(1, 33, 3, 64), packed_keys(33, 64, low=low, high=high))


def test_scores_of_many_tiles(monkeypatch: pytest.MonkeyPatch, kernels_on: Launches) -> None:
    """Simdgroups that walk several tiles, and tiles that their query does not see."""
    monkeypatch.setattr(indexer, "_THREADGROUPS", 3)
    check_scores(some_queries(2, 700, 4, 32), packed_keys(700, 32, low=122, high=130))


def best(scores: NDArray[Any], k: int) -> list[list[int]]:
    """The k best of each row by a stable sort, ascending, without those at -inf."""
    order = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :k]
    return [sorted(i for i in o if row[i] > -INF) for o, row in zip(order, scores, strict=True)]


def listed(ids: mx.array) -> list[list[int]]:
    """The ids of each row without the -1 of none."""
    return [[i for i in row if i >= 0] for row in np.array(ids, np.int32).tolist()]


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of at most 512 entries, and at most 1024 survivors of them in the last launch."""
    monkeypatch.setattr(topk, "_THREADS", 32)


# The entries of a thread are 1 to 16, of which the last four cut parts.
@pytest.mark.parametrize(
    ("N", "k", "launches"),
    [
        *((1, 1, 1), (9, 1, 1), (31, 31, 1), (33, 5, 1), (127, 64, 1), (129, 6, 1), (512, 40, 1)),
        *((513, 200, 2), (700, 20, 2), (1300, 250, 3), (5000, 200, 4)),
    ],
)
def test_selection(
    N: int, k: int, launches: int, monkeypatch: pytest.MonkeyPatch, kernels_on: Launches
) -> None:
    small_parts(monkeypatch)
    random = np.random.default_rng(N)
    few = np.array([-INF, -2.5, -0.0, 0.0, 1e-40, 1.0, INF])
    scores = np.stack(
        [
            random.choice(few, N),
            random.standard_normal(N),
            random.choice(few[2:4], N),
            np.where(random.random(N) < 0.9, -INF, 1.0),
            -1 - 1e-7 * random.random(N),
            np.full(N, -INF),
        ]
    ).astype(np.float32)
    ids = select_metal(Selection.ROWS, (mx.array(scores),), k)
    assert mx.array_equal(ids, indexer.select_rows(mx.array(scores), k))
    assert listed(ids) == best(scores, k)
    assert kernels_on is None or len(kernels_on) == launches


@pytest.mark.parametrize("k", [9, 512, 2048])
@pytest.mark.parametrize("N", [16_384, 16_385, 131_072, 524_288, 1_048_576])
def test_no_launch_of_a_selection_needs_too_many_registers(N: int, k: int) -> None:
    """1024 threads with 32 entries each could exceed those of an M1; all entries have a place."""
    launches: list[tuple[int, int, int]] = []

    def factory(**_: Any) -> Callable[..., list[mx.array]]:
        def run(**call: Any) -> list[mx.array]:
            (threads, _, _), share = call["threadgroup"], dict(call["template"])["SHARE"]
            entries = call["inputs"][0].shape[1]
            groups = call["grid"][0] // threads
            launches.append((threads, share, groups))
            assert groups * threads * share >= entries
            return [mx.zeros(shape, mx.int32) for shape in call["output_shapes"]]

        return run

    with launch.using(factory):
        select_metal(Selection.ROWS, (mx.zeros((1, N)),), k)
    assert max(threads * share for threads, share, _ in launches) <= 1024 * 16
    assert max(share for _, share, _ in launches) <= 16
    assert launches[-1][2] == 1
    assert len(launches) <= (1 if N == 16_384 else 2 if N * k <= 524_288 * 512 else 3)


@pytest.mark.parametrize("order", [Order.REVERSE, Order.RANDOM])
def test_selection_in_any_order_of_threads(
    order: Order, monkeypatch: pytest.MonkeyPatch, kernels_on: Launches
) -> None:
    monkeypatch.setattr(topk, "_THREADS", 64)
    scores = np.random.default_rng(5).integers(0, 9, (1, 1100)).astype(np.float32)
    with emulator.using(order=order):
        assert listed(select_metal(Selection.ROWS, (mx.array(scores),), 99)) == best(scores, 99)


@pytest.mark.parametrize(
    ("Q", "S", "size", "k"), [(4, 9, 2, 5), (9, 38, 8, 5), (2, 129, 8, 5), (1, 1301, 2, 2)]
)
def test_choices_are_the_reference_s(
    Q: int, S: int, size: int, k: int, monkeypatch: pytest.MonkeyPatch, kernels_on: Launches
) -> None:
    """Rows, blocks, and rows of blocks, with one and several launches for a choice.

    Arrays of fewer than 8 elements lie in another address space than longer ones.
    """
    small_parts(monkeypatch)
    H, D = 4, 32
    queries, keys = whole_queries(Q, S, H, D), packed_keys(S, D, low=126, high=128)
    blocks = None
    for topk_blocks in (4, None):
        found, found_blocks = choose_rows(
            queries, keys, k=k, block_size=size, topk_blocks=topk_blocks, candidates=blocks
        )
        rows, chosen_blocks = choose_rows_reference(
            queries, keys, k=k, block_size=size, topk_blocks=topk_blocks, candidates=blocks
        )
        assert found.shape == rows.shape
        assert listed(found) == listed(rows)
        if chosen_blocks is not None:
            assert found_blocks is not None and mx.array_equal(found_blocks, chosen_blocks)
            blocks = found_blocks


def test_candidates_in_any_place(kernels_on: Launches) -> None:
    """No block among the blocks, and a last block that reaches beyond the rows."""
    queries, keys = whole_queries(2, 37, 3, 64), packed_keys(37, 64, low=126, high=128)
    blocks = mx.array([[-1, 2, 7, -1, 9], [-1, -1, -1, 0, -1]], dtype=mx.int32)
    for k in (6, 36):
        found, _ = choose_rows(queries, keys, k=k, block_size=4, candidates=blocks)
        rows, _ = choose_rows_reference(queries, keys, k=k, block_size=4, candidates=blocks)
        assert listed(found) == listed(rows)


def test_queries_in_tiles(monkeypatch: pytest.MonkeyPatch, kernels_on: Launches) -> None:
    queries, keys = whole_queries(5, 50, 3, 64), packed_keys(50, 64, low=126, high=128)
    monkeypatch.setattr(indexer, "_TILE_SCORES", 2 * 50)
    rows, blocks = choose_rows(queries, keys, k=6, block_size=4, topk_blocks=3)
    among, _ = choose_rows(queries, keys, k=6, block_size=4, candidates=blocks)
    expected, expected_blocks = choose_rows_reference(
        queries, keys, k=6, block_size=4, topk_blocks=3
    )
    expected_among, _ = choose_rows_reference(
        queries, keys, k=6, block_size=4, candidates=expected_blocks
    )
    assert mx.array_equal(rows, expected)
    assert blocks is not None and expected_blocks is not None
    assert mx.array_equal(blocks, expected_blocks)
    assert listed(among) == listed(expected_among)


def test_a_step_at_the_released_widths(kernels_on: Launches) -> None:
    S, H, D, k = 1001, 32, 128, 512
    queries, keys = whole_queries(1, S, H, D), packed_keys(S, D, low=126, high=128)
    rows, _ = choose_rows(queries, keys, k=k, block_size=8)
    expected, _ = choose_rows_reference(queries, keys, k=k, block_size=8)
    assert mx.array_equal(rows, expected)
    if kernels_on is not None:
        assert [report.kernel for report in kernels_on] == ["index_scores", "best_rows"]
        codes = kernels_on[0].traffic["codes"]
        assert codes.loaded == codes.loaded_unique == S * D // 2


def test_the_start_checks_the_kernels(kernels_on: Launches) -> None:
    with emulator.using(checked=False):
        assert indexer.agrees()


@pytest.mark.parametrize(("H", "is_fitting"), [(56, True), (57, False), (64, False)])
def test_queries_too_wide_for_a_threadgroup_stay_with_the_reference(
    H: int, is_fitting: bool, kernels_on: Launches
) -> None:
    """The emulator refuses a threadgroup that is too large."""
    queries, keys = whole_queries(1, 20, H, 128), packed_keys(20, 128, low=126, high=128)
    found, _ = choose_rows(queries, keys, k=6, block_size=4)
    rows, _ = choose_rows_reference(queries, keys, k=6, block_size=4)
    assert mx.array_equal(found, rows)
    assert kernels_on is None or bool(kernels_on) == is_fitting


def test_other_formats_stay_with_the_reference(kernels_on: Launches) -> None:
    queries = whole_queries(2, 20, 3, 64)
    fmt = Unrounded()
    keys = IndexKeys(*fmt.encode(mx.ones((20, 64))), fmt)
    assert choose_rows(queries, keys, k=3, block_size=4)[0].shape == (2, 3)
    assert not kernels_on


@pytest.mark.parametrize(
    ("Q", "S", "k", "topk_blocks", "candidate_blocks"),
    [
        *((1, 900, 100, None, None), (1, 1100, 250, None, None), (1, 2000, 60, 50, None)),
        *((1, 2000, 60, None, 100), (1, 700, 60, None, 80), (1, 400, 60, None, None)),
        *((1, 4800, 60, 50, None), (1, 300, 120, None, 30)),
        *((3, 400, 60, None, None), (3, 1100, 250, None, None), (3, 4800, 60, 50, None)),
        *((3, 900, 60, 50, None), (3, 2000, 60, None, 80), (3, 900, 120, None, 30)),
    ],
)
def test_bytes(
    Q: int,
    S: int,
    k: int,
    topk_blocks: int | None,
    candidate_blocks: int | None,
    monkeypatch: pytest.MonkeyPatch,
    kernels_on: Launches,
) -> None:
    """Every query sees every row, and has candidates of its own.

    Which blocks the survivors lie in is in the scores; most of them are met, within the 1%.
    """
    small_parts(monkeypatch)
    H, D, size = 8, 64, 8
    queries, keys = whole_queries(Q, S, H, D), packed_keys(S, D, low=126, high=128)
    queries = replace(queries, visible=mx.full((Q,), S, dtype=mx.int32))
    candidates = None
    if candidate_blocks is not None:
        candidates = mx.arange(Q * candidate_blocks, dtype=mx.int32).reshape(Q, -1)
    choose_rows(queries, keys, k=k, block_size=size, topk_blocks=topk_blocks, candidates=candidates)
    expected = choose_rows_traffic(
        *(Q, S, H, D, k),
        value_bytes=4,
        block_size=size,
        topk_blocks=topk_blocks,
        candidate_blocks=candidate_blocks,
    )
    check_traffic(kernels_on, *expected, rel=0.01)
