"""Sparse attention on NVIDIA GPUs, in bf16: the kernels of cuda/attention.cu.

Shapes: Q queries, H heads, D head_dim, R rotated channels. What a slice leaves is merged by the
kernel of `attention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_engine.formats import COMPRESSED, WINDOW
from mlx_engine.ops.launch import Kernel

# Rows unpacked at a time, and the blocks that fill a GPU.
_TILE = 32
_ENOUGH_BLOCKS = 80
# Heads of a block where many queries fill the GPU, and where they do not.
_MANY, _FEW = 32, 16
_QUARTERS = 4


@dataclass(frozen=True)
class Cut:
    """How the work is shared out: heads of a block, and slices of each query's rows."""

    heads: int
    slices: int


def fits(D: int) -> bool:
    """Whether rows begin where 16 bytes of a window's or 8 of a compressed one can be loaded."""
    return WINDOW.words(D) % 4 == 0 and COMPRESSED.words(D) % 2 == 0


def cut(queries: int, heads: int, rows: int) -> Cut:
    """Many heads share an unpacked row where that leaves enough blocks, few where it does not."""
    if queries * -(-heads // _MANY) >= _ENOUGH_BLOCKS:
        return Cut(_MANY, 1)
    wanted = -(-_ENOUGH_BLOCKS // (queries * -(-heads // _FEW)))
    tiles = -(-rows // _TILE)
    return Cut(_FEW, -(-tiles // -(-tiles // wanted)))


_INPUTS = ("q", "window", "compressed", "chosen", "cos", "sin")
_ATTEND = """
    extern __shared__ uint4 memory[];
    Shared<D, HEADS>& shared = *reinterpret_cast<Shared<D, HEADS>*>(memory);
    const int query = blockIdx.z, Q = q_shape[0], H = q_shape[1], head = blockIdx.x * HEADS;
    const int own = window_shape[0] - Q + query;
    QueryRows rows;
    rows.first = max(own - REACH + 1, 0);
    rows.in_window = own + 1 - rows.first;
    rows.selected = CHOSEN == VISIBLE_ROWS ? int(chosen[query]) : LISTED;
    const int slices = gridDim.y;
    const int tiles = (rows.in_window + rows.selected + TILE - 1) / TILE;
    const int slice_rows = (tiles + slices - 1) / slices * TILE;
    const int begin = blockIdx.y * slice_rows;
    const int end = min(begin + slice_rows, rows.in_window + rows.selected);
    float sums[HEADS / 16][D / (2 * HEADS)][4], top[4], total[4];
    attend<D, R, HEADS, CHOSEN, TURNS>(
        q + size_t(query) * H * D, head, H, window, compressed,
        CHOSEN == LISTED_ROWS ? chosen + size_t(query) * LISTED : chosen, cos + query * R,
        sin + query * R, rows, begin, end, shared, sums, top, total, threadIdx.x);"""


def _shared_bytes(D: int, heads: int) -> int:
    """The size of Shared in attention.cu."""
    scores = _QUARTERS * heads * _TILE * 4
    return _TILE * (D + 8) * 2 + scores + 2 * heads * (_TILE + 8) * 2 + heads * 4 + _TILE * 4


def attend(
    inputs: Sequence[mx.array],
    sinks: mx.array,
    shape: Cut,
    options: Sequence[tuple[str, int]],
) -> list[mx.array]:
    """Whole outputs bf16 [Q, H, D], or f32 parts and stats of each slice for `attention` to merge.

    inputs: q, window rows, compressed rows, what is chosen of them, cos, sin. options: R, CHOSEN
    and TURNS as in the kernels of `attention`, REACH of the window, LISTED ids of a query or 0.
    """
    Q, H, D = inputs[0].shape
    threads = shape.heads // 4 * 32
    template = [("D", D), ("HEADS", shape.heads), *options]
    grid = (-(-H // shape.heads) * threads, shape.slices, Q)
    shared_bytes = _shared_bytes(D, shape.heads)
    if shape.slices == 1:
        whole = Kernel(
            "attention",
            "attend_whole",
            (*_INPUTS, "sinks"),
            ("out",),
            _ATTEND
            + """
    store_out<D, R, HEADS>(
        sums, top, total, head, H, sinks, cos + query * R, sin + query * R,
        out + size_t(query) * H * D, shared, threadIdx.x);""",
            is_native=True,
            shared_bytes=shared_bytes,
            blocks=2,
        )
        return whole(
            [*inputs, sinks],
            template=template,
            grid=grid,
            threadgroup=(threads, 1, 1),
            shapes=[(Q, H, D)],
            dtypes=[mx.bfloat16],
        )
    slices = Kernel(
        "attention",
        "attend_slices",
        _INPUTS,
        ("parts", "stats"),
        _ATTEND
        + """
    const size_t first = (size_t(query) * slices + blockIdx.y) * H;
    store_part<D, HEADS>(
        sums, top, total, head, H, parts + first * D, stats + first * 2, threadIdx.x);""",
        is_native=True,
        shared_bytes=shared_bytes,
    )
    return slices(
        inputs,
        template=template,
        grid=grid,
        threadgroup=(threads, 1, 1),
        shapes=[(Q, shape.slices, H, D), (Q, shape.slices, H, 2)],
        dtypes=[mx.float32, mx.float32],
    )
