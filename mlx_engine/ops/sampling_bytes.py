"""The bytes that each launch of a draw among V logits moves, from shapes alone."""

from mlx_engine.ops.sampling import BINS, GROUP, GROUPS, THREADS, parts_of
from mlx_engine.ops.traffic import Traffic, added, moved


def draw_traffic(V: int, *, has_top_p: bool) -> tuple[Traffic, ...]:
    """Each launch of `draw`, in their order.

    Every threadgroup finds the greatest logit among those of all parts, and searches the last
    level's sums of all parts for the edge; every thread reads the rule and what it knows.
    """
    P = parts_of(V)
    threads = P * THREADS
    every = added(moved(4 * V), moved(4 * P, P), moved(2 * 4, threads))
    top_p, edge, key = moved(4, threads), moved(3 * 4, threads), moved(2 * 4, threads)
    tables = moved(4 * P * (BINS + GROUPS))
    search = moved(4 * P * (GROUPS + GROUP), P)
    candidates = moved(8 * P)
    greatest = added(moved(4 * V), moved(4 * P))
    if not has_top_p:
        return greatest, added(every, key, candidates), first_traffic(P)
    stored = moved(3 * 4)
    # A part's equals come after those of the parts before it.
    before = Traffic(0, 4 * P * (P - 1) // 2)
    return (
        greatest,
        added(every, tables),
        added(every, top_p, search, tables, stored),
        added(every, edge, search, tables, stored),
        added(every, edge, search, key, before, candidates),
        first_traffic(P),
    )


def first_traffic(P: int) -> Traffic:
    """The last launch, which takes one of the ids of P parts."""
    return added(moved(4 * P), moved(4), moved(4))
