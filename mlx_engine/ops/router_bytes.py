"""The bytes that each launch of the router's kernels moves, from shapes alone.

Shapes: T tokens, k chosen of E experts, D hidden_size.
"""

from mlx_engine.ops.mhc_bytes import SLICE, finish_traffic
from mlx_engine.ops.router import THREADS
from mlx_engine.ops.traffic import Traffic, added, moved, number

_SIMD = 32


def router_scores_traffic(
    T: int, E: int, D: int, *, value_bytes: int, norm_bytes: int = 2, gate_bytes: int = 2
) -> Traffic:
    """The second launch of `mhc_route`: scores, a threadgroup each, and what `mhc_between` has.

    All threadgroups read the collapsed inputs, the norm's weight and, a simdgroup each, its sums.
    """
    readers = E * THREADS
    again = added(
        moved(T * -(-D // SLICE) * 4, readers // _SIMD),
        moved(T * D * value_bytes, E),
        moved(D * norm_bytes, E),
        number(readers),
    )
    finished = finish_traffic(T, D, THREADS, value_bytes=value_bytes, norm_bytes=norm_bytes)
    return added(
        finished,
        Traffic(0, again.total_bytes),
        moved(E * D * gate_bytes),
        number(readers),
        moved(T * E * 4),
    )


def choose_traffic(T: int, k: int, E: int) -> Traffic:
    """`Routing.chosen` in a launch of its own, a simdgroup a token."""
    return added(moved(T * E * 4), moved(E * 4, T), number(T * _SIMD), moved(2 * T * k * 4))
