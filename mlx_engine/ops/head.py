"""The product with the head: the logits over the vocabulary."""

import mlx.core as mx

from mlx_engine.ops import launch
from mlx_engine.ops.linear import linear_f32, linear_f32_reference

# Where MLX multiplies, the bf16 head is widened by slices of this many values: 64 MiB of f32 each.
_SLICE_VALUES = 1 << 24


def head_logits(x: mx.array, head: mx.array) -> mx.array:
    """x [T, D] times the head bf16 [V, D] transposed, in f32: f32 [T, V]."""
    if launch.is_on("linear"):
        return linear_f32(x, head)
    return head_logits_reference(x, head)


def head_logits_reference(x: mx.array, head: mx.array) -> mx.array:
    """`head_logits` in MLX's operations."""
    V, D = head.shape
    step = max(1, _SLICE_VALUES // D)
    parts = [linear_f32_reference(x, head[first : first + step]) for first in range(0, V, step)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
