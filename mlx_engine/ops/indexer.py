"""The indexer: which compressed rows a query attends to (section 3.6).

Shapes: Q queries, H index heads, D index_head_dim, S compressed rows, k index_topk, B
candidate_topk_blocks.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlx_engine.formats import INDEX, RowFormat
from mlx_engine.memory import SCAN_VALUES
from mlx_engine.ops import launch
from mlx_engine.ops.topk import Selection, select_metal, top_k

# Scores that the kernels hold at once.
_TILE_SCORES = 1 << 24
THREADS = 256
_KEYS_OF_THREADGROUP = 128
# As in the kernels' file.
_SCORE_SIMDGROUPS = 8
_KEY_PITCH = 40
# Enough for 80 cores, and few enough that staging the query does not count.
_THREADGROUPS = 640


@dataclass(frozen=True)
class IndexQueries:
    """q: [Q, H, D], rounded as the keys are; head_weights: f32 [Q, H] with both scale factors;
    visible: int32 [Q], how many rows each query sees.
    """

    q: mx.array
    head_weights: mx.array
    visible: mx.array


@dataclass(frozen=True)
class IndexKeys:
    """S keys of one source: codes uint32 [S, ..] and scales uint8 [S, ..] of a format."""

    codes: mx.array
    scales: mx.array
    fmt: RowFormat


@launch.falls_back
def choose_rows(
    queries: IndexQueries,
    keys: IndexKeys,
    *,
    k: int,
    block_size: int,
    topk_blocks: int | None = None,
    candidates: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """Score the keys and choose the k best rows of every query.

    With `topk_blocks` the best blocks are chosen too, for later layers; with `candidates`, int32
    [Q, B], only rows of those blocks can be chosen. Returns the rows int32 [Q, min(k, S)] and the
    blocks int32 [Q, B] or None, both ascending with -1 for none, wherever it stands.
    """
    _, H, D = queries.q.shape
    is_fitting = _threadgroup_bytes(H, D) <= launch.MOST_THREADGROUP_BYTES
    # MLX would put fewer than 8 words of codes in another address space.
    if launch.is_on("indexer") and keys.fmt == INDEX and keys.codes.size >= 8 and is_fitting:
        choose = choose_rows_metal
    else:
        choose = choose_rows_reference
    return choose(
        queries,
        keys,
        k=k,
        block_size=block_size,
        topk_blocks=topk_blocks,
        candidates=candidates,
    )


def choose_rows_reference(
    queries: IndexQueries,
    keys: IndexKeys,
    *,
    k: int,
    block_size: int,
    topk_blocks: int | None = None,
    candidates: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """`choose_rows` in MLX's operations."""
    Q, H, _ = queries.q.shape
    step = max(1, SCAN_VALUES // (H * keys.codes.shape[0]))
    rows: list[mx.array] = []
    blocks: list[mx.array] = []
    for first in range(0, Q, step):
        tile = slice(first, first + step)
        visible = queries.visible[tile]
        scores = index_scores(queries.q[tile], queries.head_weights[tile], keys, visible)
        if topk_blocks is not None:
            blocks.append(
                candidate_blocks(scores, visible, block_size=block_size, topk_blocks=topk_blocks)
            )
        if candidates is not None:
            scores = mask_candidates(scores, candidates[tile], block_size)
        rows.append(select_rows(scores, k))
    return mx.concatenate(rows), mx.concatenate(blocks) if blocks else None


def index_scores(
    q: mx.array, head_weights: mx.array, keys: IndexKeys, visible: mx.array
) -> mx.array:
    """score(p, j) = sum_h w_h relu(q_h . k_j), -inf where p does not see j: f32 [Q, S]."""
    Q, H, D = q.shape
    S = keys.codes.shape[0]
    flat = q.astype(mx.float32).reshape(-1, D)
    step = max(1, SCAN_VALUES // (Q * H))
    parts: list[mx.array] = []
    for first in range(0, S, step):
        rows = slice(first, first + step)
        dots = keys.fmt.product(flat, keys.codes[rows], keys.scales[rows]).reshape(Q, H, -1)
        parts.append((head_weights[:, None, :] @ mx.maximum(dots, 0))[:, 0, :])
    scores = mx.concatenate(parts, axis=-1)
    return mx.where(mx.arange(S) < visible[:, None], scores, -mx.inf)


def candidate_blocks(
    scores: mx.array, visible: mx.array, *, block_size: int, topk_blocks: int
) -> mx.array:
    """The blocks of rows that later index layers may choose from: int32 [Q, B], -1 for none.

    A block's score is its best row's; the block of the newest visible row is always in.
    scores: f32 [Q, S] with -inf where not visible.
    """
    Q, S = scores.shape
    blocks = -(-S // block_size)
    padded = mx.pad(
        scores, [(0, 0), (0, blocks * block_size - S)], constant_values=mx.array(-mx.inf)
    )
    best = mx.max(padded.reshape(Q, blocks, block_size), axis=-1)
    newest = (visible - 1) // block_size
    is_newest = (mx.arange(blocks) == newest[:, None]) & (visible[:, None] > 0)
    return select_rows(mx.where(is_newest, mx.inf, best), topk_blocks)


def mask_candidates(scores: mx.array, candidates: mx.array, block_size: int) -> mx.array:
    """Put -inf wherever a row lies in none of the blocks `candidates` [Q, B]: f32 [Q, S]."""
    Q, S = scores.shape
    blocks = -(-S // block_size)
    # The column after the last block takes the places of no block.
    at = mx.where(candidates < 0, blocks, candidates)
    inside = mx.put_along_axis(
        mx.zeros((Q, blocks + 1), dtype=mx.bool_), at, mx.array(True), axis=-1
    )
    return mx.where(mx.repeat(inside[:, :blocks], block_size, axis=-1)[:, :S], scores, -mx.inf)


def select_rows(scores: mx.array, k: int) -> mx.array:
    """The k best entries of each row, ascending, -1 for one at -inf: int32 [Q, min(k, S)]."""
    ids = top_k(scores, min(k, scores.shape[-1]))
    return mx.where(mx.take_along_axis(scores, ids, axis=-1) > -mx.inf, ids, -1)


def choose_rows_metal(
    queries: IndexQueries,
    keys: IndexKeys,
    *,
    k: int,
    block_size: int,
    topk_blocks: int | None = None,
    candidates: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """`choose_rows` over keys packed as INDEX: a launch for the scores, one or two for each choice.

    With candidates only their rows are read and scored.
    """
    Q, S = queries.q.shape[0], keys.codes.shape[0]
    k = min(k, S)
    N = S if candidates is None else candidates.shape[1] * block_size
    step = max(1, _TILE_SCORES // N)
    rows: list[mx.array] = []
    blocks: list[mx.array] = []
    for first in range(0, Q, step):
        tile = slice(first, first + step)
        some = IndexQueries(queries.q[tile], queries.head_weights[tile], queries.visible[tile])
        among = None if candidates is None else candidates[tile]
        scores = index_scores_metal(some, keys, among, block_size)
        if topk_blocks is not None:
            assert among is None, "candidates are chosen among all rows"
            best = min(topk_blocks, -(-S // block_size))
            chosen = (scores, some.visible)
            blocks.append(select_metal(Selection.BLOCKS, chosen, best, block_size))
        if among is None:
            rows.append(select_metal(Selection.ROWS, (scores,), k, block_size))
        else:
            rows.append(select_metal(Selection.ROWS_OF_BLOCKS, (scores, among), k, block_size))
    return _joined(rows), _joined(blocks) if blocks else None


def index_scores_metal(
    queries: IndexQueries, keys: IndexKeys, blocks: mx.array | None, block_size: int
) -> mx.array:
    """Scores of all S rows, f32 [Q, S], or of those of `blocks` int32 [Q, B]: [Q, B * block_size].

    -inf where a query does not see the row, and for the rows of block -1.
    """
    Q, H, D = queries.q.shape
    inputs = [queries.q, queries.head_weights, keys.codes, keys.scales, queries.visible]
    template: list[tuple[str, mx.Dtype | int]] = [("T", queries.q.dtype), ("H", H), ("D", D)]
    kernel, rows = _SCORES, keys.codes.shape[0]
    if blocks is not None:
        kernel, rows = _SCORES_OF_BLOCKS, blocks.shape[1] * block_size
        inputs.append(blocks)
        template.append(("SIZE", block_size))
    groups = threadgroups_of(Q, rows)
    (scores,) = kernel(
        inputs,
        template=template,
        grid=(groups * THREADS, Q, 1),
        threadgroup=(THREADS, 1, 1),
        shapes=[(Q, rows)],
        dtypes=[mx.float32],
    )
    return scores


def threadgroups_of(Q: int, rows: int) -> int:
    """Threadgroups that share a query's rows."""
    return min(-(-rows // _KEYS_OF_THREADGROUP), max(1, _THREADGROUPS // Q))


def _threadgroup_bytes(H: int, D: int) -> int:
    """Of the scores: queries in bf16, and for each simdgroup keys or the products of 8 of them."""
    heads = -(-H // 8) * 8
    return 2 * heads * (D + 8) + 4 * _SCORE_SIMDGROUPS * 8 * max(_KEY_PITCH, heads + 4)


_BODY = """
    threadgroup bfloat16_t queries[query_values<H, D>()];
    threadgroup float own[SCORE_SIMDGROUPS * own_floats<H>()];
    const uint2 at = threadgroup_position_in_grid.xy;
    const uint N = {N};
    index_scores<T, H, D>(
        q + at.y * H * D, head_weights + at.y * H, codes, scales, int(visible[at.y]), {rows}, N,
        scores + at.y * N, queries, own + simdgroup_index_in_threadgroup * own_floats<H>(),
        at.x * SCORE_SIMDGROUPS + simdgroup_index_in_threadgroup,
        threadgroups_per_grid.x * SCORE_SIMDGROUPS, thread_index_in_threadgroup,
        threads_per_threadgroup.x, thread_index_in_simdgroup);"""
_INPUTS = ("q", "head_weights", "codes", "scales", "visible")
_SCORES = launch.Kernel(
    "indexer",
    "index_scores",
    _INPUTS,
    ("scores",),
    _BODY.format(N="uint(codes_shape[0])", rows="EveryRow()"),
)
_SCORES_OF_BLOCKS = launch.Kernel(
    "indexer",
    "index_scores_of_blocks",
    (*_INPUTS, "blocks"),
    ("scores",),
    _BODY.format(
        N="uint(blocks_shape[1]) * SIZE",
        rows="rows_of_blocks(blocks + at.y * uint(blocks_shape[1]), SIZE)",
    ),
)


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


@launch.probe("indexer")
def agrees() -> bool:
    """Whether rows, blocks and rows among blocks are chosen as by the reference.

    All values are small integers, so that every order of a sum gives the same score.
    """
    Q, S, H, D = 2, 70, 32, 128
    codes = (mx.arange(S * D // 8, dtype=mx.uint32) * 2654435761).reshape(S, D // 8)
    scales = (126 + mx.arange(S * D // 32) % 3).astype(mx.uint8).reshape(S, D // 32)
    keys = IndexKeys(codes, scales, INDEX)
    q = (mx.arange(Q * H * D) * 7 % 5 - 2).astype(mx.float32).reshape(Q, H, D)
    weights = (mx.arange(Q * H) % 4 - 1).astype(mx.float32).reshape(Q, H)
    queries = IndexQueries(q, weights, mx.array([S - 3, S], dtype=mx.int32))
    blocks = None
    for topk_blocks in (5, None):
        results = [
            choose(queries, keys, k=9, block_size=4, topk_blocks=topk_blocks, candidates=blocks)
            for choose in (choose_rows_metal, choose_rows_reference)
        ]
        (ours, our_blocks), (rows, blocks) = results
        if not mx.array_equal(mx.sort(ours, axis=-1), mx.sort(rows, axis=-1)).item():
            return False
        if blocks is not None and (our_blocks is None or not mx.array_equal(our_blocks, blocks)):
            return False
    # The most threads and entries of a thread, of a whole row, of its parts and of their survivors.
    many = (mx.arange(40_000) * 7919 % 4001).astype(mx.float32)[None]
    few = many[:, :16_384]
    pairs = [
        (select_metal(Selection.ROWS, (many,), 6000), top_k(many, 6000)),
        (select_metal(Selection.ROWS, (few,), 9), top_k(few, 9)),
    ]
    # Parts of the other kinds: single rows as blocks, and the rows of all blocks in their order.
    some = many[:, :16_400]
    visible, all_blocks = mx.array([16_000], dtype=mx.int32), mx.arange(4100, dtype=mx.int32)[None]
    pairs += [
        (
            select_metal(Selection.BLOCKS, (some, visible), 9, 1),
            candidate_blocks(some, visible, block_size=1, topk_blocks=9),
        ),
        (select_metal(Selection.ROWS_OF_BLOCKS, (some, all_blocks), 9, 4), top_k(some, 9)),
    ]
    return all(mx.array_equal(a, b).item() for a, b in pairs)
