"""Whole kernels whose results are known, on whatever runs kernels here."""

import mlx.core as mx
import numpy as np
import pytest

from tests.msl.conftest import KernelFactory
from tests.msl.memory import as_float64, contents
from tests.msl.run_body import INTEGERS, run


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_matrix_products(dtype: mx.Dtype, metal_kernel: KernelFactory) -> None:
    """Two simdgroups, tiles staged in threadgroup memory, one operand read transposed."""
    M, N, K = 16, 8, 24
    a = mx.random.normal((M, K), key=mx.random.key(6)).astype(dtype)
    b = mx.random.normal((N, K), key=mx.random.key(7)).astype(dtype)
    source = f"""
        threadgroup T tile[8 * {K + 4}];
        for (uint j = i; j < 8 * {K}; j += 64) tile[j / {K} * {K + 4} + j % {K}] = b[j];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint row = 8 * simdgroup_index_in_threadgroup;
        simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        for (uint k = 0; k < {K}; k += 8) {{
            simdgroup_matrix<T, 8, 8> left, right;
            simdgroup_load(left, a + row * {K} + k, {K});
            simdgroup_load(right, tile, {K + 4}, ulong2(k, 0), true);
            simdgroup_multiply_accumulate(sum, left, right, sum);
        }}
        simdgroup_store(sum, out + row * {N}, {N});
    """
    out = run(
        metal_kernel,
        source,
        [a, b],
        threads=64,
        shape=(M, N),
        dtype=mx.float32,
        template=[("T", dtype)],
    )
    left, right = as_float64(a), as_float64(b).T
    bound = (K + 1) * 2.0**-24 * (np.abs(left) @ np.abs(right))
    assert (np.abs(as_float64(out) - left @ right) <= bound).all()


def test_atomics(metal_kernel: KernelFactory) -> None:
    out = run(
        metal_kernel,
        "auto order = memory_order_relaxed;"
        "atomic_fetch_add_explicit(&out[0], a[i], order);"
        "atomic_fetch_max_explicit(&out[1], a[i], order);"
        "atomic_fetch_or_explicit(&out[2], a[i], order);"
        "atomic_fetch_xor_explicit(&out[3], a[i], order);",
        [INTEGERS],
        threads=64,
        threadgroup=32,
        shape=(4,),
        dtype=mx.int32,
        init_value=0,
        atomic_outputs=True,
    )
    x = contents(INTEGERS)
    assert out.tolist() == [x.sum(), x.max(), np.bitwise_or.reduce(x), np.bitwise_xor.reduce(x)]


@pytest.mark.parametrize(
    "dtype", [mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64]
)
def test_every_type_goes_in_and_out(dtype: mx.Dtype, metal_kernel: KernelFactory) -> None:
    x = (INTEGERS % 2 == 0) if dtype == mx.bool_ else INTEGERS.astype(dtype)
    out = run(metal_kernel, "out[i] = a[63 - i];", [x], threads=64, shape=(64,), dtype=dtype)
    assert out.tolist() == x[::-1].tolist()


def test_parameters_of_every_kind(metal_kernel: KernelFactory) -> None:
    """Scalars, a small array, template values, two outputs, a grid that ends within a simdgroup."""
    kernel = metal_kernel(
        name="parameters",
        input_names=["x", "small", "scale"],
        output_names=["out", "count"],
        source="uint i = thread_position_in_grid.x;\n"
        "out[i] = x[i] * scale + small[i % 3] + N + (F ? small_shape[0] : x_ndim);\n"
        "if (i == 0) count[0] = x_shape[0] * x_strides[0];",
    )
    out, count = kernel(
        inputs=[mx.arange(50, dtype=mx.float32), mx.array([1.0, 2.0, 3.0]), 0.5],
        template=[("N", -7), ("F", True)],
        grid=(50, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(5, 10), ()],
        output_dtypes=[mx.float32, mx.int32],
    )
    expected = np.arange(50) * 0.5 + np.arange(50) % 3 + 1 - 7 + 3
    assert out.shape == (5, 10)
    assert contents(out).ravel().tolist() == expected.tolist()
    assert count.item() == 50


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32])
def test_init_value_stays_where_nothing_is_written(
    dtype: mx.Dtype, metal_kernel: KernelFactory
) -> None:
    x = INTEGERS.astype(dtype)
    source = "if (i % 2) out[i] = a[i];"
    out = run(metal_kernel, source, [x], threads=64, shape=(64,), dtype=dtype, init_value=3)
    assert (out[1::2] == x[1::2]).all().item()
    assert out[::2].tolist() == [3] * 32


def test_packed_fp4_product(metal_kernel: KernelFactory) -> None:
    """A product over packed E2M1 codes with E8M0 scales, a simdgroup a row, as decode needs it."""
    K, N = 320, 12
    rng = np.random.default_rng(9)
    codes = rng.integers(0, 1 << 32, (N, K // 8), dtype=np.uint32)
    scales = rng.integers(120, 130, (N, K // 32), dtype=np.uint8)
    x = mx.random.normal((K,), key=mx.random.key(10))
    source = """
        constexpr int K = 320;
        const uint row = i / 32;
        float sum = 0;
        for (uint p = l; p < K / 8; p += 32) {
            const uint q = a[row * (K / 8) + p];
            const float scale = as_type<float>(uint(b[row * (K / 32) + p / 4]) << 23);
            for (uint j = 0; j < 8; j++) sum += scale * E2M1[q >> 4 * j & 15] * c[8 * p + j];
        }
        sum = simd_sum(sum);
        if (l == 0) out[row] = sum;
    """
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-v for v in values]
    table = ", ".join(map(str, values))
    out = run(
        metal_kernel,
        source,
        [mx.array(codes), mx.array(scales), x],
        threads=32 * N,
        shape=(N,),
        dtype=mx.float32,
        header=f"constant float E2M1[16] = {{{table}}};\n",
    )
    nibbles = (codes[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(N, K)
    weights = np.array(values)[nibbles] * np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=1)
    bound = K * 2.0**-24 * (np.abs(weights) @ np.abs(as_float64(x)))
    assert (np.abs(as_float64(out) - weights @ as_float64(x)) <= bound).all()
