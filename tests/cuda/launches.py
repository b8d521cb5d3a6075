"""Every launch of the operations at the released widths, recorded without being made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_engine.cuda.kernels import CudaKernel
from mlx_engine.formats import COMPRESSED, INDEX, WINDOW, CacheFormats
from mlx_engine.ops import launch
from mlx_engine.ops.attention import SelectedRows, WindowRows, sparse_attention
from mlx_engine.ops.engram import engram_gate
from mlx_engine.ops.experts import moe
from mlx_engine.ops.front import Ring, attention_front, encoded_keys, index_queries, pooled_rows
from mlx_engine.ops.indexer import IndexKeys, IndexQueries, choose_rows
from mlx_engine.ops.linear import (
    fp8_linear,
    fp8_linear_pair,
    grouped_output,
    linear_f32,
    linear_f32_pair,
)
from mlx_engine.ops.mhc import (
    MhcSublayer,
    Mixing,
    mhc_between,
    mhc_collapse_norm,
    mhc_enter,
    mhc_expand,
)
from mlx_engine.ops.project import mhc_project
from mlx_engine.ops.rope import Rotation
from mlx_engine.ops.router import Router, mhc_route
from mlx_engine.ops.sampling import draw
from mlx_engine.weights import EngramWeights, FfnWeights, Fp4, Fp8, MhcWeights

# The released widths (docs/model.md, section 1).
D, I_D, E, K = 5120, 2304, 384, 6
H, HEAD, R, LATENT, GROUPS, O_RANK = 64, 512, 64, 1280, 8, 1024
INDEX_H, INDEX_D, TOP_K, BLOCK, BLOCKS = 32, 128, 512, 8, 2048
VOCABULARY = 129_280


@dataclass
class Recorder:
    """A factory whose kernels only note how they are called, and answer with zeros."""

    calls: list[tuple[CudaKernel, dict[str, Any]]] = field(
        default_factory=list[tuple[CudaKernel, dict[str, Any]]]
    )

    def __call__(self, **arguments: Any) -> Callable[..., list[mx.array]]:
        return self._noting(CudaKernel(**arguments, is_native=False))

    def native(self, **arguments: Any) -> Callable[..., list[mx.array]]:
        return self._noting(CudaKernel(**arguments, is_native=True))

    def _noting(self, kernel: CudaKernel) -> Callable[..., list[mx.array]]:
        def run(**call: Any) -> list[mx.array]:
            self.calls.append((kernel, call))
            return [
                mx.zeros(shape, dtype)
                for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
            ]

        return run

    __hash__ = object.__hash__


def record(recorder: Any, tokens: Sequence[int], dtypes: Sequence[mx.Dtype]) -> None:
    """Call every operation for so many tokens in every dtype; nothing is computed."""
    with launch.using(recorder):
        for T in tokens:
            for dtype in dtypes:
                _experts(T, dtype)
                _dense(T, dtype)
                _front(T, dtype)
                _mhc(T, dtype)
                _attention(T, dtype)
                _indexer(T, dtype)
                _engram(T, dtype)
        _sampling()


def fp8(N: int, K_in: int, *lead: int) -> Fp8:
    return Fp8(
        mx.zeros((*lead, N, K_in // 4), mx.uint32),
        mx.zeros((*lead, -(-N // 32), K_in // 32), mx.uint8),
    )


def fp4(N: int, K_in: int) -> Fp4:
    return Fp4(mx.zeros((E, N, K_in // 8), mx.uint32), mx.zeros((E, N, K_in // 32), mx.uint8))


def _experts(T: int, dtype: mx.Dtype) -> None:
    ffn = FfnWeights(
        mx.zeros((E, D), mx.bfloat16),
        mx.zeros((E,)),
        *(fp4(I_D, D), fp4(D, I_D), fp4(I_D, D)),
        *(fp8(I_D, D), fp8(D, I_D), fp8(I_D, D)),
    )
    h, streams, last, to = _between_sublayers(T, dtype)
    router = Router(ffn.gate_weight, ffn.gate_bias, K, 1.0, True, 1.5)
    _, x, _, routing = mhc_route(h, streams, last, last.pre, to, router)
    moe(x, routing, ffn, limit=10.0)
    mhc_project(h, streams, last, last.pre, to, fp8(LATENT, D), fp8(HEAD, D))
    routing.chosen()


def _between_sublayers(T: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, Mixing, MhcSublayer]:
    w = MhcWeights(fn=mx.zeros((24, 4 * D)), base=mx.zeros((24,)), scale=mx.zeros((3,)))
    to = MhcSublayer(w, mx.zeros((D,), mx.bfloat16), iters=20, hc_eps=1e-6, norm_eps=1e-6)
    last = Mixing(mx.zeros((T, 4)), mx.zeros((T, 4)), mx.zeros((T, 4, 4)))
    return mx.zeros((T, D), dtype), mx.zeros((T, 4, D), dtype), last, to


def _dense(T: int, dtype: mx.Dtype) -> None:
    x = mx.zeros((T, D), dtype)
    fp8_linear_pair(x, fp8(LATENT, D), fp8(HEAD, D))
    fp8_linear(mx.zeros((T, LATENT), dtype), fp8(H * HEAD, LATENT))
    fp8_linear(mx.zeros((T, LATENT), dtype), fp8(INDEX_H * INDEX_D, LATENT))
    grouped_output(
        mx.zeros((T, H, HEAD), dtype),
        fp8(O_RANK, H * HEAD // GROUPS, GROUPS),
        fp8(D, GROUPS * O_RANK),
    )
    bf16 = mx.zeros((HEAD, D), mx.bfloat16)
    linear_f32_pair(x, bf16, bf16)
    linear_f32(x, mx.zeros((INDEX_H, D), mx.bfloat16))
    linear_f32(mx.zeros((T, HEAD), dtype), mx.zeros((INDEX_D, HEAD), mx.bfloat16))
    if T == 1:
        linear_f32(x, mx.zeros((VOCABULARY, D), mx.bfloat16))


def rotation(T: int) -> Rotation:
    return Rotation(mx.zeros((T, R // 2, 2)), mx.zeros((T, R // 2, 2)))


def _front(T: int, dtype: mx.Dtype) -> None:
    norm = mx.zeros((HEAD,), mx.bfloat16)
    ring = Ring(mx.zeros((128, WINDOW.words(HEAD)), mx.uint32), 5) if T == 1 else None
    for place in (None, ring):
        attention_front(
            mx.zeros((T, LATENT), dtype),
            mx.zeros((T, HEAD), dtype),
            mx.zeros((LATENT,), mx.bfloat16),
            norm,
            rotation(T),
            eps=1e-6,
            fmt=WINDOW,
            ring=place,
        )
    index_queries(
        mx.zeros((T, INDEX_H, INDEX_D), dtype),
        mx.zeros((T, D), dtype),
        mx.zeros((INDEX_H, D), mx.bfloat16),
        rotation(T),
        fmt=INDEX,
    )
    kv = mx.zeros((2 * T, HEAD))
    for ratio, gate in ((1, None), (2, kv)):
        pooled_rows(kv, gate, norm, rotation(T), ratio=ratio, dtype=dtype, eps=1e-6, fmt=COMPRESSED)
    encoded_keys(
        mx.zeros((T, INDEX_D)),
        mx.zeros((INDEX_D,), mx.bfloat16),
        rotation(T),
        dtype=dtype,
        eps=1e-6,
        fmt=INDEX,
    )


def _mhc(T: int, dtype: mx.Dtype) -> None:
    h, streams, last, to = _between_sublayers(T, dtype)
    mhc_between(h, streams, last, last.pre, to)
    mhc_enter(streams, last.pre, to)
    mhc_collapse_norm(streams, last.pre, to.norm_weight, 1e-6)
    mhc_expand(h, streams, last.post, last.comb)


def _attention(T: int, dtype: mx.Dtype) -> None:
    q = mx.zeros((T, H, HEAD), dtype)
    window = mx.zeros((128 + T - 1, WINDOW.words(HEAD)), mx.uint32)
    rows = mx.zeros((4096, COMPRESSED.words(HEAD)), mx.uint32)
    visible = mx.zeros((T,), mx.int32)
    for selected in (
        None,
        SelectedRows(rows[:300], visible, None),
        SelectedRows(rows, visible, mx.zeros((T, TOP_K), mx.int32)),
    ):
        sparse_attention(
            q,
            127,
            WindowRows(window, 0),
            selected,
            mx.zeros((H,)),
            sliding_window=128,
            at=rotation(T),
            formats=CacheFormats(),
            turns_q=True,
        )


def _indexer(T: int, dtype: mx.Dtype) -> None:
    for S in (700, 20_000):
        keys = IndexKeys(
            mx.zeros((S, INDEX_D // 8), mx.uint32), mx.zeros((S, INDEX_D // 32), mx.uint8), INDEX
        )
        queries = IndexQueries(
            mx.zeros((T, INDEX_H, INDEX_D), dtype),
            mx.zeros((T, INDEX_H)),
            mx.zeros((T,), mx.int32),
        )
        choose_rows(queries, keys, k=TOP_K, block_size=BLOCK, topk_blocks=BLOCKS)
        blocks = mx.zeros((T, BLOCKS), mx.int32)
        choose_rows(queries, keys, k=TOP_K, block_size=BLOCK, candidates=blocks)


def _engram(T: int, dtype: mx.Dtype) -> None:
    rows, head = 24, 256
    norms = mx.zeros((4, D), mx.bfloat16), mx.zeros((4, D), mx.bfloat16)
    engram_gate(
        mx.zeros((T, 4, D), dtype),
        mx.zeros((T, rows, head), mx.uint8),
        mx.zeros((T, rows, head // 32), mx.uint8),
        EngramWeights(fp8(5 * D, rows * head), *norms),
        1e-6,
    )


def _sampling() -> None:
    logits, key = mx.zeros((VOCABULARY,)), mx.zeros((2,), mx.uint32)
    for top_p in (1.0, 0.9):
        draw(logits, key, temperature=1.0, top_p=top_p, min_p=0.0)
