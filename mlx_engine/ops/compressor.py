"""Compressed rows and index keys: R tokens pooled into one latent (sections 3.5, 3.6)."""

import mlx.core as mx

from mlx_engine.formats import RowFormat
from mlx_engine.ops.linear import linear_f32
from mlx_engine.ops.norm import rms_norm
from mlx_engine.ops.rope import Rotation, rotate


def pool_groups(kv: mx.array, gate: mx.array, ratio: int) -> mx.array:
    """Pool each full group of `ratio` rows, per channel, by the softmax of its gates.

    kv, gate: f32 [G * ratio, head_dim] -> f32 [G, head_dim].
    """
    D = kv.shape[-1]
    share = mx.softmax(gate.reshape(-1, ratio, D), axis=1)
    return mx.sum(kv.reshape(-1, ratio, D) * share, axis=1)


def compressed_rows(latent: mx.array, at: Rotation, fmt: RowFormat) -> mx.array:
    """The cached form of normed latents [G, head_dim] at their groups' first positions."""
    return fmt.pack(rotate(latent, at))


def index_keys(
    latent: mx.array, wk: mx.array, k_norm: mx.array, at: Rotation, fmt: RowFormat, norm_eps: float
) -> tuple[mx.array, mx.array]:
    """The cached index keys of normed, unrotated latents [G, head_dim]: codes and scales."""
    key = linear_f32(latent, wk).astype(latent.dtype)
    return fmt.encode(rotate(rms_norm(key, k_norm, norm_eps), at))
