"""The operations one by one against plain float64 arithmetic: odd sizes, bounds, few and many rows.

Choosing rows and attending to them is test_attention's part.
"""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.config_file import parse_config
from mlx_engine.formats import INDEX
from mlx_engine.ops.engram import engram_gate
from mlx_engine.ops.experts import clamped_swiglu, moe
from mlx_engine.ops.front import encoded_keys
from mlx_engine.ops.linear import fp8_linear, grouped_output
from mlx_engine.ops.mhc import mhc_coefficients_reference, mhc_collapse_norm, mhc_expand
from mlx_engine.ops.norm import rms_norm
from mlx_engine.ops.pooling import pool_groups
from mlx_engine.ops.rope import rotate, rotation, yarn_bounds
from mlx_engine.ops.router import Router, route
from mlx_engine.weights import EngramWeights, FfnWeights, Fp4, Fp8, MhcWeights
from tests.reference import formats as reference
from tests.reference.engram import add_gated
from tests.reference.forward import sigmoid, sinkhorn, softmax
from tests.reference.random_tensors import DATA, TINY_CONFIG
from tests.reference.rope import rope, rope_frequencies
from tests.unit.arrays import Float, close, f32, host, normal, routing

TINY = parse_config(TINY_CONFIG)


# Positions


@pytest.mark.parametrize("is_compressed", [False, True])
def test_rope_far_out_agrees_with_float64(is_compressed: bool) -> None:
    c = TINY_CONFIG["text_config"]
    theta = c["compress_rope_theta"] if is_compressed else c["rope_theta"]
    scaling = c["rope_scaling"] if is_compressed else None
    frequencies = rope_frequencies(c["qk_rope_head_dim"], theta, scaling)
    positions = np.array([0, 1, 65_535, 65_536, 1_000_000, 1_048_575])
    at = rotation(TINY, positions, is_compressed=is_compressed)
    x = normal(0, 6, 3, 24)
    expected = rope(x, positions, frequencies)
    turned = rotate(f32(x), at)
    close(turned, expected, 3e-7)
    assert np.abs(expected[4] - x[4])[:, 8:].max() > 0.1
    close(rotate(turned, at, is_inverse=True), x, 5e-7)
    # Channels before the rotated ones stay bit for bit, in any dtype.
    low = f32(x).astype(mx.bfloat16)
    kept = rotate(low, at)
    assert kept.dtype == mx.bfloat16
    assert mx.array_equal(kept[..., :8], low[..., :8])


def test_the_released_yarn_bounds() -> None:
    c = parse_config(json.loads((DATA / "released_config.json").read_text()))
    assert yarn_bounds(c.qk_rope_head_dim, c.compress_rope_theta, c.yarn) == (15, 25)


def test_rotation_of_the_last_positions() -> None:
    at = rotation(TINY, np.arange(9), is_compressed=True)
    assert mx.array_equal(at.last(2).cos, at.cos[7:])
    assert mx.array_equal(at.last(2).sin, at.sin[7:])
    assert at.last(9) is at


# Norm and hyper-connections


def test_rms_norm_of_zeros_and_of_small_rows() -> None:
    x = np.stack([np.zeros(32), normal(0, 32) * 1e-9, normal(1, 32)])
    weight = normal(2, 32)
    scale = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-20)
    close(rms_norm(f32(x), f32(weight), 1e-20), x * scale * weight)
    rounded = rms_norm(f32(x).astype(mx.bfloat16), f32(weight).astype(mx.bfloat16), 1e-20)
    assert rounded.dtype == mx.bfloat16
    close(rounded, x * scale * weight, 0.02)


def mhc(hc: int, D: int) -> tuple[MhcWeights, Float, Float, Float]:
    fn = np.float32((hc * D) ** -0.5) * normal(0, (2 + hc) * hc, hc * D)
    base, scale = normal(1, (2 + hc) * hc), normal(2, 3)
    return MhcWeights(f32(fn), f32(base), f32(scale)), fn, base, scale


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_mhc_coefficients(iters: int) -> None:
    hc, D, T, eps = 3, 32, 5, 0.01
    w, fn, base, scale = mhc(hc, D)
    streams = normal(3, T, hc, D)
    pre, post, comb = mhc_coefficients_reference(
        f32(streams), w, iters=iters, hc_eps=eps, norm_eps=1e-20
    )
    flat = streams.reshape(T, -1)
    mix = flat @ fn.T / np.sqrt((flat**2).mean(-1, keepdims=True))
    close(pre, sigmoid(mix[:, :hc] * scale[0] + base[:hc]) + eps)
    close(post, 2 * sigmoid(mix[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc]))
    raw = (mix[:, 2 * hc :] * scale[2] + base[2 * hc :]).reshape(T, hc, hc)
    close(comb, sinkhorn(raw, iters, eps))


