"""The mixture of experts: FP4 routed experts and the FP8 shared one (section 3.7).

Shapes: T tokens, k chosen experts, E experts, D hidden_size, I moe_intermediate_size.
"""

import mlx.core as mx

from mlx_engine.ops.linear import fp8_linear
from mlx_engine.weights import FfnWeights, Fp4

# From this many expert rows on, sorting them by expert pays for itself.
_SORT_ROWS = 64


def moe(
    x: mx.array, ids: mx.array, weights: mx.array, ffn: FfnWeights, *, limit: float
) -> mx.array:
    """Sum of the chosen experts' outputs and the shared expert's.

    x: [T, D], ids: int32 [T, k], weights: f32 [T, k] -> [T, D] in x's dtype. A chosen expert's
    weight multiplies its activation before the down product; the sum is f32.
    """
    T, k = ids.shape
    if T * k < _SORT_ROWS:
        # One row stands for its k experts: x [T, 1, 1, D], ids [T, k] -> [T, k, 1, D].
        routed = _experts(x[:, None, None, :], ids, weights[..., None, None], ffn, limit, False)
        routed = mx.sum(routed[:, :, 0, :], axis=1)
    else:
        # Rows of one expert lie together: x [T*k, 1, D], ids [T*k] -> [T*k, 1, D].
        order = mx.argsort(ids.reshape(-1))
        rows, scale = x[order // k][:, None, :], weights.reshape(-1)[order][:, None, None]
        routed = _experts(rows, ids.reshape(-1)[order], scale, ffn, limit, True)
        routed = mx.sum(routed[mx.argsort(order)].reshape(T, k, -1), axis=1)
    gate, up = fp8_linear(x, ffn.shared_w1), fp8_linear(x, ffn.shared_w3)
    act = clamped_swiglu(gate.astype(mx.float32), up.astype(mx.float32), limit)
    shared = fp8_linear(act.astype(x.dtype), ffn.shared_w2)
    return (routed + shared.astype(mx.float32)).astype(x.dtype)


def _experts(
    x: mx.array, ids: mx.array, weights: mx.array, ffn: FfnWeights, limit: float, is_sorted: bool
) -> mx.array:
    gate = _expert_product(x, ids, ffn.w1, is_sorted)
    up = _expert_product(x, ids, ffn.w3, is_sorted)
    act = clamped_swiglu(gate, up, limit) * weights
    return _expert_product(act.astype(x.dtype), ids, ffn.w2, is_sorted)


def clamped_swiglu(gate: mx.array, up: mx.array, limit: float) -> mx.array:
    """silu(min(gate, limit)) * clip(up, -limit, limit), in f32."""
    gate = mx.minimum(gate, limit)
    return gate * mx.sigmoid(gate) * mx.clip(up, -limit, limit)


def _expert_product(x: mx.array, ids: mx.array, w: Fp4, is_sorted: bool) -> mx.array:
    """x [.., 1, K] times the experts `ids`, transposed, rounded to x's dtype: f32 [.., 1, N]."""
    # MLX's product on the CPU accumulates in its input's type; on the GPU in f32.
    y = mx.gather_qmm(
        x if mx.default_device() == mx.gpu else x.astype(mx.float32),
        w.weight,
        w.scale,
        rhs_indices=ids,
        transpose=True,
        group_size=32,
        bits=4,
        mode="mxfp4",
        sorted_indices=is_sorted,
    )
    return y.astype(x.dtype).astype(mx.float32)
