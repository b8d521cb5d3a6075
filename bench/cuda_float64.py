"""How far each operation of an NVIDIA GPU is from float64 at the released widths.

    python -m bench.cuda_float64

Relative errors, the norm of a difference over that of the result in float64, which NumPy computes
from the same packed weights by the formulas of tests/reference. What an operation stores in bf16
costs about 2^-9 each time. Packed rows and chosen ids are discrete: the share that differs. Experts
are 8 of the release's 384, whose widths they have.
"""

import json
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.cuda.kernels import CudaKernels
from mlx_engine.formats import COMPRESSED, INDEX, WINDOW, CacheFormats
from mlx_engine.kernel_inputs import Numbers, Sizes
from mlx_engine.ops import attention, engram, experts, front, indexer, launch, linear, mhc, router
from mlx_engine.ops.attention import SelectedRows, WindowRows
from mlx_engine.ops.indexer import IndexKeys, IndexQueries
from mlx_engine.ops.rope import Rotation
from mlx_engine.weights import EngramWeights, FfnWeights, Fp4, Fp8, MhcWeights
from tests.reference import engram as engram_reference
from tests.reference import formats, forward

Float: TypeAlias = NDArray[np.float64]
Errors: TypeAlias = dict[str, float]

_S = Sizes(experts=8)
_EPS = 1e-6


def operations() -> Errors:
    """The error of every operation, by its name and number of tokens."""
    numbers = Numbers(seed=int(np.random.default_rng().integers(1 << 30)))
    errors: Errors = {}
    for T in (1, 64):
        for make in (_products, _mhc, _experts, _front, _attention, _engram):
            errors |= {f"{name} {T}": error for name, error in make(numbers, T).items()}
            mx.clear_cache()
    return errors | _index_choice(numbers)


def wide(x: mx.array) -> Float:
    """An array's values."""
    return np.array(x.astype(mx.float32), np.float64)


def distance(found: mx.array, wanted: Float) -> float:
    """The norm of the difference over that of what is wanted."""
    return float(np.linalg.norm(wide(found) - wanted) / np.linalg.norm(wanted))


def _bytes(x: mx.array) -> NDArray[np.uint8]:
    return np.array(x.view(mx.uint8), np.uint8)


def _fp8(w: Fp8) -> Float:
    if w.weight.ndim == 2:
        return formats.fp8_weight(_bytes(w.weight), _bytes(w.scale))
    groups = [_fp8(Fp8(*of)) for of in zip(w.weight, w.scale, strict=True)]
    return np.array(groups, np.float64)


def _fp4(w: Fp4, expert: int) -> Float:
    return formats.fp4_weight(_bytes(w.weight[expert]), _bytes(w.scale[expert]))


