"""The number formats of the checkpoint and the cache: codes, rounding, packed rows.

The one home of e4m3, e8m0 and e2m1 in MLX operations. A cached row is its codes followed by its
group scales, in whole 32-bit words; the model was trained on these rounded values, so packing
loses nothing (docs/model.md, section 3.8). Everything here is exact: scales are powers of two
taken from the exponent field, never from a floating-point logarithm.
"""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

E4M3_MAX = 448.0
E2M1_MAX = 6.0


class RowFormat(Protocol):
    """How a cached row of floats lies in memory; tests put an unrounded one in its place."""

    def words(self, width: int) -> int:
        """32-bit words of a packed row of `width` values."""
        ...

    def pack(self, x: mx.array) -> mx.array:
        """[.., width] floats -> uint32 [.., words]."""
        ...

    def unpack(self, rows: mx.array, width: int) -> mx.array:
        """uint32 [.., words] -> f32 [.., width]."""
        ...

    def encode(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """[.., width] floats -> codes uint32 [.., code words], scales uint8 [.., groups]."""
        ...

    def decode(self, codes: mx.array, scales: mx.array) -> mx.array:
        """The values of codes and scales -> f32 [.., width]."""
        ...

    def product(self, x: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
        """f32 [M, width] times S rows of codes and scales, transposed -> f32 [M, S]."""
        ...


@dataclass(frozen=True)
class PackedFormat:
    """Codes of `bits` with one scale byte per `group` values; `mode` is MLX's name for the pair."""

    mode: str
    bits: int
    group: int

    def words(self, width: int) -> int:
        """32-bit words of a packed row; a row that ends inside a word is padded with zeros."""
        return -(-(width * self.bits // 8 + width // self.group) // 4)

    def pack(self, x: mx.array) -> mx.array:
        """Round floats [.., width] to rows: uint32 [.., words]."""
        *lead, width = x.shape
        codes, scales = self.encode(x)
        parts = [codes.view(mx.uint8), scales]
        padding = self.words(width) * 4 - width * self.bits // 8 - width // self.group
        if padding:
            parts.append(mx.zeros((*lead, padding), dtype=mx.uint8))
        return mx.concatenate(parts, axis=-1).view(mx.uint32)

    def unpack(self, rows: mx.array, width: int) -> mx.array:
        """The exact values of rows: uint32 [.., words] -> f32 [.., width]."""
        code_words = width * self.bits // 32
        scales = mx.contiguous(rows[..., code_words:]).view(mx.uint8)
        codes = mx.contiguous(rows[..., :code_words])
        return self.decode(codes, scales[..., : width // self.group])

    def encode(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Round floats [.., width]: codes uint32 [.., width * bits / 32], scales uint8 [.., n].

        The scale is made from the group's largest value times the f32 reciprocal of the format's.
        """
        *lead, width = x.shape
        groups = x.astype(mx.float32).reshape(*lead, width // self.group, self.group)
        amax = mx.max(mx.abs(groups), axis=-1, keepdims=True)
        if self.mode == "nvfp4":
            scale = mx.to_fp8(mx.clip(amax * (1 / E2M1_MAX), 2.0**-9, E4M3_MAX))
            codes = e2m1_codes(groups / mx.from_fp8(scale, mx.float32))
        elif self.mode == "mxfp4":
            scale = _e8m0_ceil(mx.maximum(amax, E2M1_MAX * 2.0**-126) * (1 / E2M1_MAX))
            codes = e2m1_codes(groups * _e8m0_reciprocal(scale))
        else:
            scale = _e8m0_ceil(mx.maximum(amax, 1e-4) * (1 / E4M3_MAX))
            codes = mx.to_fp8(mx.clip(groups * _e8m0_reciprocal(scale), -E4M3_MAX, E4M3_MAX))
        codes = codes.reshape(*lead, width)
        if self.bits == 4:
            codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return codes.view(mx.uint32), scale.reshape(*lead, width // self.group)

    def decode(self, codes: mx.array, scales: mx.array) -> mx.array:
        """The exact values of codes uint32 [.., n] with their scales: f32 [.., width]."""
        return mx.dequantize(
            codes,
            scales,
            group_size=self.group,
            bits=self.bits,
            mode=self.mode,
            dtype=mx.float32,
        )

    def product(self, x: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
        """x [M, width] f32 times S rows of codes and scales, read where they lie: f32 [M, S]."""
        return mx.quantized_matmul(
            x,
            codes,
            scales,
            transpose=True,
            group_size=self.group,
            bits=self.bits,
            mode=self.mode,
        )


WINDOW = PackedFormat("mxfp8", bits=8, group=32)
COMPRESSED = PackedFormat("nvfp4", bits=4, group=16)
INDEX = PackedFormat("mxfp4", bits=4, group=32)


@dataclass(frozen=True)
class CacheFormats:
    """The formats of the three kinds of cached rows (section 3.8)."""

    window: RowFormat = WINDOW
    compressed: RowFormat = COMPRESSED
    index: RowFormat = INDEX


def e2m1_codes(x: mx.array) -> mx.array:
    """Round to the nearest e2m1 value, ties to the even code, clipped to 6: uint8 codes."""
    mag = mx.minimum(mx.abs(x), E2M1_MAX)
    # The values lie 0.5 apart below 2, 1 apart below 4 and 2 apart above; codes count them.
    steps = mx.where(mag < 2, mx.round(mag * 2), mx.round(mag) + 2)
    steps = mx.where(mag < 4, steps, mx.round(mag / 2) + 4).astype(mx.uint8)
    return steps | ((x < 0).astype(mx.uint8) << 3)


def _e8m0_ceil(x: mx.array) -> mx.array:
    """The e8m0 byte of the least power of two that is at least x, a normal f32: uint8."""
    bits = x.view(mx.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(mx.uint32)
    return exponent.astype(mx.uint8)


def _e8m0_reciprocal(scale: mx.array) -> mx.array:
    """One over the value of an e8m0 byte between 1 and 253, exactly: f32."""
    return ((254 - scale.astype(mx.uint32)) << 23).view(mx.float32)