def test_sinkhorn_makes_comb_doubly_stochastic_columns_last() -> None:
    w, *_ = mhc(4, 32)
    streams = f32(normal(3, 50, 4, 32))
    _, _, comb = mhc_coefficients_reference(streams, w, iters=20, hc_eps=1e-6, norm_eps=1e-20)
    close(mx.sum(comb, axis=-1), np.ones((50, 4)), 1e-4)
    close(mx.sum(comb, axis=-2), np.ones((50, 4)), 3e-6)
    assert host(comb).min() > 0


def test_collapse_and_expand() -> None:
    streams, pre, post = normal(0, 3, 2, 32), normal(1, 3, 2), normal(2, 3, 2)
    comb, h, weight = normal(3, 3, 2, 2), normal(4, 3, 32), normal(5, 32)
    x = pre[:, 0, None] * streams[:, 0] + pre[:, 1, None] * streams[:, 1]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True)) * weight
    close(mhc_collapse_norm(f32(streams), f32(pre), f32(weight), 1e-20), x)
    out = mhc_expand(f32(h), f32(streams), f32(post), f32(comb))
    for k in range(2):
        mixed = comb[:, 0, k, None] * streams[:, 0] + comb[:, 1, k, None] * streams[:, 1]
        close(out[:, k], post[:, k, None] * h + mixed)


# Products


