"""The products with dense weights: kernels against float64 and against MLX's operations."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine.ops import launch
from mlx_engine.ops.head import head_logits
from mlx_engine.ops.linear import (
    agrees,
    fp8_linear,
    fp8_linear_pair,
    fp8_linear_reference,
    grouped_output,
    grouped_output_reference,
    linear_f32,
    linear_f32_pair,
    linear_f32_reference,
)
from mlx_engine.ops.linear_bytes import fp8_linear_traffic, linear_f32_traffic
from mlx_engine.ops.traffic import added
from mlx_engine.weights import Fp8
from tests.kernels.counted import Launches, check_traffic
from tests.msl.emulator import EmulatedKernel
from tests.msl.memory import as_float64
from tests.unit.arrays import Float

DTYPES = [mx.bfloat16, mx.float32]
# What one rounding to the type costs at most: 8 significant bits, and 24.
ROUNDING = {mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}
NUMBERS = [code for code in range(256) if code & 0x7F != 0x7F]


def e4m3(codes: NDArray[np.uint8]) -> Float:
    """The values of e4m3 codes by their definition."""
    exponent, mantissa = codes.astype(np.int32) >> 3 & 15, (codes & 7) / 8
    leading = (exponent > 0).astype(np.float64)
    size = np.ldexp(leading + mantissa, np.maximum(exponent, 1) - 7)
    return np.copysign(size, 1 - (codes >> 7) * 2.0)


def fp8(seed: int, *shape: int, scales: tuple[int, int] = (110, 125)) -> tuple[Fp8, Float]:
    """A random weight [.., N, K] with scale bytes in a range, and its values."""
    rng = np.random.default_rng(seed)
    *lead, N, K = shape
    codes = rng.choice(NUMBERS, shape).astype(np.uint8)
    scale = rng.integers(*scales, (*lead, -(-N // 32), K // 32), dtype=np.uint8)
    tiles = np.repeat(np.repeat(scale.astype(int), 32, -1), 32, -2)[..., :N, :]
    weight = Fp8(mx.array(codes).view(mx.uint32), mx.array(scale))
    return weight, e4m3(codes) * 2.0 ** (tiles - 127)


def rows(seed: int, *shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def check(found: mx.array, x: mx.array, w: Float, reference: mx.array) -> None:
    """Within f32 sums of K products in any order, and one rounding to the output's type."""
    exact, size = as_float64(x) @ w.T, np.abs(as_float64(x)) @ np.abs(w).T
    bound = w.shape[-1] * 2.0**-24 * size + 1.01 * ROUNDING[found.dtype] * np.abs(exact)
    assert found.shape == exact.shape
    assert (np.abs(as_float64(found) - exact) <= bound).all()
    assert found.dtype == reference.dtype
    assert (np.abs(as_float64(found) - as_float64(reference)) <= 2 * bound).all()


# Rows, outputs, inputs; the last decides how many simdgroups share K: 1, 2, 4 or 8.
FEW = [
    *[(1, 1, 32), (2, 31, 64), (3, 33, 96), (4, 63, 1056), (5, 65, 2080), (6, 127, 160)],
    *[(7, 129, 4128), (8, 36, 2048), (9, 1, 32), (31, 65, 2080)],
]
MANY = [(33, 1, 32), (63, 65, 64), (64, 129, 96), (65, 31, 64), (127, 127, 96), (129, 63, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "N", "K"), [*FEW, *MANY])
def test_fp8_linear(T: int, N: int, K: int, dtype: mx.Dtype, kernels_on: Launches) -> None:
    w, values = fp8(T, N, K)
    x = rows(N, T, K, dtype=dtype)
    check(fp8_linear(x, w), x, values, fp8_linear_reference(x, w))
    check_traffic(kernels_on, fp8_linear_traffic(T, N, K=K, value_bytes=dtype.size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "N", "K"), [FEW[0], FEW[2], FEW[5], FEW[7], FEW[9], MANY[1], MANY[3], MANY[5]]
)
def test_linear_f32(
    T: int, N: int, K: int, dtype: mx.Dtype, weight_dtype: mx.Dtype, kernels_on: Launches
) -> None:
    weight = rows(T, N, K, dtype=weight_dtype)
    x = rows(N, T, K, dtype=dtype)
    found = linear_f32(x, weight)
    check(found, x, as_float64(weight), linear_f32_reference(x, weight))
    sizes = {"value_bytes": dtype.size, "weight_bytes": weight_dtype.size}
    check_traffic(kernels_on, linear_f32_traffic(T, N, K=K, **sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "heads"), [(1, 4), (5, 6), (65, 2)])
