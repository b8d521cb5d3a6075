"""The bytes that each launch of Engram's kernels moves, from shapes alone.

Shapes: T tokens, hc streams, D hidden_size, E the channels of a token's rows together.
"""

from mlx_engine.ops.engram import VALUES, gate_threads
from mlx_engine.ops.linear_bytes import fp8_linear_traffic
from mlx_engine.ops.traffic import Traffic, added, moved, number


def engram_gate_traffic(
    T: int, hc: int, D: int, E: int, *, value_bytes: int, weight_bytes: int = 2
) -> tuple[Traffic, Traffic, Traffic]:
    """Each launch of `engram_gate`: the rows, the product, the gate.

    `value_bytes` is an activation's size, `weight_bytes` that of a value of q_weight.
    """
    return (
        engram_rows_traffic(T, E, value_bytes=value_bytes),
        fp8_linear_traffic(T, (hc + 1) * D, K=E, value_bytes=value_bytes),
        gate_value_traffic(T, hc, D, value_bytes=value_bytes, weight_bytes=weight_bytes),
    )


def engram_rows_traffic(T: int, E: int, *, value_bytes: int) -> Traffic:
    """`memory_rows`: threads that take a few codes of a group read its scale each."""
    return added(moved(T * E), moved(T * E // 32, 32 // VALUES), moved(T * E * value_bytes))


def gate_value_traffic(
    T: int, hc: int, D: int, *, value_bytes: int, weight_bytes: int = 2
) -> Traffic:
    """`gate_value`: all streams read the value, all tokens the weights."""
    return added(
        moved(2 * T * hc * D * value_bytes),
        moved(T * hc * D * value_bytes),
        moved(T * D * value_bytes, hc),
        moved(2 * hc * D * weight_bytes, T),
        number(T * hc * gate_threads(D)),
    )
