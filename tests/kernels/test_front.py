"""Norms, RoPE and packing in one launch: every rounding exact, and whole rows on random values."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine.formats import COMPRESSED, INDEX, WINDOW, PackedFormat
from mlx_engine.ops.front import (
    Ring,
    attention_front,
    attention_front_reference,
    encoded_keys,
    encoded_keys_reference,
    index_queries,
    index_queries_reference,
    pooled_rows,
    pooled_rows_reference,
)
from mlx_engine.ops.front_bytes import (
    attention_front_traffic,
    encoded_keys_traffic,
    in_ring_traffic,
    index_queries_traffic,
    pooled_rows_traffic,
)
from mlx_engine.ops.pooling import pool_groups
from mlx_engine.ops.rope import Rotation, rotate
from tests.kernels.counted import Launches, check_traffic
from tests.unit.arrays import Float, f32, host, normal
from tests.unrounded import UNROUNDED

EPS = 1e-20


def bf16(x: Any) -> mx.array:
    return f32(x).astype(mx.bfloat16)


def rotation(G: int, R: int) -> Rotation:
    angle = normal(7, G, R // 2)
    cos, sin = np.cos(angle), np.sin(angle)
    return Rotation(f32(np.stack([cos, cos], -1)), f32(np.stack([-sin, sin], -1)))


def hard_values(D: int) -> Float:
    """bf16 values [n, D]: ties of both codes, both zeros, groups of any size, scales that change.

    A group of 32 starts with its largest value; that is a scale's limit, just above it, or random.
    """
    rng = np.random.default_rng(1)
    rows: list[NDArray[np.floating[Any]]] = []
    for most in (6.0, 448.0):
        ties = np.concatenate([np.arange(0, 13) * 0.25, np.arange(13, 25) * 0.5])
        wide = most / 448 * np.arange(16, 33) * 2.0 ** rng.integers(-12, 4, (9, 17))
        pool = np.concatenate([ties * most / 6, wide.ravel(), [0.0, -0.0]])
        for limit in (1.0, 1 + 2.0**-7, 0.75, 2.0**-8):
            row = rng.choice(pool, D) * rng.choice([-1.0, 1.0], D)
            row[::32] = row[16::32] = most * limit
            rows.append(row * np.repeat(2.0 ** rng.integers(-30, 30, D // 32), 32))
    rows += [np.zeros(D), -np.zeros(D), 1e-6 * normal(2, D), 2.0**-100 * normal(3, D)]
    rows += [2.0**-60 * normal(4, D) * np.exp2(rng.integers(0, 120, D)), 3e4 * normal(5, D)]
    return host(bf16(np.stack(rows))).astype(np.float64)


def same(found: mx.array, right: mx.array) -> None:
    assert mx.array_equal(found, right)


def test_every_rounding(kernels_on: Launches) -> None:
    """Rows of ones of either sign, which have a mean square of 1, times any weight."""
    D = 512
    values = hard_values(D)
    signs = np.where(normal(8, *values.shape) < 0, -1.0, 1.0)
    turn = Rotation(mx.ones((1, 8, 2)), mx.zeros((1, 8, 2)))
    for value, sign in zip(values, signs, strict=True):
        norm, one = bf16(value), bf16(sign[None])
        right = rotate(bf16((value * sign)[None]), turn)
        _, rows = attention_front(one, one, norm, norm, turn, eps=EPS, fmt=WINDOW)
        same(rows, WINDOW.pack(right))
        one = one.astype(mx.float32)
        _, rows = pooled_rows(
            one, None, norm, turn, ratio=1, dtype=mx.bfloat16, eps=EPS, fmt=COMPRESSED
        )
        same(rows, COMPRESSED.pack(right))
        keys = encoded_keys(one, norm, turn, dtype=mx.bfloat16, eps=EPS, fmt=INDEX)
        for found, expected in zip(keys, INDEX.encode(right), strict=True):
            same(found, expected)
    assert kernels_on is None or len(kernels_on) == 3 * len(values)


def normed(rows: mx.array, norm: mx.array) -> Float:
    x, weight = host(rows).astype(np.float64), host(norm).astype(np.float64)
    return weight * x / np.sqrt((x**2).mean(axis=-1, keepdims=True))


def close_norm(found: mx.array, right: Float) -> None:
    """Within the roundings of a sum of squares, and bf16's."""
    rounding = 2.0**-8 if found.dtype == mx.bfloat16 else 0.0
    bound = 1e-6 * np.abs(right).max() + rounding * np.abs(right)
    np.testing.assert_array_less(np.abs(host(found) - right), bound)


