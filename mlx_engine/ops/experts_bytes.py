"""The bytes that each launch of the experts' kernels moves, from shapes alone.

Shapes: T tokens, k chosen of E experts, D hidden_size, I moe_intermediate_size; `value_bytes` is an
activation's size. What is chosen decides a part: how many experts, and how many pairs each has.
"""

from collections.abc import Sequence

from mlx_engine.ops.expert_tiles import TILE_COLUMNS, TILE_THREADS, tile_rows
from mlx_engine.ops.experts import DOWN_THREADS, GATE_THREADS, ROWS
from mlx_engine.ops.traffic import Traffic, added, moved, number

_SIMD = 32
# Weights of a lane's step, and of a scale.
_CHUNK = 16
_GROUP = 32


def moe_traffic(
    T: int, k: int, E: int, D: int, I_D: int, value_bytes: int, *, experts: int | None = None
) -> tuple[Traffic, Traffic]:
    """Both launches of `moe_metal`: gate and up, then down.

    `experts`: how many different ones the tokens chose, by default T * k.
    """
    experts = T * k if experts is None else experts
    return (
        gate_up_traffic(T, k, E, D, I_D, value_bytes, experts=experts),
        down_traffic(T, k, D, I_D, value_bytes, experts=experts),
    )


def gate_up_traffic(
    T: int, k: int, E: int, D: int, I_D: int, value_bytes: int, *, experts: int
) -> Traffic:
    """The first launch, each threadgroup of which makes the choice from all scores too.

    A simdgroup makes rows of act for one expert, and reads x of the tokens that chose it.
    """
    simdgroups = I_D // ROWS
    threads = simdgroups * _SIMD * (T * k + 1)
    groups = -(-simdgroups * _SIMD // GATE_THREADS) * (T * k + 1)
    weights = _weights(simdgroups, I_D, D, experts)
    return added(
        Traffic(T * D * value_bytes, simdgroups * T * (k + 1) * D * value_bytes),
        moved(T * E * 4, groups),
        moved(E * 4, T * groups),
        number(threads),
        *(weights, weights),
        number(threads),
        moved(T * (k + 1) * I_D * value_bytes),
        moved(T * k * 4),
    )


def down_traffic(T: int, k: int, D: int, I_D: int, value_bytes: int, *, experts: int) -> Traffic:
    """The second launch: a simdgroup makes rows of out over all experts of all tokens."""
    simdgroups, pairs = D // ROWS, T * k
    if T == 1:
        listing = simdgroups * k * (I_D // _CHUNK)
    else:
        # A threadgroup compares each pair with those before, then each first one with all.
        groups = -(-simdgroups * _SIMD // DOWN_THREADS)
        listing = groups * (pairs * (pairs + 1) // 2 + experts * (pairs + 1))
    act = T * (k + 1) * I_D * value_bytes
    return added(
        moved(act, simdgroups),
        Traffic(4 * pairs, 4 * listing),
        _weights(simdgroups, D, I_D, experts),
        moved(T * D * value_bytes),
    )


def _weights(simdgroups: int, N: int, K: int, experts: int) -> Traffic:
    """Routed weights [experts, N, K] and the shared [N, K], with a scale's byte for each chunk.

    The shared expert's scales are those of all of a simdgroup's rows.
    """
    return added(
        moved(experts * N * K // 2),
        moved(experts * N * K // _GROUP, _GROUP // _CHUNK),
        moved(N * K),
        Traffic(N * K // _GROUP**2, simdgroups * K // _CHUNK),
    )


def tiles_traffic(
    T: int,
    k: int,
    E: int,
    D: int,
    I_D: int,
    value_bytes: int,
    *,
    pairs_of: Sequence[int],
    met: int,
) -> tuple[Traffic, Traffic, Traffic]:
    """Each launch of `routed_tiles_metal`: the tiles' list, gate and up, down.

    `pairs_of`: the pairs of each expert that has any; `met`: how many different ones the list's
    searches meet, which is in the ids, at most all.
    """
    pairs = T * k
    M, experts = tile_rows(pairs, E), len(pairs_of)
    tiles = sum(-(-n // M) for n in pairs_of)
    room = pairs // M + min(pairs, E)
    # Of a tile's words three are read, and two of one without pairs.
    read = 4 * (3 * tiles + 2 * (room - tiles))
    searching = -(-E // _SIMD) * _SIMD * 2 * ((pairs - 1).bit_length() + 1)
    across, down = I_D // (TILE_COLUMNS // 2), -(-D // TILE_COLUMNS)
    return (
        added(Traffic(8 * met, 8 * searching), moved(16 * room)),
        added(
            Traffic(T * D * value_bytes, across * pairs * D * value_bytes),
            # 8 threads stage a row, and each of its outputs takes its place and weight.
            moved(4 * pairs, across * (8 + TILE_COLUMNS // 2)),
            moved(4 * pairs, across * TILE_COLUMNS // 2),
            moved(read, across * TILE_THREADS),
            _tiled(2 * I_D, D, experts, tiles, across * TILE_COLUMNS),
            number(across * TILE_THREADS * room),
            moved(pairs * I_D * value_bytes),
        ),
        added(
            moved(pairs * I_D * value_bytes, down),
            moved(4 * pairs, D),
            moved(read, down * TILE_THREADS),
            _tiled(D, I_D, experts, tiles, down * TILE_COLUMNS),
            moved(4 * pairs * D),
        ),
    )


def _tiled(N: int, K: int, experts: int, tiles: int, columns: int) -> Traffic:
    """Weights [experts, N, K], of which each tile reads so many rows, two threads a scale."""
    row = K // 2, K // _GROUP
    return added(
        Traffic(experts * N * row[0], tiles * columns * row[0]),
        Traffic(experts * N * row[1], tiles * columns * row[1] * 2),
    )
