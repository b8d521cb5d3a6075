"""Manifold-constrained hyper-connections: the residual as hc parallel streams (section 3.2).

Shapes: T tokens, hc streams, D hidden_size. All coefficients are f32; streams are stored in the
activation dtype between sublayers.
"""

import mlx.core as mx

from mlx_engine.ops.linear import times_transposed
from mlx_engine.ops.norm import rms_norm
from mlx_engine.weights import MhcWeights


def mhc_coefficients(
    streams: mx.array, w: MhcWeights, *, iters: int, hc_eps: float, norm_eps: float
) -> tuple[mx.array, mx.array, mx.array]:
    """The mixing weights of one sublayer, from the streams that enter it.

    streams: [T, hc, D] -> pre f32 [T, hc], post f32 [T, hc], comb f32 [T, hc, hc].
    comb is made doubly stochastic by `iters` Sinkhorn rounds, columns last.
    """
    T, hc, _ = streams.shape
    flat = streams.reshape(T, -1).astype(mx.float32)
    rms = mx.rsqrt(mx.mean(flat * flat, axis=-1, keepdims=True) + norm_eps)
    mix = times_transposed(flat, w.fn) * rms * w.column_scale + w.base  # [T, (2 + hc) * hc]
    gates = mx.sigmoid(mix[:, : 2 * hc])
    comb = mx.softmax(mix[:, 2 * hc :].reshape(T, hc, hc), axis=-1) + hc_eps
    # A product with ones sums an axis, keeps it, and adds the epsilon in the same operation; of one
    # shape with comb neither needs a broadcast, of which a decode step would make a thousand.
    ones, eps = mx.ones((T, hc, hc)), mx.full((T, hc, hc), hc_eps)
    comb = comb / mx.addmm(eps, ones, comb)
    for _ in range(iters - 1):
        comb = comb / mx.addmm(eps, comb, ones)
        comb = comb / mx.addmm(eps, ones, comb)
    return gates[:, :hc] + hc_eps, 2 * gates[:, hc:], comb


def mhc_collapse_norm(
    streams: mx.array, pre: mx.array, norm_weight: mx.array, norm_eps: float
) -> mx.array:
    """A sublayer's input: the streams summed with weights `pre`, then RMSNorm.

    streams: [T, hc, D], pre: f32 [T, hc] -> [T, D] in the streams' dtype.
    """
    collapsed = mx.sum(pre[..., None] * streams.astype(mx.float32), axis=1)
    return rms_norm(collapsed.astype(streams.dtype), norm_weight, norm_eps)


def mhc_expand(h: mx.array, streams: mx.array, post: mx.array, comb: mx.array) -> mx.array:
    """Write a sublayer's output back: out[k] = post[k] h + sum_j comb[j, k] streams[j].

    h: [T, D], streams: [T, hc, D], post: f32 [T, hc], comb: f32 [T, hc, hc] -> [T, hc, D].
    The first index of comb is the one summed.
    """
    mixed = comb.swapaxes(-1, -2) @ streams.astype(mx.float32)
    out = post[..., None] * h.astype(mx.float32)[:, None, :] + mixed
    return out.astype(streams.dtype)
