"""The bytes that a launch of the dense products moves, from shapes alone.

Shapes: T tokens, K inputs, N outputs, G groups; several N are weights that share a launch, or have
one each if there are more than a few rows. `value_bytes` is an activation's size.
"""

from mlx_engine.ops.linear import BLOCK, MAX_ROWS, OUTPUTS, PIECE_BYTES, few_rows
from mlx_engine.ops.traffic import Traffic, added, moved

_TILE = 32


def fp8_linear_traffic(T: int, *N: int, K: int, value_bytes: int, G: int = 1) -> Traffic:
    """One product [T, G, K] x [G, N, K], with tile scales: a byte for each piece of a row."""
    return _product(T, N, K, G, value_bytes, weight_bytes=1, out_bytes=value_bytes, has_scale=True)


def linear_f32_traffic(T: int, *N: int, K: int, value_bytes: int, weight_bytes: int = 2) -> Traffic:
    """`linear_f32` for weights of so many bytes a value."""
    return _product(T, N, K, 1, value_bytes, weight_bytes, out_bytes=4, has_scale=False)


def _product(
    T: int,
    outputs: tuple[int, ...],
    K: int,
    G: int,
    value_bytes: int,
    weight_bytes: int,
    out_bytes: int,
    has_scale: bool,
) -> Traffic:
    if T > MAX_ROWS and len(outputs) > 1:
        sizes = K, G, value_bytes, weight_bytes, out_bytes, has_scale
        return added(*(_product(T, (N,), *sizes) for N in outputs))
    if T <= MAX_ROWS:
        # A team reads x for its few outputs; past the last one it makes that again.
        shape = few_rows(T, outputs, K * weight_bytes, G)
        times, rows = shape.blocks, shape.blocks * shape.M
        readers = sum(shape.groups) * shape.teams
        made = readers * OUTPUTS
        pieces = readers * (K * weight_bytes // PIECE_BYTES)
    else:
        times, rows, readers = -(-T // BLOCK), T, -(-sum(outputs) // BLOCK)
        made = readers * BLOCK
        pieces = made * (K * weight_bytes // PIECE_BYTES)
    row_bytes = G * K * value_bytes
    tiles = sum(-(-N // _TILE) for N in outputs) * (K // _TILE) * G
    return added(
        Traffic(T * row_bytes, rows * readers * row_bytes),
        Traffic(G * sum(outputs) * K * weight_bytes, G * times * made * K * weight_bytes),
        Traffic(tiles, G * times * pieces) if has_scale else Traffic(),
        moved(T * G * sum(outputs) * out_bytes),
    )
