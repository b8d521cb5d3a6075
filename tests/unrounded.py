"""Row formats that keep f32 as it is: the model apart from the roundings of its cache."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_engine.formats import CacheFormats


@dataclass(frozen=True)
class Unrounded:
    """One word a value, and a scale byte that says nothing."""

    def words(self, width: int) -> int:
        return width

    def pack(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32).view(mx.uint32)

    def unpack(self, rows: mx.array, width: int) -> mx.array:
        return rows.view(mx.float32)

    def encode(self, x: mx.array) -> tuple[mx.array, mx.array]:
        return self.pack(x), mx.zeros((*x.shape[:-1], 1), dtype=mx.uint8)

    def decode(self, codes: mx.array, scales: mx.array) -> mx.array:
        return codes.view(mx.float32)

    def product(self, x: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
        return x @ codes.view(mx.float32).T


UNROUNDED = CacheFormats(Unrounded(), Unrounded(), Unrounded())