def test_grouped_output(T: int, heads: int, dtype: mx.Dtype, kernels_on: Launches) -> None:
    G, head_dim, rank, D = 2, 32, 48, 65
    wo_a, values_a = fp8(T, G, rank, heads // G * head_dim)
    wo_b, values_b = fp8(heads, D, G * rank)
    o = rows(T, T, heads, head_dim, dtype=dtype)
    found, reference = (f(o, wo_a, wo_b) for f in (grouped_output, grouped_output_reference))
    per_group = as_float64(o).reshape(T, G, -1)
    exact_y = np.einsum("tgk,gnk->tgn", per_group, values_a).reshape(T, -1)
    exact, size = exact_y @ values_b.T, np.abs(exact_y) @ np.abs(values_b).T
    # The rounded y between the products errs by a rounding of each value, and sums as above.
    size_y = np.einsum("tgk,gnk->tgn", np.abs(per_group), np.abs(values_a)).reshape(T, -1)
    bound_y = per_group.shape[-1] * 2.0**-24 * size_y + ROUNDING[dtype] * np.abs(exact_y)
    bound = bound_y @ np.abs(values_b).T + G * rank * 2.0**-24 * size
    bound = 1.01 * (bound + ROUNDING[dtype] * np.abs(exact))
    assert found.dtype == dtype
    assert (np.abs(as_float64(found) - exact) <= bound).all()
    assert (np.abs(as_float64(found) - as_float64(reference)) <= 2 * bound).all()
    K = heads // G * head_dim
    check_traffic(
        kernels_on,
        fp8_linear_traffic(T, rank, K=K, value_bytes=dtype.size, G=G),
        fp8_linear_traffic(T, D, K=G * rank, value_bytes=dtype.size),
    )


@pytest.mark.parametrize(("T", "launches"), [(1, 1), (8, 1), (17, 1), (33, 2)])
def test_pairs(T: int, launches: int, kernels_on: Launches) -> None:
    """Two weights of different N: what each gives alone."""
    K = 1056
    x = rows(T, T, K, dtype=mx.bfloat16)
    pair = [fp8(1, 65, K), fp8(2, 31, K)]
    founds = fp8_linear_pair(x, pair[0][0], pair[1][0])
    if launches == 1:
        check_traffic(kernels_on, fp8_linear_traffic(T, 65, 31, K=K, value_bytes=2))
    else:
        each = [fp8_linear_traffic(T, n, K=K, value_bytes=2) for n in (65, 31)]
        check_traffic(kernels_on, *each)
        assert added(*each) == fp8_linear_traffic(T, 65, 31, K=K, value_bytes=2)
    for (w, values), found in zip(pair, founds, strict=True):
        check(found, x, values, fp8_linear_reference(x, w))
    wide = [rows(3, 33, K, dtype=mx.bfloat16), rows(4, 40, K, dtype=mx.bfloat16)]
    for w, found in zip(wide, linear_f32_pair(x, wide[0], wide[1]), strict=True):
        check(found, x, as_float64(w), linear_f32_reference(x, w))
    assert kernels_on is None or len(kernels_on) == 2 * launches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "N", "K"), [(1, (1, 129), 32), (2, (127, 31), 96), (7, (63, 65), 64)]
)
def test_plain_pairs(
    T: int,
    N: tuple[int, int],
    K: int,
    dtype: mx.Dtype,
    weight_dtype: mx.Dtype,
    kernels_on: Launches,
) -> None:
    x = rows(T, T, K, dtype=dtype)
    first, second = (rows(n, n, K, dtype=weight_dtype) for n in N)
    for w, found in zip((first, second), linear_f32_pair(x, first, second), strict=True):
        check(found, x, as_float64(w), linear_f32_reference(x, w))
    sizes = {"value_bytes": dtype.size, "weight_bytes": weight_dtype.size}
    check_traffic(kernels_on, linear_f32_traffic(T, *N, K=K, **sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 256])