def fp8(seed: int, *shape: int) -> tuple[Fp8, Float]:
    """A weight [.., N, K] packed, and its values."""
    *lead, N, K = shape
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x60, shape, np.uint8)
    codes |= rng.integers(0, 2, shape, np.uint8) << 7
    scale = rng.integers(115, 125, (*lead, -(-N // 32), K // 32), np.uint8)
    tiles = reference.e8m0(scale).repeat(32, axis=-2)[..., :N, :].repeat(32, axis=-1)
    return Fp8(mx.array(codes.view(np.uint32)), mx.array(scale)), reference.e4m3(codes) * tiles


@pytest.mark.parametrize("N", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("T", [1, 3, 4, 5, 65])
def test_fp8_linear(N: int, T: int) -> None:
    w, values = fp8(N, N, 96)
    x = normal(T, T, 96)
    close(fp8_linear(f32(x), w), x @ values.T)
    low = f32(x).astype(mx.bfloat16)
    y = fp8_linear(low, w)
    assert y.dtype == mx.bfloat16
    # One rounding of the f32 sum, no more.
    expected = host(low) @ values.T
    found = host(y)
    slack = 1e-5 * np.abs(expected).max()
    assert np.all(np.abs(found - expected) <= np.abs(expected) * 2.0**-8 + slack)


@pytest.mark.parametrize("T", [1, 3, 5])
def test_grouped_output(T: int) -> None:
    G, rank, D = 3, 32, 40
    wo_a, a = fp8(0, G, rank, 64)
    wo_b, b = fp8(1, D, G * rank)
    o = normal(2, T, 6, 32)
    y = [o[:, 2 * g : 2 * g + 2].reshape(T, 64) @ a[g].T for g in range(G)]
    close(grouped_output(f32(o), wo_a, wo_b), np.concatenate(y, axis=1) @ b.T)


# Experts


def test_clamped_swiglu_bounds() -> None:
    gate = np.array([-50, -3, -2, 0, 1.9, 2, 2.1, 50, 1, 1, 1, 1])
    up = np.array([1, 1, 1, 1, 1, 1, 1, 1, -50, -2.1, 2.1, 50])
    bounded = np.minimum(gate, 2)
    expected = bounded * sigmoid(bounded) * np.clip(up, -2, 2)
    close(clamped_swiglu(f32(gate), f32(up), 2.0), expected)
    # Only the upper side of the gate is clamped.
    assert expected[1] != expected[2] and expected[6] == expected[7] == expected[5]


def fp4(seed: int, E: int, N: int, K: int) -> tuple[Fp4, Float]:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (E, N, K // 2), np.uint8)
    scale = rng.integers(122, 126, (E, N, K // 32), np.uint8)
    values = reference.e2m1(packed) * reference.e8m0(scale).repeat(32, axis=-1)
    return Fp4(mx.array(packed.view(np.uint32)), mx.array(scale)), values


@pytest.mark.parametrize("T", [1, 2, 31, 33, 65])
def test_moe_for_few_and_many_rows(T: int) -> None:
    E, D, inter, k, limit = 5, 64, 32, 2, 1.5
    (w1, v1), (w3, v3), (w2, v2) = fp4(0, E, inter, D), fp4(1, E, inter, D), fp4(2, E, D, inter)
    (s1, u1), (s3, u3), (s2, u2) = fp8(3, inter, D), fp8(4, inter, D), fp8(5, D, inter)
    ffn = FfnWeights(mx.zeros((1,)), mx.zeros((1,)), w1, w2, w3, s1, s2, s3)
    x, weights = normal(6, T, D) / 4, normal(7, T, k)
    ids = np.argsort(normal(8, T, E), axis=1)[:, :k]

    def expert(x: Float, w1: Float, w3: Float, w2: Float) -> Float:
        gate, up = np.minimum(x @ w1.T, limit), np.clip(x @ w3.T, -limit, limit)
        return gate * sigmoid(gate) * up @ w2.T

    expected = expert(x, u1, u3, u2)
    for t in range(T):
        for e, weight in zip(ids[t], weights[t], strict=True):
            expected[t] += weight * expert(x[t], v1[e], v3[e], v2[e])
    found = moe(f32(x), routing(ids, weights, E), ffn, limit=limit)
    close(found, expected, 1e-5)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_route(norm_topk_prob: bool) -> None:
    x, gate, bias = normal(0, 9, 32), normal(1, 7, 32), normal(2, 7)
    x[0] *= 100  # softplus far out on both sides
    logits = x @ gate.T / 0.7
    scores = np.sqrt(np.maximum(logits, 0) + np.log1p(np.exp(-np.abs(logits))))
    ids = np.sort(np.argsort(-(scores + bias), axis=1, kind="stable")[:, :3], axis=1)
    weights = np.take_along_axis(scores, ids, axis=1)
    if norm_topk_prob:
        weights = weights / weights.sum(axis=1, keepdims=True)
    router = Router(f32(gate), f32(bias), 3, 0.7, norm_topk_prob, 2.5)
    found_ids, found = route(f32(x), router).chosen()
    assert np.array(found_ids).tolist() == ids.tolist()
    np.testing.assert_allclose(host(found), 2.5 * weights, rtol=2e-5)


# Compressor and Engram


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_pool_groups(ratio: int) -> None:
    kv, gate = normal(0, 5 * ratio, 32), normal(1, 5 * ratio, 32) * 3
    share = softmax(gate.reshape(5, ratio, 32), axis=1)
    expected = (kv.reshape(5, ratio, 32) * share).sum(axis=1)
    close(pool_groups(f32(kv), f32(gate), ratio), expected)


def test_index_keys_are_normed_then_rotated_then_rounded() -> None:
    c, positions = TINY, np.array([0, 2, 4, 400])
    key, k_norm = normal(0, 4, 32), normal(2, 32)
    at = rotation(c, positions, is_compressed=True)
    keys = encoded_keys(f32(key), f32(k_norm), at, dtype=mx.float32, eps=1e-20, fmt=INDEX)
    key = key / np.sqrt((key**2).mean(-1, keepdims=True)) * k_norm
    frequencies = rope_frequencies(
        c.qk_rope_head_dim,
        c.compress_rope_theta,
        TINY_CONFIG["text_config"]["rope_scaling"],
    )
    rounded = reference.round_index(rope(key, positions, frequencies))
    assert rounded.margin > 1e-5
    assert np.array_equal(host(INDEX.decode(*keys)), rounded.values)


def test_engram_gate() -> None:
    T, hc, D, columns, head_dim = 5, 3, 32, 2, 32
    wkv, values = fp8(0, (hc + 1) * D, columns * head_dim)
    q_weight, k_weight = normal(1, hc, D), normal(2, hc, D)
    streams = normal(3, T, hc, D)
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 0x60, (T, columns, head_dim), np.uint8)
    codes |= rng.integers(0, 2, codes.shape, np.uint8) << 7
    scales = rng.integers(120, 126, (T, columns, 1), np.uint8)
    streams[0], codes[1] = 0, 0  # no agreement to measure: the gate is just above a half
    w = EngramWeights(wkv, f32(q_weight), f32(k_weight))
    found = engram_gate(f32(streams), mx.array(codes), mx.array(scales), w, 1e-20)
    rows = reference.e4m3(codes) * reference.e8m0(scales)
    expected = add_gated(streams, rows.reshape(T, -1) @ values.T, q_weight, k_weight)
    close(found, expected, 1e-5)
    assert np.abs(expected - streams)[1].max() == 0 < np.abs(expected - streams)[0].min()
