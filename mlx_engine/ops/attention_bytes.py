"""The bytes that each launch of the attention kernels moves, from shapes alone.

Shapes: Q queries, H heads, D head_dim, R rotated channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.formats import COMPRESSED, WINDOW
from mlx_engine.ops.attention import THREADS, TILE_ROWS, Chosen, cut_of
from mlx_engine.ops.traffic import Traffic, added, moved

# Channels that a thread unpacks at once, rows of a matrix, and channels of a thread that merges.
_PART = 16
_MATRIX = 8
_MERGED = 4


@dataclass(frozen=True)
class Seen:
    """Rows that one query sees in its window and of the compressed ones, and ids of such listed."""

    window: int
    compressed: int = 0
    listed: int = 0


def sparse_attention_traffic(
    shape: tuple[int, int, int],
    rotated: int,
    chosen: Chosen,
    seen: Sequence[Seen],
    *,
    window_rows: int,
    compressed_rows: int,
    most_rows: int,
    value_bytes: int,
    turns_q: bool = False,
) -> tuple[Traffic, ...]:
    """Each launch of one call, for q of a shape (Q, H, D): one, or attending and merging.

    Different rows that are seen at all, what each query sees, and the most rows that one may see.
    """
    Q, H, D = shape
    cut = cut_of(Q, H, most_rows)
    groups = -(-H // cut.heads)
    tiles = sum(-(-(s.window + max(s.compressed, s.listed)) // TILE_ROWS) for s in seen)
    halves, parts = TILE_ROWS // _MATRIX, D // _PART
    out, table = Q * H * D * value_bytes, 2 * 4 * Q * rotated
    ids = Traffic()
    if chosen is Chosen.VISIBLE:
        ids = moved(4 * Q, groups * cut.slices * THREADS)
    elif chosen is Chosen.LISTED:
        listed = 4 * sum(s.listed for s in seen)
        ids = moved(listed, groups * parts)
    # For each half of a tile's rows q is read again, and turned again.
    attending = added(
        Traffic(out, tiles * halves * H * D * value_bytes),
        _rows(window_rows, groups * sum(s.window for s in seen), D, D // WINDOW.group, parts),
        _rows(
            *(compressed_rows, groups * sum(s.compressed for s in seen)),
            *(D // 2, D // COMPRESSED.group, parts),
        ),
        ids,
    )
    turning = 2 * 4 * rotated * tiles * halves * groups * cut.heads if turns_q else 0
    if cut.slices == 1:
        tables = Traffic(table, turning + table * H)
        return (added(attending, tables, moved(4 * H, Q), moved(out)),)
    sums, stats = 4 * Q * cut.slices * H * D, 2 * 4 * Q * cut.slices * H
    return (
        added(attending, Traffic(table if turns_q else 0, turning), moved(sums), moved(stats)),
        merge_traffic(shape, rotated, cut.slices, value_bytes),
    )


def merge_traffic(
    shape: tuple[int, int, int], rotated: int, slices: int, value_bytes: int
) -> Traffic:
    """The launch that adds up slices: a thread of some channels reads the head's tops twice."""
    Q, H, D = shape
    threads = D // _MERGED
    stats = 2 * 4 * Q * slices * H
    return added(
        moved(4 * Q * slices * H * D),
        Traffic(stats, stats // 2 * 3 * threads),
        moved(4 * H, Q * threads),
        moved(2 * 4 * Q * rotated, H),
        moved(Q * H * D * value_bytes),
    )


def _rows(different: int, seen: int, code_bytes: int, scales: int, parts: int) -> Traffic:
    """Packed rows: each part of a row's channels is read with the scale of its group."""
    return Traffic(different * (code_bytes + scales), seen * (code_bytes + parts))
