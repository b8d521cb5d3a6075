"""The Engram kernels against float64 and against MLX's operations."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.ops import launch
from mlx_engine.ops.engram import (
    agrees,
    engram_gate,
    engram_gate_reference,
    gate_value,
    memory_rows,
)
from mlx_engine.ops.engram_bytes import engram_gate_traffic, engram_rows_traffic
from mlx_engine.weights import EngramWeights, Fp8
from tests.kernels.counted import Launches, check_traffic
from tests.kernels.test_linear import DTYPES, NUMBERS, ROUNDING, e4m3
from tests.msl.emulator import EmulatedKernel
from tests.msl.memory import as_float64
from tests.unit.arrays import Float

F32 = ROUNDING[mx.float32]
NORM_EPS = 1e-20


def values(seed: int, *shape: int, scale: float = 1.0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (scale * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


def weights(hc: int, D: int, E: int, dtype: mx.Dtype) -> EngramWeights:
    """Random weights; wkv is of -1, 0 and 1, whose products with whole numbers are exact."""
    codes = np.random.default_rng(0).choice(np.array([0xB8, 0, 0x38], np.uint8), ((hc + 1) * D, E))
    scale = mx.full((-(-(hc + 1) * D // 32), E // 32), 127, dtype=mx.uint8)
    q, k = (values(seed, hc, D, dtype=dtype) for seed in (1, 2))
    return EngramWeights(Fp8(mx.array(codes).view(mx.uint32), scale), q, k)


def table_rows(T: int, columns: int, head_dim: int) -> tuple[mx.array, mx.array, Float]:
    """Codes and scales of whole numbers up to 64, and their values [T, columns * head_dim]."""
    rng = np.random.default_rng(T)
    codes = rng.choice(
        np.array([0xC0, 0xB8, 0, 0x38, 0x40, 0x44, 0x48], np.uint8), (T, columns, head_dim)
    )
    scales = rng.integers(127, 131, (T, columns, head_dim // 32), np.uint8)
    expected = e4m3(codes) * np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=2)
    return mx.array(codes), mx.array(scales), expected.reshape(T, -1)


def gates(s: Float) -> Float:
    return 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(np.abs(s), 1e-6)), s)))


def check_gate(found: mx.array, streams: mx.array, kv: Float, w: EngramWeights) -> None:
    """Within what f32 sums of D products do to the agreement, and one rounding of the output."""
    T, hc, D = streams.shape
    h, key, value = as_float64(streams), kv[:, : hc * D].reshape(T, hc, D), kv[:, None, hc * D :]
    terms = h * as_float64(w.q_weight) * as_float64(w.k_weight) * key
    r = D**-0.5 / np.sqrt(((h**2).mean(-1) + NORM_EPS) * ((key**2).mean(-1) + NORM_EPS))
    # Three sums of D terms, and a few operations; an eighth of a rounding each, on average.
    error = (D + 32) * F32 * np.abs(terms).sum(-1) * r
    low, high = (gates(terms.sum(-1) * r + sign * error) for sign in (-1, 1))
    exact = h + ((low + high) / 2)[..., None] * value
    bound = ((high - low) / 2 + 8 * F32)[..., None] * np.abs(value)
    bound += (1.01 * ROUNDING[found.dtype] + 2 * F32) * (np.abs(exact) + bound)
    assert (found.shape, found.dtype) == (streams.shape, streams.dtype)
    assert (np.abs(as_float64(found) - exact) <= bound).all()


# Tokens, streams, channels, columns of 32 or 64 channels: threads beyond the channels, one and two
# turns of the most threads, and more streams or fewer than the released four.
SIZES = [
    *[(1, 4, 32, 1), (2, 1, 96, 3), (3, 3, 160, 2), (4, 4, 128, 1), (5, 2, 2592, 1), (6, 5, 64, 5)],
    *[
        (7, 4, 32, 7),
        (8, 4, 2560, 2),
        (9, 4, 96, 3),
        (31, 1, 32, 1),
        (33, 4, 64, 3),
        (63, 1, 32, 1),
        (65, 2, 32, 2),
        (127, 1, 32, 1),
        (129, 1, 32, 2),
    ],
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "hc", "D", "columns"), SIZES)
def test_engram_gate(
    T: int, hc: int, D: int, columns: int, dtype: mx.Dtype, kernels_on: Launches
) -> None:
    head_dim = 32 if T % 2 else 64
    E = columns * head_dim
    weight_dtype = mx.float32 if T == 2 else mx.bfloat16
    w = weights(hc, D, E, weight_dtype)
    codes, scales, rows = table_rows(T, columns, head_dim)
    streams = values(3, T, hc, D, dtype=dtype)
    found = engram_gate(streams, codes, scales, w, NORM_EPS)
    kv = rows @ e4m3(np.array(w.wkv.weight.view(mx.uint8), np.uint8)).T
    check_gate(found, streams, as_float64(mx.array(kv.astype(np.float32)).astype(dtype)), w)
    reference = as_float64(engram_gate_reference(streams, codes, scales, w, NORM_EPS))
    # The gate may be on the floor's other side where the agreement is no more than an error.
    limit = 2 * ROUNDING[dtype] * np.abs(reference).max() + 2e-3 * np.abs(kv[:, hc * D :]).max()
    assert (np.abs(as_float64(found) - reference) <= limit).all()
    sizes = {"value_bytes": dtype.size, "weight_bytes": weight_dtype.size}
    check_traffic(kernels_on, *engram_gate_traffic(T, hc, D, E, **sizes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_at_the_released_width(dtype: mx.Dtype, kernels_on: Launches) -> None:
    T, hc, D = 2, 4, 5120
    w = weights(hc, D, 32, mx.bfloat16)
    streams, kv = values(1, T, hc, D, dtype=dtype), values(2, T, (hc + 1) * D, dtype=dtype)
    check_gate(gate_value(streams, kv, w, NORM_EPS), streams, as_float64(kv), w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("h_scale", "key_scale"), [(1e-16, 1e16), (1e16, 1e-16), (1e-6, 1e-6)])
def test_the_gate_of_extreme_values(
    h_scale: float, key_scale: float, dtype: mx.Dtype, kernels_on: Launches
) -> None:
    """Also of streams and keys that are nothing: they agree in nothing, the gate is near a half."""
    T, hc, D = 2, 4, 96
    w = weights(hc, D, 32, mx.bfloat16)
    streams = values(1, T, hc, D, scale=h_scale, dtype=dtype)
    kv = values(2, T, (hc + 1) * D, scale=key_scale, dtype=dtype)
    streams[0, 1], kv[1, : 2 * D] = 0, 0
    check_gate(gate_value(streams, kv, w, NORM_EPS), streams, as_float64(kv), w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_and_scale(dtype: mx.Dtype, kernels_on: Launches) -> None:
    """Rows are exact; the two codes that are no numbers give NaN, so that damage shows.

    The scales are all those whose values neither type rounds or flushes.
    """
    scales = np.arange(10, 247, dtype=np.uint8)
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1)).reshape(-1, 8, 32)
    found = memory_rows(mx.array(codes), mx.array(np.repeat(scales, 8).reshape(-1, 8, 1)), dtype)
    assert (found.shape, found.dtype) == ((len(scales), 256), dtype)
    held = as_float64(found)
    expected = e4m3(np.arange(256, dtype=np.uint8)) * 2.0 ** (scales.astype(int) - 127)[:, None]
    assert (held[:, NUMBERS] == expected[:, NUMBERS]).all()
    assert np.isnan(held[:, [0x7F, 0xFF]]).all()
    check_traffic(kernels_on, engram_rows_traffic(len(scales), 256, value_bytes=dtype.size))


def broken(**arguments: Any) -> Callable[..., list[mx.array]]:
    """A kernel that adds a little to what the true one computes."""
    kernel = EmulatedKernel(**arguments)

    def run(**call: Any) -> list[mx.array]:
        return [x + mx.array(0.25, x.dtype) for x in kernel(**call)]

    return run


def test_the_probe(kernels_on: Launches) -> None:
    assert agrees()
    if kernels_on is not None:
        with launch.using(broken):
            assert not agrees()
