"""The indexer: which compressed rows a query attends to (section 3.6).

Shapes: Q queries, H index heads, D index_head_dim, S compressed rows.
"""

import mlx.core as mx

from mlx_engine.formats import RowFormat
from mlx_engine.ops.topk import top_k

# Scores of one tile of queries stay below this many f32 values per head and row.
_TILE_VALUES = 1 << 24


def index_scores(
    q: mx.array, head_weights: mx.array, keys: mx.array, visible: mx.array, fmt: RowFormat
) -> mx.array:
    """score(p, j) = sum_h w_h relu(q_h . k_j), -inf where query p does not see row j.

    q: [Q, H, D] already rounded; head_weights: f32 [Q, H] with both scale factors; keys: packed
    [S, words]; visible: int32 [Q], the rows each query sees -> f32 [Q, S].
    """
    Q, H, D = q.shape
    S = keys.shape[0]
    step = max(1, _TILE_VALUES // (H * S))
    tiles: list[mx.array] = []
    for first in range(0, Q, step):
        tile = q[first : first + step].astype(mx.float32)
        dots = fmt.product(tile.reshape(-1, D), keys).reshape(-1, H, S)
        weights = head_weights[first : first + step, None, :]
        tiles.append((weights @ mx.maximum(dots, 0))[:, 0, :])
    scores = tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=0)
    return mx.where(mx.arange(S) < visible[:, None], scores, -mx.inf)


def candidate_blocks(
    scores: mx.array, visible: mx.array, *, block_size: int, topk_blocks: int
) -> mx.array:
    """The blocks of rows that later index layers may choose from: bool [Q, blocks].

    A block's score is its best row's; the block of the newest visible row is always in.
    scores: f32 [Q, S] with -inf where not visible; visible: int32 [Q].
    """
    Q, S = scores.shape
    blocks = -(-S // block_size)
    padded = mx.pad(
        scores, [(0, 0), (0, blocks * block_size - S)], constant_values=mx.array(-mx.inf)
    )
    best = mx.max(padded.reshape(Q, blocks, block_size), axis=-1)
    newest = (visible - 1) // block_size
    is_newest = (mx.arange(blocks) == newest[:, None]) & (visible[:, None] > 0)
    best = mx.where(is_newest, mx.inf, best)
    chosen = top_k(best, min(topk_blocks, blocks))
    mask = mx.put_along_axis(mx.zeros((Q, blocks), dtype=mx.bool_), chosen, mx.array(True), axis=-1)
    return mask & (best > -mx.inf)


def mask_candidates(scores: mx.array, candidates: mx.array, block_size: int) -> mx.array:
    """Put -inf wherever a row lies in no candidate block: f32 [Q, S]."""
    rows = mx.repeat(candidates, block_size, axis=-1)[:, : scores.shape[-1]]
    return mx.where(rows, scores, -mx.inf)


def select_rows(scores: mx.array, k: int) -> mx.array:
    """The k best rows of each query, ascending, -1 for one at -inf: int32 [Q, min(k, S)]."""
    ids = top_k(scores, min(k, scores.shape[-1]))
    return mx.where(mx.take_along_axis(scores, ids, axis=-1) > -mx.inf, ids, -1)