def test_every_code_at_every_scale(T: int, dtype: mx.Dtype, kernels_on: Launches) -> None:
    """Rows of the unit matrix find the weight's values, exactly: every one is a normal number."""
    K, N = 256, 32 * 30
    codes = np.resize(np.array(NUMBERS, np.uint8), (N, K))
    scale = np.resize(np.arange(10, 247, dtype=np.uint8), (N // 32, K // 32))
    assert set(scale.flat) == set(range(10, 247)) and set(codes.flat) == set(NUMBERS)
    w = Fp8(mx.array(codes).view(mx.uint32), mx.array(scale))
    at = [97] if T == 1 else list(range(K))
    x = mx.eye(K)[mx.array(at)].astype(dtype)
    tiles = np.repeat(np.repeat(scale.astype(int), 32, 0), 32, 1)
    expected = (e4m3(codes) * 2.0 ** (tiles - 127)).T[at]
    assert (as_float64(fp8_linear(x, w)) == expected).all()


def test_rows_that_do_not_lie_together(kernels_on: Launches) -> None:
    w, values = fp8(1, 40, 64)
    wide = rows(2, 6, 128, dtype=mx.float32)
    for x in (wide[1:5, 64:], wide[:3, ::2], wide[::5, :64]):
        check(fp8_linear(x, w), x, values, fp8_linear_reference(x, w))


def test_the_head(kernels_on: Launches) -> None:
    head, x = rows(1, 129, 64, dtype=mx.bfloat16), rows(2, 3, 64, dtype=mx.bfloat16)
    check(head_logits(x, head), x, as_float64(head), linear_f32_reference(x, head))
    assert kernels_on is None or len(kernels_on) == 1


# A layer's products at the released widths: wkv, and rows of wq_a, wo_b and wq_b.
@pytest.mark.parametrize(
    ("T", "N", "K"), [(1, 512, 5120), (4, 128, 5120), (8, 32, 8192), (2, 256, 1280), (64, 64, 1280)]
)
def test_released_widths(T: int, N: int, K: int, kernels_on: Launches) -> None:
    w, values = fp8(T, N, K)
    x = rows(N, T, K, dtype=mx.bfloat16)
    check(fp8_linear(x, w), x, values, fp8_linear_reference(x, w))


# The index keys' product, some rows of the head, and some of a compressor's two.
@pytest.mark.parametrize(("T", "N", "K"), [(1, 128, 512), (8, 33, 5120)])
def test_plain_products_at_released_widths(T: int, N: int, K: int, kernels_on: Launches) -> None:
    w, x = rows(T, N, K, dtype=mx.bfloat16), rows(N, T, K, dtype=mx.bfloat16)
    right = linear_f32_reference(x, w)
    for found in (linear_f32(x, w), *linear_f32_pair(x, w, w)):
        check(found, x, as_float64(w), right)


def test_few_rows_read_the_weight_once(kernels_on: Launches) -> None:
    """Each of its bytes is loaded by one lane, for all rows."""
    T, N, K = FEW[7]
    fp8_linear(rows(1, T, K, dtype=mx.bfloat16), fp8(2, N, K)[0])
    if kernels_on is None:
        pytest.skip("a GPU does not count bytes")
    assert kernels_on[-1].traffic["weight"].loaded == N * K


def test_the_self_test_sees_a_wrong_kernel(kernels_on: Launches) -> None:
    assert agrees()
    if kernels_on is None:
        pytest.skip("a GPU's kernels are not wrong on purpose")

    def wrong(**arguments: Any) -> Callable[..., list[mx.array]]:
        kernel = EmulatedKernel(**arguments)

        def run(**call: Any) -> list[mx.array]:
            return [1.1 * out for out in kernel(**call)]

        return run

    with launch.using(wrong):
        assert not agrees()


def test_a_gpu_that_multiplies_no_stacks_gets_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's product of packed weights refuses them in CUDA."""
    wo_a, _ = fp8(1, 2, 64, 96)
    wo_b, _ = fp8(2, 32, 128)
    o = rows(3, 1, 2, 96, dtype=mx.float32)
    wanted = grouped_output_reference(o, wo_a, wo_b)
    multiply: Callable[..., mx.array] = mx.quantized_matmul

    def of_cuda(x: mx.array, w: mx.array, *rest: Any, **options: Any) -> mx.array:
        if w.ndim > 2:
            raise RuntimeError("QuantizedMatmul::eval_gpu has no stacks")
        return multiply(x, w, *rest, **options)

    monkeypatch.setattr(mx, "quantized_matmul", of_cuda)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    found = grouped_output_reference(o, wo_a, wo_b)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2**-16 * float(mx.abs(wanted).max()))