def close_rows(found: mx.array, right: mx.array, fmt: PackedFormat, D: int) -> None:
    """Few bytes differ, where a sum in another order has moved a value over a tie."""
    differing = mx.sum(found.view(mx.uint8) != right.view(mx.uint8))
    assert (differing <= 0.01 * right.nbytes).item()
    a, b = (host(fmt.unpack(rows, D)).reshape(-1, fmt.group) for rows in (found, right))
    # No two codes are further apart than a third of the largest value; its scale may have doubled.
    assert (np.abs(a - b) <= np.abs(b).max(axis=-1, keepdims=True) * 2 / 3).all()


SIZES = [(1, 1, 64, 16), (3, 2, 128, 64), (33, 31, 192, 2), (5, 5, 512, 64)]
MORE_ROWS = [(65, 63, 64, 16), (129, 127, 64, 2)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("T", "Q", "D", "R"), [*SIZES, *MORE_ROWS])
def test_attention_front(
    T: int, Q: int, D: int, R: int, dtype: mx.Dtype, kernels_on: Launches
) -> None:
    L = {64: 2, 128: 130, 192: 66, 512: 1280}[D]
    latent, kv = f32(3 * normal(0, Q, L)).astype(dtype), f32(normal(1, T, D)).astype(dtype)
    norms, at = (bf16(normal(2, L)), bf16(1 + normal(3, D))), rotation(T, R)
    found, rows = attention_front(latent, kv, *norms, at, eps=EPS, fmt=WINDOW)
    assert found.dtype == dtype
    close_norm(found, normed(latent, norms[0]))
    _, right = attention_front_reference(latent, kv, *norms, at, eps=EPS, fmt=WINDOW)
    close_rows(rows, right, WINDOW, D)
    check_traffic(kernels_on, attention_front_traffic(T, Q, L, D, R, latent.itemsize))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("N", "slot", "D"), [(1, 0, 64), (5, 4, 128), (128, 77, 512)])
