"""The indexer: which compressed rows a query attends to (section 3.6).

Shapes: Q queries, H index heads, D index_head_dim, S compressed rows, k index_topk, B
candidate_topk_blocks.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlx_engine.formats import RowFormat
from mlx_engine.memory import SCAN_VALUES
from mlx_engine.ops.topk import top_k


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
    blocks int32 [Q, B] or None, both ascending with -1 for none.
    """
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
