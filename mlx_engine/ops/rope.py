"""Rotary positions: frequencies, the table of a chunk, and the rotation (section 3.3).

Pairs are interleaved and sit in the last channels of a vector. Angles are made on the host, where
a float64 cosine of the f32 angle is exact on every device and at every position.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, log, pi

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.config import ModelConfig, YarnConfig


@dataclass(frozen=True)
class Rotation:
    """cos, sin: f32 [T, R/2, 2] for T positions and R/2 pairs of rotated channels.

    A pair turns by pair * cos + swapped pair * sin, so sin has its sign of each half.
    """

    cos: mx.array
    sin: mx.array

    def last(self, tokens: int) -> "Rotation":
        """The rotation of the last `tokens` positions only."""
        first = self.cos.shape[0] - tokens
        return self if first == 0 else Rotation(self.cos[first:], self.sin[first:])


def rotation(config: ModelConfig, positions: NDArray[np.int64], *, is_compressed: bool) -> Rotation:
    """The table for positions [T]: with YaRN in layers that have compressed attention."""
    if is_compressed:
        theta, yarn = config.compress_rope_theta, config.yarn
    else:
        theta, yarn = config.rope_theta, None
    frequencies = rope_frequencies(config.qk_rope_head_dim, theta, yarn)
    # The product is f32 as in the vendor's arithmetic; at large positions its rounding shows.
    angles = positions.astype(np.float32)[:, None] * frequencies[None, :]
    cos, sin = np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)
    return Rotation(
        mx.array(np.stack([cos, cos], axis=-1).astype(np.float32)),
        mx.array(np.stack([-sin, sin], axis=-1).astype(np.float32)),
    )


@lru_cache(maxsize=8)
def rope_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> NDArray[np.float32]:
    """f32 [dim/2] frequencies; YaRN (arXiv 2309.00071) without its attention factor."""
    i = np.arange(dim // 2, dtype=np.float64)
    frequencies = theta ** (-2 * i / dim)
    if yarn is not None:
        low, high = yarn_bounds(dim, theta, yarn)
        # A ramp of no width would divide by zero.
        width = high - low or 0.001
        ramp = np.clip((i - low) / width, 0, 1)
        frequencies = frequencies * (1 - ramp) + frequencies / yarn.factor * ramp
    return frequencies.astype(np.float32)


def yarn_bounds(dim: int, theta: float, yarn: YarnConfig) -> tuple[int, int]:
    """The channels between which the frequencies pass from kept to divided by the factor."""

    def channel(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * log(length / (2 * pi * turns)) / (2 * log(theta))

    return max(floor(channel(yarn.beta_fast)), 0), min(ceil(channel(yarn.beta_slow)), dim - 1)


def rotate(x: mx.array, at: Rotation, *, is_inverse: bool = False) -> mx.array:
    """Rotate the last R channels of x [T, .., D] by its position's angle, in f32, cast back."""
    half = at.cos.shape[-2]
    shape = (x.shape[0], *(1 for _ in range(x.ndim - 2)), half, 2)
    cos, sin = at.cos.reshape(shape), at.sin.reshape(shape)
    kept, pairs = x[..., : -2 * half], x[..., -2 * half :].astype(mx.float32)
    pairs = pairs.reshape(*x.shape[:-1], half, 2)
    turned = pairs[..., ::-1] * (-sin if is_inverse else sin)
    turned = (pairs * cos + turned).reshape(*x.shape[:-1], 2 * half)
    return mx.concatenate([kept, turned.astype(x.dtype)], axis=-1)
