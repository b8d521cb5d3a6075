"""The inputs of a benchmark's cases: a model's widths, random arrays, and one operation on them.

Everything is lazy until it is used, so that a list of cases takes no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, TypeVar, cast

import mlx.core as mx
import numpy as np

from mlx_engine.formats import PackedFormat
from mlx_engine.ops.mhc import Mixing
from mlx_engine.ops.rope import Rotation
from mlx_engine.weights import Fp4, Fp8

# Codes repeat after so many words, for the sake of memory: no divisor of any width.
_REPEATED_WORDS = (1 << 22) - 3

W = TypeVar("W")

# Of the inputs and the number of a copy of the rest: all that it computes, as one list.
Compute: TypeAlias = Callable[[tuple[mx.array, ...], int], list[mx.array]]


@dataclass(frozen=True)
class Sizes:
    """The widths of a model, by default the release's, with the checkpoint's own names.

    `experts` are held of `n_routed_experts` that the router knows, since all of a layer's would
    take 7 GB, and `head_rows` of the vocabulary. Each held expert gets as many of `many_tokens` as
    of a prefill chunk of 2,048 among all. `rows` and `keys` lie in the compressed and the index
    cache. What a call reads from memory comes in copies that hold `cold_bytes` together, more than
    any cache does: the largest known has 96 MB. With 48 experts no case takes over 2 GB.
    """

    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    swiglu_limit: float = 10.0
    sliding_window: int = 128
    hc_sinkhorn_iters: int = 20
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    engram_columns: int = 24
    engram_head_dim: int = 256
    vocab_size: int = 129_280
    experts: int = 48
    head_rows: int = 16_160
    rows: int = 16_384
    keys: int = 131_072
    few_tokens: int = 4
    many_tokens: int = 256
    cold_bytes: int = 256 << 20


class Numbers:
    """Random arrays, the same for every case, lazy until used; `n_bytes` of them so far."""

    def __init__(self, seed: int = 0) -> None:
        self.host = np.random.default_rng(seed)
        self.n_bytes = 0
        self._key = mx.random.key(seed)
        self._words = 0

    def normal(self, *shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        """Values of mean 0 and deviation 1."""
        return self._counted(mx.random.normal(shape, key=self._next()).astype(dtype))

    def words(self, *shape: int) -> mx.array:
        """uint32 of codes: a byte with its lowest bit clear is a number in e4m3 too."""
        return self._counted(self._codes(*shape))

    def scales(self, *shape: int, middle: int) -> mx.array:
        """uint8 exponents of e8m0, or any scales, about a middle."""
        return self._counted(self._bytes(*shape, middle=middle))

    def packed(self, fmt: PackedFormat, D: int, rows: int, count: int) -> list[mx.array]:
        """So many arrays of packed rows, uint32 [rows, words], of values of about 1."""
        codes = self._codes(count * rows, D * fmt.bits // 32)
        # 2^-7 times e4m3, or 0.375 times e2m1.
        middle = 120 if fmt.bits == 8 else 44
        rest = 4 * (fmt.words(D) - codes.shape[1])
        scales = self._bytes(count * rows, rest, middle=middle).view(mx.uint32)
        packed = self._counted(mx.concatenate([codes, scales], axis=-1))
        return [packed[first : first + rows] for first in range(0, count * rows, rows)]

    def _codes(self, *shape: int) -> mx.array:
        count = prod(shape)
        length = min(count, _REPEATED_WORDS)
        first, self._words = self._words, self._words + length
        # MLX draws integers from 24 bits of a float, which would leave every fourth byte zero.
        x = mx.arange(first, self._words, dtype=mx.uint32) * 0x9E3779B1
        x = (x ^ (x >> 15)) * 0x85EBCA6B
        x = (x ^ (x >> 13)) & 0xFEFEFEFE
        if length < count:
            x = mx.broadcast_to(x, (-(-count // length), length)).reshape(-1)[:count]
        return x.reshape(shape)

    def _bytes(self, *shape: int, middle: int) -> mx.array:
        return mx.random.randint(middle - 2, middle + 3, shape, mx.uint8, key=self._next())

    def fp8(self, N: int, K: int, groups: int | None = None) -> Fp8:
        """A dense weight whose product with values of deviation 1 has about that again."""
        lead = () if groups is None else (groups,)
        scale = self.scales(*lead, -(-N // 32), K // 32, middle=115)
        return Fp8(self.words(*lead, N, K // 4), scale)

    def fp4(self, E: int, N: int, K: int) -> Fp4:
        """Expert weights of that kind."""
        return Fp4(self.words(E, N, K // 8), self.scales(E, N, K // 32, middle=120))

    def rotation(self, tokens: int, rotated: int) -> Rotation:
        """A turn by random angles."""
        angle = mx.random.uniform(0, 6.28, (tokens, rotated // 2, 1), key=self._next())
        cos, sin = mx.cos(angle), mx.sin(angle)
        return Rotation(mx.concatenate([cos, cos], -1), mx.concatenate([-sin, sin], -1))

    def choices(self, tokens: int, count: int, among: int) -> mx.array:
        """Different ones of 0 .. among - 1, ascending: int32 [tokens, count]."""
        drawn = [np.sort(self.host.choice(among, count, replace=False)) for _ in range(tokens)]
        return mx.array(np.array(drawn, dtype=np.int32))

    def shares(self, sets: int, count: int, among: int) -> mx.array:
        """As `choices`, but no set has what another one has, as long as there are others left."""
        cut = among // count
        drawn = [
            self.host.permutation(among)[: cut * count].reshape(cut, count)
            for _ in range(-(-sets // cut))
        ]
        return mx.array(np.sort(np.concatenate(drawn)[:sets], axis=1).astype(np.int32))

    def scores(self, ids: mx.array, E: int) -> mx.array:
        """f32 [T, E] of which `ids` [T, k] are the greatest."""
        scores = self.host.random((ids.shape[0], E), np.float32)
        np.put_along_axis(
            scores, np.array(ids, dtype=np.int64), 1 + scores[:, : ids.shape[1]], axis=1
        )
        return mx.array(scores)

    def _next(self) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return key

    def _counted(self, x: mx.array) -> mx.array:
        self.n_bytes += x.nbytes
        return x


@dataclass(frozen=True)
class Work:
    """One operation on its inputs and a copy of all else that it reads.

    `inputs` are what each launch of it waits for, so that a call which gets them from another one
    starts after it. A call must move `n_bytes`; calls with every copy, `touched_bytes` different
    ones.
    """

    inputs: tuple[mx.array, ...]
    compute: Compute
    copies: int
    n_bytes: int
    touched_bytes: int


def work(
    x: mx.array,
    function: Callable[[mx.array, W], Any],
    weights: list[W],
    n_bytes: int,
    own_bytes: int = 0,
) -> Work:
    """A function of x and one of `weights`, of which each has `own_bytes` to read."""
    return Work(
        (x,),
        lambda inputs, copy: _arrays(function(inputs[0], weights[copy])),
        len(weights),
        n_bytes,
        n_bytes + (len(weights) - 1) * own_bytes,
    )


def _arrays(value: Any) -> list[mx.array]:
    """Every array of a result: of tuples, and of a sublayer's coefficients."""
    if isinstance(value, Mixing):
        value = (value.pre, value.post, value.comb)
    if isinstance(value, tuple):
        return [array for part in cast("tuple[Any, ...]", value) for array in _arrays(part)]
    return [] if value is None else [value]


def copies(sizes: Sizes, own_bytes: int) -> int:
    """How many copies of so many bytes a chain of calls goes through."""
    return max(-(-sizes.cold_bytes // own_bytes), 1)


def count_each(ids: mx.array) -> list[int]:
    """How often each of the different ones occurs."""
    return np.unique(np.array(ids, dtype=np.int32), return_counts=True)[1].tolist()
