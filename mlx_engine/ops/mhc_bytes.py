"""The bytes that each launch of the hyper-connections' kernels moves, from shapes alone.

Shapes: T tokens, D hidden_size, four streams; `value_bytes` is an activation's size.
"""

from mlx_engine.ops.traffic import Traffic, added, moved, number

HC = 4  # the streams that the kernels are written for
SUMS = (2 + HC) * HC + 2  # what a slice adds up: the products, the squares, the collapsed squares
SLICE = 64  # channels of a slice
MAX_TOKENS = 8  # tokens of a slice's threadgroup
THREADS = 512  # of a token's threadgroup

_SIMD = 32
_COLUMNS = (2 + HC) * HC


def mhc_between_traffic(
    T: int, D: int, *, value_bytes: int, norm_bytes: int = 2
) -> tuple[Traffic, Traffic]:
    """Each launch of `mhc_between`, for a norm weight of so many bytes a value."""
    sizes = {"value_bytes": value_bytes}
    first = added(mhc_expand_traffic(T, D, **sizes, is_whole=False), _slices(T, D, **sizes))
    return first, finish_traffic(T, D, THREADS, **sizes, norm_bytes=norm_bytes)


def mhc_enter_traffic(
    T: int, D: int, *, value_bytes: int, norm_bytes: int = 2
) -> tuple[Traffic, Traffic]:
    """Each launch of `mhc_enter`: the sums go from one to the other."""
    streams = moved(T * HC * D * value_bytes)
    second = finish_traffic(T, D, THREADS, value_bytes=value_bytes, norm_bytes=norm_bytes)
    return added(streams, _slices(T, D, value_bytes=value_bytes)), second


def mhc_collapse_norm_traffic(T: int, D: int, *, value_bytes: int, norm_bytes: int = 2) -> Traffic:
    """`mhc_collapse_norm`: every thread takes the token's weights."""
    return added(
        moved(T * (HC + 1) * D * value_bytes),
        moved(T * HC * 4, THREADS),
        moved(D * norm_bytes, T),
        number(T * THREADS),
    )


def mhc_expand_traffic(T: int, D: int, *, value_bytes: int, is_whole: bool = True) -> Traffic:
    """`mhc_expand`, a thread a channel; within a slice it is a thread a channel and stream."""
    loads = 1 if is_whole else HC
    return added(
        moved(T * (1 + HC) * D * value_bytes, loads),
        moved(T * (HC + HC * HC) * 4, D),
        moved(T * HC * D * value_bytes),
    )


def _slices(T: int, D: int, *, value_bytes: int) -> Traffic:
    """The products, squares and collapsed channels of all slices, from threadgroup memory."""
    slices, groups = -(-D // SLICE), -(-T // MAX_TOKENS)
    return added(
        moved(_COLUMNS * HC * D * 4, groups),
        moved(T * HC * 4, slices * _SIMD),
        moved(T * D * value_bytes),
        moved(T * slices * SUMS * 4),
    )


def finish_traffic(T: int, D: int, threads: int, *, value_bytes: int, norm_bytes: int) -> Traffic:
    """The second launch, by so many threads a token: 8 lanes make gates, a simdgroup the matrix."""
    lanes = 2 * HC + _SIMD
    return added(
        moved(T * -(-D // SLICE) * SUMS * 4),
        Traffic(_COLUMNS * 4, T * lanes * 4),
        Traffic(3 * 4, T * lanes * 4),
        Traffic(2 * 4, T * (2 * _SIMD + threads) * 4),
        moved(T * _COLUMNS * 4),
        moved(2 * T * D * value_bytes),
        moved(D * norm_bytes, T),
    )
