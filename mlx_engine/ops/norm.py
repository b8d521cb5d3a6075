"""RMSNorm with f32 statistics and a single rounding at the end."""

import mlx.core as mx


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x / rms(x) * weight over the last axis: [.., D] -> [.., D] in x's dtype.

    The weight multiplies in f32: MLX's own operation in bf16 would round once before it.
    """
    return mx.fast.rms_norm(x.astype(mx.float32), weight.astype(mx.float32), eps).astype(x.dtype)