def _products(numbers: Numbers, T: int) -> Errors:
    D, L, H, HEAD, G = 5120, _S.q_lora_rank, _S.num_attention_heads, _S.head_dim, _S.o_groups
    x, latent, o = numbers.normal(T, D), numbers.normal(T, L), numbers.normal(T, H, HEAD)
    wq_a, wkv, wq_b = numbers.fp8(L, D), numbers.fp8(HEAD, D), numbers.fp8(H * HEAD, L)
    wo_a = numbers.fp8(_S.o_lora_rank, H * HEAD // G, groups=G)
    wo_b = numbers.fp8(D, G * _S.o_lora_rank)
    head, gate = numbers.normal(_S.head_rows, D), numbers.normal(HEAD, D)
    of_a, of_kv = linear.fp8_linear_pair(x, wq_a, wkv)
    y = np.einsum("tgi,goi->tgo", wide(o).reshape(T, G, -1), _fp8(wo_a), optimize=True)
    return {
        "wq_a": distance(of_a, wide(x) @ _fp8(wq_a).T),
        "wkv": distance(of_kv, wide(x) @ _fp8(wkv).T),
        "wq_b": distance(linear.fp8_linear(latent, wq_b), wide(latent) @ _fp8(wq_b).T),
        "wo_a, wo_b": distance(
            linear.grouped_output(o, wo_a, wo_b), y.reshape(T, -1) @ _fp8(wo_b).T
        ),
        "head": distance(linear.linear_f32(x, head), wide(x) @ wide(head).T),
        "compressor": distance(linear.linear_f32_pair(x, gate, gate)[0], wide(x) @ wide(gate).T),
    }


def _mhc(numbers: Numbers, T: int) -> Errors:
    D, hc, E = _S.hidden_size, 4, _S.n_routed_experts
    h, streams = numbers.normal(T, D), numbers.normal(T, hc, D)
    shares = mx.softmax(numbers.normal(T, 2 + hc, hc, dtype=mx.float32), axis=-1)
    last = mhc.Mixing(shares[:, 0], shares[:, 1], shares[:, 2:])
    fn = numbers.normal(24, hc * D, dtype=mx.float32) * (hc * D) ** -0.5
    base, scale = numbers.normal(24, dtype=mx.float32), mx.array([0.5, 0.5, 0.5])
    norm, gate = numbers.normal(D), numbers.normal(E, D)
    to = mhc.MhcSublayer(MhcWeights(fn, base, scale), norm, 20, _EPS, _EPS)
    of = router.Router(gate, mx.zeros((E,)), 6, D**0.5, True, 1.5)
    found, x, mixing, routing = router.mhc_route(h, streams, last, last.pre, to, of)

    wanted = forward.expand(wide(h), wide(streams), wide(last.post), wide(last.comb))
    wanted_x = forward.rms_norm(forward.collapse(wanted, wide(last.pre)), wide(norm), _EPS)
    v = wanted.reshape(T, -1)
    m = v @ wide(fn).T / np.sqrt((v**2).mean(-1, keepdims=True) + _EPS)
    m = m * np.repeat(wide(scale), (hc, hc, hc * hc)) + wide(base)
    comb = forward.sinkhorn(m[:, 2 * hc :].reshape(T, hc, hc), 20, _EPS)
    logits = wanted_x @ wide(gate).T / of.gate_temp
    scores = np.sqrt(np.maximum(logits, 0) + np.log1p(np.exp(-np.abs(logits))))
    return {
        "mhc streams": distance(found, wanted),
        "mhc x": distance(x, wanted_x),
        "mhc pre": distance(mixing.pre, forward.sigmoid(m[:, :hc]) + _EPS),
        "mhc post": distance(mixing.post, 2 * forward.sigmoid(m[:, hc : 2 * hc])),
        "mhc comb": distance(mixing.comb, comb),
        "router scores": distance(routing.scores, scores),
    }


def _experts(numbers: Numbers, T: int) -> Errors:
    E, D, I_D, k = _S.experts, _S.hidden_size, _S.moe_intermediate_size, _S.num_experts_per_tok
    of = router.Router(mx.zeros((E, 1)), mx.zeros((E,)), k, 1.0, True, 1.5)
    routed = numbers.fp4(E, I_D, D), numbers.fp4(E, D, I_D), numbers.fp4(E, I_D, D)
    shared = numbers.fp8(I_D, D), numbers.fp8(D, I_D), numbers.fp8(I_D, D)
    ffn = FfnWeights(of.weight, of.bias, *routed, *shared)
    x, ids = numbers.normal(T, D), numbers.choices(T, k, E)
    scores = numbers.scores(ids, E)
    found = experts.moe(x, router.Routing(scores, of), ffn, limit=_S.swiglu_limit)

    def expert(x: Float, w1: Float, w2: Float, w3: Float) -> Float:
        gate = np.minimum(x @ w1.T, _S.swiglu_limit)
        up = np.clip(x @ w3.T, -_S.swiglu_limit, _S.swiglu_limit)
        return (gate * forward.sigmoid(gate) * up) @ w2.T

    chosen = np.zeros((T, E))
    np.put_along_axis(chosen, np.array(ids, np.int64), 1.0, axis=1)
    weights = wide(scores) * chosen
    weights *= of.scaling_factor / weights.sum(-1, keepdims=True)
    wanted = expert(wide(x), *(_fp8(w) for w in shared))
    for e in range(E):
        t = np.flatnonzero(chosen[:, e])
        if t.size:
            wanted[t] += weights[t, e, None] * expert(wide(x)[t], *(_fp4(w, e) for w in routed))
    return {"experts": distance(found, wanted)}


def _turned(x: Float, at: Rotation, *, is_inverse: bool = False) -> Float:
    """The last channels of x [T, .., D] turned by f32 angles' cosines and sines."""
    cos, sin = wide(at.cos), wide(at.sin) * (-1 if is_inverse else 1)
    R, lead = 2 * cos.shape[1], (len(x), *[1] * (x.ndim - 2))
    pairs = x[..., -R:].reshape(*x.shape[:-1], R // 2, 2)
    turned = pairs * cos.reshape(*lead, R // 2, 2) + pairs[..., ::-1] * sin.reshape(*lead, -1, 2)
    return np.concatenate([x[..., :-R], turned.reshape(*x.shape[:-1], R)], axis=-1)


def _front(numbers: Numbers, T: int) -> Errors:
    D, L = _S.head_dim, _S.q_lora_rank
    latent, kv, at = numbers.normal(T, L), numbers.normal(T, D), numbers.rotation(T, 64)
    q_norm, kv_norm = numbers.normal(L), numbers.normal(D)
    qr, rows = front.attention_front(latent, kv, q_norm, kv_norm, at, eps=_EPS, fmt=WINDOW)
    pooled, gate = (numbers.normal(2 * T, D, dtype=mx.float32) for _ in range(2))
    _, packed = front.pooled_rows(
        pooled, gate, kv_norm, at, ratio=2, dtype=mx.bfloat16, eps=_EPS, fmt=COMPRESSED
    )
    normed = _turned(forward.rms_norm(wide(kv), wide(kv_norm), _EPS), at)
    shares = forward.softmax(wide(gate).reshape(T, 2, D), axis=1)
    mixed = (shares * wide(pooled).reshape(T, 2, D)).sum(1)
    pooled_norm = _turned(forward.rms_norm(mixed, wide(kv_norm), _EPS), at)
    return {
        "q norm": distance(qr, forward.rms_norm(wide(latent), wide(q_norm), _EPS)),
        "window rows that differ": _share(
            WINDOW.unpack(rows, D), formats.round_window(normed).values
        ),
        "compressed rows that differ": _share(
            COMPRESSED.unpack(packed, D), formats.round_compressed(pooled_norm).values
        ),
    }


def _share(found: mx.array, wanted: Float) -> float:
    differ: NDArray[np.bool_] = wide(found) != wanted
    return float(np.count_nonzero(differ) / differ.size)


def _attention(numbers: Numbers, T: int) -> Errors:
    H, D, W, k = _S.num_attention_heads, _S.head_dim, _S.sliding_window, _S.index_topk
    S, q = 2048, numbers.normal(T, H, D)
    sinks, at = numbers.normal(H, dtype=mx.float32), numbers.rotation(T, _S.qk_rope_head_dim)
    (window,) = numbers.packed(WINDOW, D, W + T - 1, 1)
    (rows,) = numbers.packed(COMPRESSED, D, S, 1)
    ids = numbers.choices(T, k, S)
    found = attention.sparse_attention(
        q,
        W - 1,
        WindowRows(window, 0),
        SelectedRows(rows, mx.full((T,), S, mx.int32), ids),
        sinks,
        sliding_window=W,
        at=at,
        formats=CacheFormats(),
        turns_q=True,
    )
    own, compressed = wide(WINDOW.unpack(window, D)), wide(COMPRESSED.unpack(rows, D))
    turned, wanted = _turned(wide(q), at), np.empty((T, H, D))
    for t, listed in enumerate(np.array(ids, np.int64)):
        seen = np.concatenate([own[t : t + W], compressed[listed]])
        score = turned[t] @ seen.T * D**-0.5
        both = forward.softmax(np.concatenate([score, wide(sinks)[:, None]], axis=1), axis=1)
        wanted[t] = both[:, :-1] @ seen
    return {"attention": distance(found, _turned(wanted, at, is_inverse=True))}


def _engram(numbers: Numbers, T: int) -> Errors:
    D, columns, width = _S.hidden_size, _S.engram_columns, _S.engram_head_dim
    codes = numbers.words(T, columns, width // 4).view(mx.uint8)
    scales = numbers.scales(T, columns, width // 32, middle=120)
    streams, w = numbers.normal(T, 4, D), numbers.fp8(5 * D, columns * width)
    q_weight, k_weight = numbers.normal(4, D), numbers.normal(4, D)
    found = engram.engram_gate(streams, codes, scales, EngramWeights(w, q_weight, k_weight), 1e-20)
    memory = formats.e4m3(_bytes(codes)) * formats.e8m0(_bytes(scales)).repeat(32, axis=-1)
    kv = memory.reshape(T, -1) @ _fp8(w).T
    wanted = engram_reference.add_gated(wide(streams), kv, wide(q_weight), wide(k_weight))
    return {"engram": distance(found, wanted)}


def _index_choice(numbers: Numbers) -> Errors:
    """The share of the rows that are not among the best ones of float64."""
    S, H, D, k = 20_000, _S.index_n_heads, _S.index_head_dim, _S.index_topk
    keys = IndexKeys(numbers.words(S, D // 8), numbers.scales(S, D // 32, middle=126), INDEX)
    q, weights = mx.round(numbers.normal(1, H, D)), numbers.normal(1, H, dtype=mx.float32)
    queries = IndexQueries(q, weights, mx.full((1,), S, mx.int32))
    found, _ = indexer.choose_rows(queries, keys, k=k, block_size=8)
    values = formats.e2m1(_bytes(keys.codes)) * formats.e8m0(_bytes(keys.scales)).repeat(32, -1)
    score = wide(weights)[0] @ np.maximum(wide(q)[0] @ values.T, 0)
    best = np.argsort(-score, kind="stable")[:k]
    others = np.setdiff1d(best, np.array(found, np.int64)).size
    return {"index rows that differ 1": others / k}


if __name__ == "__main__":
    # A kernel that fails raises, and nothing stands in for it.
    with launch.using(CudaKernels()):
        print(json.dumps(operations(), indent=1))
