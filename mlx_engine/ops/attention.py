"""Sparse attention of one chunk: the sliding window and the selected compressed rows (section 3.4).

K and V are the same packed row, shared by all heads. Shapes: Q queries, H heads, D head_dim,
N window rows, S compressed rows, k selected rows.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlx_engine.formats import CacheFormats
from mlx_engine.memory import TILE_QUERIES
from mlx_engine.ops.linear import times_transposed
from mlx_engine.ops.rope import Rotation, rotate


@dataclass(frozen=True)
class WindowRows:
    """Packed rows [N, words] of a layer's window.

    `first_position` is that of row 0 when the rows ascend by position. It is None for a ring that
    holds exactly the rows that a single query sees, in any order.
    """

    rows: mx.array
    first_position: int | None


@dataclass(frozen=True)
class SelectedRows:
    """Packed rows [S, words] of a source and which of them each query attends to.

    `visible`: int32 [Q], rows before this count are closed at the query's position; `ids`: int32
    [Q, k] with -1 for none, or None when every visible row is selected.
    """

    rows: mx.array
    visible: mx.array
    ids: mx.array | None


def sparse_attention(
    q: mx.array,
    first_query: int,
    window: WindowRows,
    selected: SelectedRows | None,
    sinks: mx.array,
    *,
    sliding_window: int,
    at: Rotation,
    formats: CacheFormats,
) -> mx.array:
    """softmax over window and selected rows with one valueless sink a head, then inverse RoPE.

    q: [Q, H, D] for consecutive positions from `first_query`; sinks: f32 [H] -> [Q, H, D].
    """
    Q, _, D = q.shape
    window_f32 = formats.window.unpack(window.rows, D)
    shared_f32 = None
    if selected is not None and selected.ids is None:
        shared_f32 = formats.compressed.unpack(selected.rows, D)
    tiles: list[mx.array] = []
    for first in range(0, Q, TILE_QUERIES):
        last = min(first + TILE_QUERIES, Q)
        tile = q[first:last].astype(mx.float32)
        position = first_query + first
        slab, slab_mask = _window_slab(
            window_f32, window.first_position, position, last - first, sliding_window
        )
        keys, masks = [slab], [slab_mask]
        if selected is not None:
            if selected.ids is None:
                assert shared_f32 is not None
                seen = mx.arange(shared_f32.shape[0]) < selected.visible[first:last, None]
                keys.append(shared_f32)
                masks.append(seen)
            else:
                ids = selected.ids[first:last]
                keys.append(formats.compressed.unpack(selected.rows[mx.maximum(ids, 0)], D))
                masks.append(ids >= 0)
        tiles.append(_attend(tile, keys, masks, sinks))
    out = tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=0)
    return rotate(out, at, is_inverse=True).astype(q.dtype)


def _window_slab(
    window: mx.array, first_position: int | None, position: int, queries: int, sliding_window: int
) -> tuple[mx.array, mx.array | None]:
    """The window rows that a tile of queries can see, and which query sees which."""
    if first_position is None:
        return window, None
    oldest = max(position - sliding_window + 1, first_position)
    slab = window[oldest - first_position : position + queries - first_position]
    if queries == 1:
        return slab, None
    row = mx.arange(oldest, position + queries)
    query = mx.arange(position, position + queries)[:, None]
    return slab, (row <= query) & (row > query - sliding_window)


def _attend(
    q: mx.array, keys: list[mx.array], masks: list[mx.array | None], sinks: mx.array
) -> mx.array:
    """One softmax over several sets of rows, shared by the tile [n, D] or per query [Q, n, D]."""
    Q, H, D = q.shape
    q = q * D**-0.5
    scores: list[mx.array] = []
    for rows, mask in zip(keys, masks, strict=True):
        if rows.ndim == 2:
            score = times_transposed(q.reshape(Q * H, D), rows).reshape(Q, H, -1)
        else:
            score = times_transposed(q, rows)  # [Q, H, n]
        scores.append(score if mask is None else mx.where(mask[:, None, :], score, -mx.inf))
    scores.append(mx.broadcast_to(sinks[None, :, None], (Q, H, 1)))
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1)
    out = mx.zeros_like(q)
    first = 0
    for rows in keys:
        n = rows.shape[-2]
        part = weights[..., first : first + n]
        first += n
        if rows.ndim == 2:
            out = out + (part.reshape(Q * H, n) @ rows).reshape(Q, H, D)
        else:
            out = out + part @ rows
    return out
