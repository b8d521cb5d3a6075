"""Rotary position embedding with YaRN (spec 3.3)."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.formats import Float


def yarn_bounds(dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[int, int]:
    """The first and last frequency between which YaRN blends (spec 3.3)."""

    def corr(turns: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = math.floor(corr(scaling["beta_fast"])), math.ceil(corr(scaling["beta_slow"]))
    return max(low, 0), min(high, dim - 1)


def rope_frequencies(dim: int, theta: float, scaling: Mapping[str, Any] | None) -> Float:
    """Frequencies [dim / 2], with YaRN if `scaling` is given."""
    i = np.arange(dim // 2)
    f = theta ** (-2.0 * i / dim)
    if scaling is None:
        return f
    low, high = yarn_bounds(dim, theta, scaling)
    width = high - low if high != low else 0.001
    r = np.clip((i - low) / width, 0, 1)
    return f * (1 - r) + f / scaling["factor"] * r


def rope(
    x: Float, positions: NDArray[np.int64], frequencies: Float, inverse: bool = False
) -> Float:
    """Rotate the last channels of x [N, ..., C], pairs (2i, 2i + 1); positions [N]."""
    angle32 = positions.astype(np.float32)[:, None] * frequencies.astype(np.float32)
    angle = angle32.astype(np.float64) * (-1 if inverse else 1)
    angle = angle.reshape(len(x), *[1] * (x.ndim - 2), len(frequencies))
    cos, sin = np.cos(angle), np.sin(angle)
    out = x.copy()
    rotated = out[..., -2 * len(frequencies) :]
    re, im = rotated[..., 0::2].copy(), rotated[..., 1::2].copy()
    rotated[..., 0::2] = re * cos - im * sin
    rotated[..., 1::2] = re * sin + im * cos
    return out
