"""The product with the head: the logits over the vocabulary."""

import mlx.core as mx

from mlx_engine.ops.linear import linear_f32

# The head is kept in bf16 and widened by slices of this many values: 64 MiB of f32 each.
_SLICE_VALUES = 1 << 24


def head_logits(x: mx.array, head: mx.array) -> mx.array:
    """x [T, D] times the head bf16 [V, D] transposed, in f32: f32 [T, V]."""
    V, D = head.shape
    step = max(1, _SLICE_VALUES // D)
    parts = [linear_f32(x, head[first : first + step]) for first in range(0, V, step)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
