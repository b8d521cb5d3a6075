"""The k largest entries of a row, ties to the lowest index.

MLX's partition leaves ties open. They do occur: index scores of rows that no head points at are
all zero. The kernels are in metal/indexer.metal; they make the integers of the score and its index
from f32 scores as they read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import mlx.core as mx

from mlx_engine.ops import launch

_LOW_BITS = 0xFFFFFFFF

_THREADS = 1024
# Most entries of a thread, which holds them in registers: 1024 threads leave each of them about 50.
_SHARE = 16


def top_k(scores: mx.array, k: int) -> mx.array:
    """Indices of the k largest f32 scores of each row, ascending: [.., S] -> int32 [.., k].

    One unsigned key holds the score's order in its high bits and the index, inverted, in its low.
    """
    S = scores.shape[-1]
    # Adding zero turns -0 into +0, which must tie.
    bits = (scores + 0.0).view(mx.uint32)
    ordered = mx.where(bits >> 31, ~bits, bits | 0x80000000)
    inverted = _LOW_BITS - mx.arange(S, dtype=mx.uint32)
    keys = (ordered.astype(mx.uint64) << 32) | inverted.astype(mx.uint64)
    if k < S:
        keys = mx.partition(keys, kth=S - k, axis=-1)[..., S - k :]
    ids = _LOW_BITS - keys.astype(mx.uint32)
    return mx.sort(ids.astype(mx.int32), axis=-1)


class Selection(StrEnum):
    """What is chosen by f32 scores [Q, N], and from which inputs.

    ROWS: scores. BLOCKS of `size` rows each, by their best row and that of the newest visible row
    first: scores, visible int32 [Q]. ROWS_OF_BLOCKS, the N = B * size rows of blocks: scores,
    blocks int32 [Q, B]. SURVIVORS of the parts of a row: their keys and ids [Q, N].
    """

    ROWS = "rows"
    BLOCKS = "blocks"
    ROWS_OF_BLOCKS = "rows_of_blocks"
    SURVIVORS = "survivors"


def select_metal(
    selection: Selection, inputs: Sequence[mx.array], k: int, size: int = 1
) -> mx.array:
    """The k best of N, or of the blocks, ascending, -1 for one at -inf: int32 [Q, k].

    Ties go to the lowest. One launch for up to 16,384 entries. More are cut into parts, whose best
    k take another launch; so two are enough for the best 512 of 524,288.
    """
    Q, N = inputs[0].shape
    entries = -(-N // size) if selection is Selection.BLOCKS else N
    *cuts, last = rounds(entries, k)
    for cut in cuts:
        inputs = _BEST_OF_PARTS[selection](
            inputs,
            template=_template(selection, k, cut.share, size),
            grid=(cut.parts * cut.threads, Q, 1),
            threadgroup=(cut.threads, 1, 1),
            shapes=[(Q, cut.parts * k)] * 2,
            dtypes=[mx.uint32, mx.int32],
        )
        selection = Selection.SURVIVORS
    (ids,) = _BEST[selection](
        inputs,
        template=_template(selection, k, last.share, size),
        grid=(last.threads, Q, 1),
        threadgroup=(last.threads, 1, 1),
        shapes=[(Q, k)],
        dtypes=[mx.int32],
    )
    return ids


@dataclass(frozen=True)
class Round:
    """A launch of a selection: threadgroups for each part, their threads, entries of a thread."""

    parts: int
    threads: int
    share: int


def rounds(entries: int, k: int) -> list[Round]:
    """The launches that find the k best: all but the last hand on the best k of each part."""
    found: list[Round] = []
    while entries > _SHARE * _THREADS:
        share = _part_share(entries, k)
        parts = -(-entries // (share * _THREADS))
        found.append(Round(parts, _THREADS, share))
        entries = parts * k
    # Fewer entries than k leave places that threads without an entry fill.
    places, share = max(entries, k), 1
    while share * _THREADS < places:
        share *= 2
    return [*found, Round(1, -(-places // (32 * share)) * 32, share)]


def _part_share(entries: int, k: int) -> int:
    """Entries of a thread when a row is cut into parts: the least work of both launches in turn."""
    shares = [s for s in (1, 2, 4, 8, 16) if s <= _SHARE and s * _THREADS >= 2 * k]
    assert shares, f"the best {k} in parts of at most {_SHARE * _THREADS}"
    return min(shares, key=lambda s: s + -(-entries // (s * _THREADS)) * k / _THREADS)


def _template(selection: Selection, k: int, share: int, size: int) -> list[tuple[str, int]]:
    of_blocks = selection in (Selection.BLOCKS, Selection.ROWS_OF_BLOCKS)
    return [("K", k), ("SHARE", share), *([("SIZE", size)] if of_blocks else [])]


_BODY = """
    threadgroup uint scratch[2 * SIMD];
    const uint2 at = threadgroup_position_in_grid.xy;
    const uint N = {N};
    const uint part = threads_per_threadgroup.x * SHARE;
    select_top<SHARE, K>(
        {source}, at.x * part, min(N, (at.x + 1) * part), {sink}, scratch,
        simdgroups_per_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"""
# Of each selection: the inputs, how many entries a query has, and their source in the kernel.
_SOURCES = {
    Selection.ROWS: (
        ("scores",),
        "uint(scores_shape[1])",
        "scored_rows(scores + at.y * N, EveryRow())",
    ),
    Selection.BLOCKS: (
        ("scores", "visible"),
        "(uint(scores_shape[1]) + SIZE - 1) / SIZE",
        "scored_blocks(scores + at.y * uint(scores_shape[1]), uint(scores_shape[1]), SIZE, "
        "int(visible[at.y]))",
    ),
    Selection.ROWS_OF_BLOCKS: (
        ("scores", "blocks"),
        "uint(scores_shape[1])",
        "scored_rows(scores + at.y * N, rows_of_blocks(blocks + at.y * (N / SIZE), SIZE))",
    ),
    Selection.SURVIVORS: (
        ("keys", "key_ids"),
        "uint(keys_shape[1])",
        "merged(keys + at.y * N, key_ids + at.y * N)",
    ),
}


def _kernels(suffix: str, outputs: tuple[str, ...], sink: str) -> dict[Selection, launch.Kernel]:
    return {
        selection: launch.Kernel(
            "indexer",
            f"best_{selection}{suffix}",
            inputs,
            outputs,
            _BODY.format(N=N, source=source, sink=sink),
        )
        for selection, (inputs, N, source) in _SOURCES.items()
    }


_BEST = _kernels("", ("ids",), "Chosen{ids + at.y * K}")
_BEST_OF_PARTS = _kernels(
    "_of_parts",
    ("best", "best_ids"),
    "Survivors{best + (at.y * threadgroups_per_grid.x + at.x) * K, "
    "best_ids + (at.y * threadgroups_per_grid.x + at.x) * K}",
)