def test_a_row_in_its_ring(
    N: int, slot: int, D: int, dtype: mx.Dtype, kernels_on: Launches
) -> None:
    """The ring with one row changed, to what it would be alone."""
    L, R = 66, 16
    latent, kv = f32(3 * normal(0, 1, L)).astype(dtype), f32(normal(1, 1, D)).astype(dtype)
    norms, at = (bf16(normal(2, L)), bf16(1 + normal(3, D))), rotation(1, R)
    rows = mx.random.randint(0, 1 << 32, (N, WINDOW.words(D)), mx.uint32, key=mx.random.key(0))
    found, ring = attention_front(
        latent, kv, *norms, at, eps=EPS, fmt=WINDOW, ring=Ring(rows, slot)
    )
    check_traffic(kernels_on, in_ring_traffic(N, L, D, R, dtype.size))
    alone, row = attention_front(latent, kv, *norms, at, eps=EPS, fmt=WINDOW)
    same(found, alone)
    same(ring, mx.where(mx.arange(N)[:, None] == slot, row, rows))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("ratio", "n"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize(("G", "D", "R"), [(G, D, R) for G, _, D, R in [*SIZES, *MORE_ROWS]])
def test_pooled_rows(
    G: int, D: int, R: int, ratio: int, n: int, dtype: mx.Dtype, kernels_on: Launches
) -> None:
    """n rows lie apart, as an earlier step left them."""
    kv, gate = f32(normal(0, G * ratio, D)), f32(20 * normal(1, G * ratio, D))
    norm, at = bf16(1 + normal(2, D)), rotation(G, R)
    gates = None if ratio == 1 else gate
    found, rows = pooled_rows(
        *(kv[n:], gates if gates is None else gates[n:], norm, at),
        pending=(kv[:n], gate[:n]) if n else None,
        ratio=ratio,
        dtype=dtype,
        eps=EPS,
        fmt=COMPRESSED,
    )
    pooled = kv if gates is None else pool_groups(kv, gates, ratio)
    close_norm(found, normed(pooled.astype(dtype), norm))
    _, right = pooled_rows_reference(
        kv, gates, norm, at, ratio=ratio, dtype=dtype, eps=EPS, fmt=COMPRESSED
    )
    close_rows(rows, right, COMPRESSED, D)
    check_traffic(kernels_on, pooled_rows_traffic(G, ratio, D, R, found.itemsize))


def as_rows(codes: mx.array, scales: mx.array, D: int) -> mx.array:
    row = mx.concatenate([codes.view(mx.uint8), scales], axis=1)
    return mx.pad(row, [(0, 0), (0, 4 * INDEX.words(D) - row.shape[1])]).view(mx.uint32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("G", "D", "R"), [(G, D, R) for G, _, D, R in [*SIZES, *MORE_ROWS]])
def test_encoded_keys(G: int, D: int, R: int, dtype: mx.Dtype, kernels_on: Launches) -> None:
    key, norm, at = f32(normal(0, G, D)), bf16(1 + normal(2, D)), rotation(G, R)
    found = as_rows(*encoded_keys(key, norm, at, dtype=dtype, eps=EPS, fmt=INDEX), D)
    right = encoded_keys_reference(key, norm, at, dtype=dtype, eps=EPS, fmt=INDEX)
    close_rows(found, as_rows(*right, D), INDEX, D)
    check_traffic(kernels_on, encoded_keys_traffic(G, D, R))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("Q", "H", "D", "K", "R"),
    [
        *[(1, 3, 64, 60, 16), (3, 32, 128, 5120, 64)],
        *[(Q, 3, D, 60, R) for _, Q, D, R in [*SIZES, *MORE_ROWS]],
        *[(Q, 3, D, 60, R) for Q, _, D, R in MORE_ROWS],
    ],
)
def test_index_queries(
    Q: int, H: int, D: int, K: int, R: int, dtype: mx.Dtype, kernels_on: Launches
) -> None:
    """Rounded values as their codes, and head weights within f32's rounding of K products."""
    q, x = f32(normal(0, Q, H, D)).astype(dtype), f32(normal(1, Q, K)).astype(dtype)
    weights, at = bf16(normal(2, H, K)), rotation(Q, R)
    found, head_weights = index_queries(q, x, weights, at, fmt=INDEX)
    right, _ = index_queries_reference(q, x, weights, at, fmt=INDEX)
    assert found.dtype == dtype and head_weights.dtype == mx.float32
    for one in (found, right):
        # Rounding what is rounded changes nothing.
        same(INDEX.decode(*INDEX.encode(one)).astype(dtype), one)
    rows, expected = (as_rows(*INDEX.encode(a.reshape(-1, D)), D) for a in (found, right))
    close_rows(rows, expected, INDEX, D)
    a, b = host(x).astype(np.float64), host(weights).astype(np.float64)
    error = np.abs(host(head_weights) - a @ b.T / np.sqrt(D * H))
    assert (error <= K * 2.0**-24 * (np.abs(a) @ np.abs(b).T) / np.sqrt(D * H)).all()
    check_traffic(kernels_on, index_queries_traffic(Q, H, D, K, R, dtype.size))


def test_rows_that_do_not_lie_together(kernels_on: Launches) -> None:
    """A slice of a wider product, as of both halves of a pair."""
    D, norm, at = 64, bf16(1 + normal(2, 64)), rotation(3, 16)
    wide = f32(normal(0, 3, 2 * D))
    for x in (wide[:, D:], wide[:, ::2]):
        _, rows = attention_front(x, x, norm, norm, at, eps=EPS, fmt=WINDOW)
        _, right = attention_front_reference(x, x, norm, norm, at, eps=EPS, fmt=WINDOW)
        close_rows(rows, right, WINDOW, D)
        keys = as_rows(*encoded_keys(x, norm, at, dtype=x.dtype, eps=EPS, fmt=INDEX), D)
        expected = encoded_keys_reference(x, norm, at, dtype=x.dtype, eps=EPS, fmt=INDEX)
        close_rows(keys, as_rows(*expected, D), INDEX, D)


def test_other_formats_are_the_references(kernels_on: Launches) -> None:
    x, norm, at = f32(normal(0, 2, 64)), f32(normal(1, 64)), rotation(2, 16)
    fmt = UNROUNDED.window
    for found, right in (
        (
            attention_front(x, x, norm, norm, at, eps=EPS, fmt=fmt),
            attention_front_reference(x, x, norm, norm, at, eps=EPS, fmt=fmt),
        ),
        (
            pooled_rows(x, None, norm, at, ratio=1, dtype=x.dtype, eps=EPS, fmt=fmt),
            pooled_rows_reference(x, None, norm, at, ratio=1, dtype=x.dtype, eps=EPS, fmt=fmt),
        ),
        (
            encoded_keys(x, norm, at, dtype=x.dtype, eps=EPS, fmt=fmt),
            encoded_keys_reference(x, norm, at, dtype=x.dtype, eps=EPS, fmt=fmt),
        ),
    ):
        for a, b in zip(found, right, strict=True):
            same(a, b)
    assert not kernels_on
