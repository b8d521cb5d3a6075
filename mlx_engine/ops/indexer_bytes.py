"""The bytes that each launch of the indexer's kernels moves, for queries that see every row.

Shapes: Q queries, H index heads, D index_head_dim, S compressed rows, N scores of a query, k
index_topk.
"""

from mlx_engine.ops.indexer import THREADS, threadgroups_of
from mlx_engine.ops.topk import Selection, rounds
from mlx_engine.ops.traffic import Traffic, added, moved

_GROUP = 32
_QUAD = 4


def choose_rows_traffic(
    Q: int,
    S: int,
    H: int,
    D: int,
    k: int,
    *,
    value_bytes: int,
    block_size: int,
    topk_blocks: int | None = None,
    candidate_blocks: int | None = None,
) -> tuple[Traffic, ...]:
    """Each launch of `choose_rows_metal` for one tile of queries, in their order.

    With `candidate_blocks` each query reads the rows of so many whole blocks, taken as different
    from those of other queries.
    """
    blocks, k = candidate_blocks, min(k, S)
    sizes = {"value_bytes": value_bytes, "block_size": block_size}
    scores = index_scores_traffic(Q, S, H, D, candidate_blocks=blocks, **sizes)
    N = S if blocks is None else blocks * block_size
    kind = Selection.ROWS if blocks is None else Selection.ROWS_OF_BLOCKS
    found = [scores]
    if topk_blocks is not None:
        best = min(topk_blocks, -(-S // block_size))
        found += selection_traffic(Selection.BLOCKS, Q, N, best, block_size)
    return (*found, *selection_traffic(kind, Q, N, k, block_size))


def index_scores_traffic(
    Q: int,
    S: int,
    H: int,
    D: int,
    *,
    value_bytes: int,
    block_size: int,
    candidate_blocks: int | None = None,
) -> Traffic:
    """The scores: every threadgroup stages the query, two lanes read a key and its scales."""
    N = S if candidate_blocks is None else candidate_blocks * block_size
    read = S if candidate_blocks is None else min(Q * N, S)
    groups = threadgroups_of(Q, N)
    return added(
        moved(Q * H * D * value_bytes, groups),
        moved(4 * Q * H, groups * THREADS // _QUAD),
        Traffic(read * D // 2, Q * N * D // 2),
        Traffic(read * D // _GROUP, 2 * Q * N * D // _GROUP),
        moved(4 * Q, groups * THREADS),
        moved(4 * Q * (candidate_blocks or 0), 2 * block_size),
        moved(4 * Q * N),
    )


def best_traffic(selection: Selection, Q: int, N: int, k: int, size: int) -> Traffic:
    """The next launch of a selection among N scores, or survivors, of each query.

    Which ids are read is in the scores; they are those of the chosen entries.
    """
    entries = -(-N // size) if selection is Selection.BLOCKS else N
    first, *_ = rounds(entries, k)
    part = -(-entries // first.parts) if first.parts == 1 else first.threads * first.share
    chosen = Q * sum(min(k, entries - i * part, part) for i in range(first.parts))
    if selection is Selection.BLOCKS:
        # The block of the newest row needs no score.
        read = added(moved(4 * Q * (entries - 1) * size), moved(4 * Q, first.threads * first.parts))
    elif selection is Selection.ROWS_OF_BLOCKS:
        read = added(moved(4 * Q * N), Traffic(4 * min(Q * N // size, chosen), 4 * chosen))
    elif selection is Selection.SURVIVORS:
        read = added(moved(4 * Q * N), moved(4 * chosen))
    else:
        read = moved(4 * Q * N)
    written = 4 * Q * k if first.parts == 1 else 8 * Q * first.parts * k
    return added(read, moved(written))


def selection_traffic(
    selection: Selection, Q: int, N: int, k: int, size: int
) -> tuple[Traffic, ...]:
    """Each launch of a selection of the k best among N scores of each query."""
    entries = -(-N // size) if selection is Selection.BLOCKS else N
    *cuts, _ = rounds(entries, k)
    of_parts = (best_traffic(Selection.SURVIVORS, Q, cut.parts * k, k, 1) for cut in cuts)
    return (best_traffic(selection, Q, N, k, size), *of_parts)
