"""Engram: n-gram memory rows, gated into each stream (section 4.4)."""

import mlx.core as mx

from mlx_engine.ops.linear import fp8_linear
from mlx_engine.weights import EngramWeights


def engram_gate(
    streams: mx.array, codes: mx.array, scales: mx.array, w: EngramWeights, norm_eps: float
) -> mx.array:
    """Add the value of a token's memory rows to every stream that its key agrees with.

    streams: [T, hc, D]; codes: uint8 [T, columns, head_dim] e4m3; scales: uint8
    [T, columns, head_dim/32] e8m0 -> [T, hc, D].
    """
    T, hc, D = streams.shape
    rows = mx.dequantize(
        codes.view(mx.uint32), scales, group_size=32, bits=8, mode="mxfp8", dtype=mx.float32
    )
    kv = fp8_linear(rows.reshape(T, -1).astype(streams.dtype), w.wkv).astype(mx.float32)
    key = kv[:, : hc * D].reshape(T, hc, D)
    value = kv[:, None, hc * D :]
    h = streams.astype(mx.float32)
    r = mx.rsqrt(mx.mean(h * h, axis=-1) + norm_eps) * mx.rsqrt(
        mx.mean(key * key, axis=-1) + norm_eps
    )
    weight = w.q_weight.astype(mx.float32) * w.k_weight.astype(mx.float32)
    dot = mx.sum(h * weight * key, axis=-1) * r * D**-0.5  # [T, hc]
    root = mx.sqrt(mx.maximum(mx.abs(dot), 1e-6))
    gate = mx.sigmoid(mx.where(dot < 0, -root, root))
    return (h + gate[..., None] * value).astype(streams.dtype)
