"""The bytes that each launch of the hyper-connections' kernels must move, from shapes alone.

Shapes: T tokens, D hidden_size, four streams; `value_bytes` is an activation's size.
"""

HC = 4  # the streams that the kernels are written for
SUMS = (2 + HC) * HC + 2  # what a slice adds up: the products, the squares, the collapsed squares
SLICE = 64  # channels of a slice


def mhc_between_bytes(T: int, D: int, *, value_bytes: int, norm_bytes: int = 2) -> tuple[int, int]:
    """Bytes that each launch of `mhc_between` must move, for a norm weight of so many a value."""
    first, second = mhc_enter_bytes(T, D, value_bytes=value_bytes, norm_bytes=norm_bytes)
    return first + T * (D + HC * D) * value_bytes + T * (HC + HC * HC) * 4, second


def mhc_enter_bytes(T: int, D: int, *, value_bytes: int, norm_bytes: int = 2) -> tuple[int, int]:
    """Bytes that each launch of `mhc_enter` must move: the sums go from one to the other."""
    columns, collapsed = (2 + HC) * HC, T * D * value_bytes
    sums = T * -(-D // SLICE) * SUMS * 4
    first = T * HC * D * value_bytes + T * HC * 4 + columns * HC * D * 4 + collapsed + sums
    small = (columns + 3 + 2 + T * columns) * 4  # base, scale, epsilons, coefficients
    return first, sums + small + 2 * collapsed + D * norm_bytes


def mhc_collapse_norm_bytes(T: int, D: int, *, value_bytes: int, norm_bytes: int = 2) -> int:
    """Bytes that `mhc_collapse_norm` must move."""
    return T * (HC + 1) * D * value_bytes + T * HC * 4 + D * norm_bytes + 4


def mhc_expand_bytes(T: int, D: int, *, value_bytes: int) -> int:
    """Bytes that `mhc_expand` must move."""
    return T * (2 * HC + 1) * D * value_bytes + T * (HC + HC * HC) * 4
