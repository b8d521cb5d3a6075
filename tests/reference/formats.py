"""Number formats of the checkpoint and the roundings of cached values, in exact arithmetic.

Every comparison a rounding makes is exact in float64: scales and midpoints have few significant
bits, so `|x| > scale * midpoint` is decided without error (spec 2.2 and 3.8).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]
Codes = NDArray[np.uint8]


def _e4m3_value(code: int) -> float:
    """Sign 1, exponent 4 (bias 7), mantissa 3; no infinities, 0x7f and 0xff are NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = (
        2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    )
    return -magnitude if code & 0x80 else magnitude


E4M3: Float = np.array([_e4m3_value(code) for code in range(256)])
E2M1: Float = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3_MAGNITUDES = E4M3[:127]
E2M1_MAGNITUDES = E2M1[:8]


def e4m3(codes: Codes) -> Float:
    """Values of e4m3 codes."""
    return E4M3[codes]


def e2m1(packed: Codes) -> Float:
    """Values of packed e2m1 codes [..., n] -> [..., 2n]; the low nibble is the even index."""
    return E2M1[np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)]


def e8m0(codes: Codes) -> Float:
    """Values 2^(code - 127) of e8m0 codes; 255 is NaN."""
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127))


def bf16_decode(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Float32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16_round(values: ArrayLike) -> NDArray[np.float32]:
    """Finite values rounded to the nearest bf16, ties to even, as float32."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def fp8_weight(codes: Codes, scales: Codes) -> Float:
    """A dense weight: e4m3 codes [out, in] with one e8m0 scale for each 32 x 32 tile."""
    tiles = e8m0(scales).repeat(32, axis=0).repeat(32, axis=1)
    return e4m3(codes) * tiles[: codes.shape[0], : codes.shape[1]]


def fp4_weight(packed: Codes, scales: Codes) -> Float:
    """An expert weight: packed e2m1 [out, in / 2] with e8m0 scales [out, in / 32]."""
    return e2m1(packed) * e8m0(scales).repeat(32, axis=1)


class Rounded(NamedTuple):
    """Rounded values, and how far the closest call was from going the other way.

    `margin` is the smallest distance of a block's amax to a change of the scale, or of a value to
    a rounding midpoint, as a fraction of the block's amax.
    """

    values: Float
    margin: float


def round_window(x: Float) -> Rounded:
    """Window KV: e4m3, blocks of 32, power-of-two scale."""
    return _round_power_of_two(x, E4M3_MAGNITUDES, amax_floor=1e-4)


def round_index(x: Float) -> Rounded:
    """Index queries and keys: e2m1, blocks of 32, power-of-two scale."""
    return _round_power_of_two(x, E2M1_MAGNITUDES, amax_floor=6 * 2.0**-126)


def round_compressed(x: Float) -> Rounded:
    """Compressed KV: e2m1, blocks of 16, e4m3 scale."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    # The scale is amax / 6 rounded to e4m3; rounding amax on a grid 6 times as wide is exact.
    bounded = np.clip(amax, 6 * 2.0**-9, 6 * 448.0)
    code, scale_distance = _nearest(bounded, np.full_like(amax, 6.0), E4M3_MAGNITUDES)
    return _round_blocks(x, blocks, E4M3[code], scale_distance, E2M1_MAGNITUDES)


def _round_power_of_two(x: Float, magnitudes: Float, amax_floor: float) -> Rounded:
    """Round with the smallest power of two that brings the block's amax within the format."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    amax = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), amax_floor)
    # amax = m 2^e and limit = ml 2^el with m, ml in [0.5, 1): ceil(log2(amax / limit)).
    mantissa, exponent = np.frexp(amax)
    limit_mantissa, limit_exponent = np.frexp(magnitudes[-1])
    scale = np.ldexp(1.0, exponent - limit_exponent + (mantissa > limit_mantissa))
    limit = scale * magnitudes[-1]
    # The next smaller scale would do for amax <= limit / 2; the floor itself is no close call.
    scale_distance = np.where(amax > amax_floor, np.minimum(limit - amax, amax - limit / 2), np.inf)
    return _round_blocks(x, blocks, scale, scale_distance, magnitudes)


def _round_blocks(
    x: Float, blocks: Float, scale: Float, scale_distance: Float, magnitudes: Float
) -> Rounded:
    code, distance = _nearest(np.abs(blocks), scale, magnitudes)
    values = np.copysign(magnitudes[code] * scale, blocks)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    closest = np.minimum(distance.min(axis=-1, keepdims=True), scale_distance)
    margin = np.min(closest / np.where(amax > 0, amax, 1.0), initial=np.inf)
    return Rounded(values.reshape(x.shape), float(margin))


def _nearest(x: Float, scale: Float, magnitudes: Float) -> tuple[NDArray[np.int64], Float]:
    """Code of the entry of `scale * magnitudes` nearest to x >= 0, and x's distance to a midpoint.

    A tie goes to the even code; above the last entry the last code is taken.
    """
    code = np.zeros(x.shape, np.int64)
    distance = np.full(x.shape, np.inf)
    for lower, midpoint in enumerate((magnitudes[:-1] + magnitudes[1:]) / 2):
        threshold = scale * midpoint
        upper_wins_ties = lower % 2 == 1
        code += (x >= threshold) if upper_wins_ties else (x > threshold)
        distance = np.minimum(distance, np.abs(x - threshold))
    return code, distance
