"""Sparse attention of one chunk: the sliding window and the selected compressed rows (section 3.4).

K and V are the same packed row, shared by all heads. Shapes: Q queries, H heads, D head_dim,
R rotated channels, N window rows, S compressed rows, k selected rows.
"""

from dataclasses import dataclass
from enum import IntEnum

import mlx.core as mx

from mlx_engine.formats import COMPRESSED, WINDOW, CacheFormats
from mlx_engine.memory import TILE_QUERIES
from mlx_engine.ops import attention_native, launch
from mlx_engine.ops.linear import times_transposed
from mlx_engine.ops.rope import Rotation, rotate

# Of the kernels: rows unpacked at a time, threads of a group, the groups that fill 80 GPU cores.
TILE_ROWS = 16
THREADS = 256
_ENOUGH_GROUPS = 80
# Channels whose rows fit into threadgroup memory, with the scores of 32 heads.
_WIDEST = 640


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


@launch.falls_back
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
    turns_q: bool = False,
) -> mx.array:
    """softmax over window and selected rows with one valueless sink a head, then inverse RoPE.

    q: [Q, H, D] for consecutive positions from `first_query`, turned by `at` already, or here if
    `turns_q`; sinks: f32 [H] -> [Q, H, D].
    """
    D, R = q.shape[-1], 2 * at.cos.shape[-2]
    is_packed = formats.window == WINDOW and formats.compressed == COMPRESSED
    is_fitting = D % 64 == 0 and D <= _WIDEST and R % 4 == 0
    attend = sparse_attention_reference
    if launch.is_on("attention") and is_packed and is_fitting:
        attend = _sparse_attention_metal
    return attend(
        q,
        first_query,
        window,
        selected,
        sinks,
        sliding_window=sliding_window,
        at=at,
        formats=formats,
        turns_q=turns_q,
    )


def sparse_attention_reference(
    q: mx.array,
    first_query: int,
    window: WindowRows,
    selected: SelectedRows | None,
    sinks: mx.array,
    *,
    sliding_window: int,
    at: Rotation,
    formats: CacheFormats,
    turns_q: bool = False,
) -> mx.array:
    """`sparse_attention` in MLX's operations, with rows of any format."""
    Q, _, D = q.shape
    if turns_q:
        q = rotate(q, at)
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


class Chosen(IntEnum):
    """Which compressed rows a query sees, as the kernels number it: none, so many, or listed."""

    NONE = 0
    VISIBLE = 1
    LISTED = 2


@dataclass(frozen=True)
class Cut:
    """How the work is shared out: heads of a threadgroup, and slices of each query's rows."""

    heads: int
    slices: int


