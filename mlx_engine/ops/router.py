"""The router: which experts see a token, and with what weight (section 3.7)."""

import mlx.core as mx

from mlx_engine.ops.linear import linear_f32
from mlx_engine.ops.topk import top_k


def route(
    x: mx.array,
    gate_weight: mx.array,
    gate_bias: mx.array,
    *,
    k: int,
    gate_temp: float,
    norm_topk_prob: bool,
    scaling_factor: float,
) -> tuple[mx.array, mx.array]:
    """Choose k of E experts by biased score, weigh them by the plain one.

    x: [T, D], gate_weight: bf16 [E, D], gate_bias: f32 [E] -> ids int32 [T, k], weights f32 [T, k].
    """
    logits = linear_f32(x, gate_weight) / gate_temp
    softplus = mx.maximum(logits, 0) + mx.log1p(mx.exp(-mx.abs(logits)))
    scores = mx.sqrt(softplus)
    ids = top_k(scores + gate_bias, k)
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if norm_topk_prob:
        weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids, weights * scaling_factor