def cut_of(queries: int, heads: int, rows: int) -> Cut:
    """Many heads share an unpacked row where that leaves enough groups, few where it does not."""
    for group in (32, 16):
        if group <= heads and queries * -(-heads // group) >= _ENOUGH_GROUPS:
            return Cut(group, 1)
    wanted = -(-_ENOUGH_GROUPS // (queries * -(-heads // 8)))
    tiles = -(-rows // TILE_ROWS)
    tiles_of_slice = -(-tiles // wanted)
    return Cut(8, -(-tiles // tiles_of_slice))


_ARRAYS = """
threadgroup uint4 tile[TILE * tile_pitch(D) / 4];
threadgroup float scores[QUARTERS * HEADS * TILE];
threadgroup float weights[HEADS * TILE];
threadgroup float factors[HEADS];
threadgroup uchar seen[TILE];
"""
_ATTEND = """
const uint3 group = threadgroup_position_in_grid;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const int query = int(group.z);
const int Q = q_shape[0];
const int H = q_shape[1];
const int head = int(group.x) * HEADS;
const QueryRows rows = rows_of<CHOSEN>(
    query, Q, window_shape[0], REACH, chosen, CHOSEN == LISTED_ROWS ? chosen_shape[1] : 0);
const int slices = int(threadgroups_per_grid.y);
const int tiles = (rows.in_window + rows.selected + TILE - 1) / TILE;
const int slice_rows = (tiles + slices - 1) / slices * TILE;
const int begin = int(group.y) * slice_rows;
const int end = min(begin + slice_rows, rows.in_window + rows.selected);
Attended<D, HEADS> sums;
attend<T, D, R, HEADS, CHOSEN, TURNS>(
    q + size_t(query) * H * D, head, H, window, compressed, chosen, cos + query * R,
    sin + query * R, rows, begin, end, tile, scores, weights, factors, seen, sums,
    thread_index_in_threadgroup, simdgroup, lane);
"""
_INPUTS = ("q", "window", "compressed", "chosen", "cos", "sin")

_attend_slices = launch.Kernel(
    "attention",
    "attend_slices",
    _INPUTS,
    ("parts", "stats"),
    _ARRAYS
    + _ATTEND
    + """
const size_t first = (size_t(query) * slices + group.y) * H;
store_part<D, HEADS>(sums, head, H, parts + first * D, stats + first * 2, simdgroup, lane);
""",
    also=("packed_rows",),
)
_merge_slices = launch.Kernel(
    "attention",
    "merge_slices",
    ("parts", "stats", "sinks", "cos", "sin"),
    ("out",),
    """
const uint3 i = thread_position_in_grid;
const int slices = parts_shape[1];
const int H = parts_shape[2];
const size_t first = size_t(i.z) * slices * H;
merge<T, D, R>(
    parts + first * D, stats + first * 2, slices, int(i.y), H, sinks[i.y], cos + i.z * R,
    sin + i.z * R, out + (size_t(i.z) * H + i.y) * D, 4 * int(i.x));
""",
    also=("packed_rows",),
)
_attend_whole = launch.Kernel(
    "attention",
    "attend_whole",
    (*_INPUTS, "sinks"),
    ("out",),
    _ARRAYS
    + _ATTEND
    + """
store_out<T, D, R, HEADS>(
    sums, head, H, sinks, cos + query * R, sin + query * R, out + size_t(query) * H * D, factors,
    simdgroup, lane);
""",
    also=("packed_rows",),
)


def _sparse_attention_metal(
    q: mx.array,
    first_query: int,
    window: WindowRows,
    selected: SelectedRows | None,
    sinks: mx.array,
    *,
    sliding_window: int,
    at: Rotation,
    formats: CacheFormats,
    turns_q: bool = False,
) -> mx.array:
    """`sparse_attention` over the packed formats: two launches for few queries, else one."""
    Q, H, D = q.shape
    R = 2 * at.cos.shape[-2]
    rows = window.rows
    if window.first_position is not None:
        # The last row is the last query's own; what lies before the first query's reach is cut.
        end = first_query + Q - window.first_position
        rows = rows[max(first_query - sliding_window + 1 - window.first_position, 0) : end]
    n_rows = min(rows.shape[0], sliding_window)
    if selected is None:
        # The kernel reads neither; any array stands in.
        compressed, chosen, kind = rows, rows, Chosen.NONE
    elif selected.ids is None:
        compressed, chosen, kind = selected.rows, selected.visible, Chosen.VISIBLE
        n_rows += selected.rows.shape[0]
    else:
        compressed, chosen, kind = selected.rows, selected.ids, Chosen.LISTED
        n_rows += selected.ids.shape[1]
    inputs = [q, rows, compressed, chosen, at.cos, at.sin]
    if launch.is_native("attention") and q.dtype == mx.bfloat16 and attention_native.fits(D):
        shape = attention_native.cut(Q, H, n_rows)
        options = [("R", R), ("CHOSEN", int(kind)), ("REACH", sliding_window), ("TURNS", turns_q)]
        listed = ("LISTED", chosen.shape[1] if kind is Chosen.LISTED else 0)
        found = attention_native.attend(inputs, sinks, shape, [*options, listed])
        return found[0] if shape.slices == 1 else _merged(found, sinks, at, q)
    cut = cut_of(Q, H, n_rows)
    template = [("T", q.dtype), ("D", D), ("R", R)]
    attending = [
        *template,
        ("HEADS", cut.heads),
        ("CHOSEN", int(kind)),
        ("REACH", sliding_window),
        ("TURNS", turns_q),
    ]
    grid = (-(-H // cut.heads) * THREADS, cut.slices, Q)
    if cut.slices == 1:
        (out,) = _attend_whole(
            [*inputs, sinks],
            template=attending,
            grid=grid,
            threadgroup=(THREADS, 1, 1),
            shapes=[q.shape],
            dtypes=[q.dtype],
        )
        return out
    parts = _attend_slices(
        inputs,
        template=attending,
        grid=grid,
        threadgroup=(THREADS, 1, 1),
        shapes=[(Q, cut.slices, H, D), (Q, cut.slices, H, 2)],
        dtypes=[mx.float32, mx.float32],
    )
    return _merged(parts, sinks, at, q)


def _merged(parts: list[mx.array], sinks: mx.array, at: Rotation, q: mx.array) -> mx.array:
    """The output [Q, H, D] in q's dtype from each slice's sums and stats."""
    Q, H, D = q.shape
    (out,) = _merge_slices(
        [*parts, sinks, at.cos, at.sin],
        template=[("T", q.dtype), ("D", D), ("R", 2 * at.cos.shape[-2])],
        grid=(D // 4, H, Q),
        threadgroup=(min(D // 4, 32), 1, 1),
        shapes=[q.shape],
        dtypes=[q.dtype],
    )
    return out


@launch.probe("attention")
def _agrees() -> bool:
    """Both ways of the kernels, for one query and for many, with every kind of chosen rows."""
    # NVIDIA's own kernels want wide rows.
    if launch.is_native("attention") and not _agrees_at(512, mx.bfloat16):
        return False
    return _agrees_at(64, mx.float32)


def _agrees_at(D: int, dtype: mx.Dtype) -> bool:
    R, W, S = 16, 20, 30
    key = mx.random.key(0)
    window = WINDOW.pack(mx.random.normal((W + 79, D), key=key))
    rows = COMPRESSED.pack(mx.random.normal((S, D), key=key))
    ids = mx.where(mx.arange(S) % 3 == 0, -1, mx.arange(S)).astype(mx.int32)
    for Q, H in ((1, 9), (80, 33)):
        angles = mx.random.uniform(0, 6, (Q, R // 2, 1), key=key)
        visible = mx.full((Q,), S - 5, dtype=mx.int32)
        listed = SelectedRows(rows, visible, mx.repeat(ids[None], Q, 0))
        for chosen in (listed, SelectedRows(rows, visible, None), None):
            results = [
                attend(
                    (2 * mx.random.normal((Q, H, D), key=key)).astype(dtype),
                    W - 1,
                    WindowRows(window, 0),
                    chosen,
                    mx.random.normal((H,), key=key),
                    sliding_window=W,
                    at=Rotation(
                        mx.repeat(mx.cos(angles), 2, -1),
                        mx.concatenate([-mx.sin(angles), mx.sin(angles)], -1),
                    ),
                    formats=CacheFormats(),
                    turns_q=True,
                )
                for attend in (_sparse_attention_metal, sparse_attention_reference)
            ]
            found, right = (result.astype(mx.float32) for result in results)
            rounding = 1e-4 if dtype == mx.float32 else 2.0**-6
            if not mx.allclose(found, right, rtol=0, atol=rounding).item():
                return False
    return True
