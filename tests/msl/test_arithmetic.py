"""Scalar and vector functions, and the rounding of narrow types."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.msl.conftest import KernelFactory
from tests.msl.memory import as_float64, contents
from tests.msl.run_body import INTEGERS, run


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("operation", ["x + y", "x * y", "x - y"])
def test_narrow_arithmetic_rounds_every_result(
    operation: str, dtype: mx.Dtype, metal_kernel: KernelFactory
) -> None:
    """Three operations in a row, each rounded to the type, as MLX computes them one by one."""
    x, y = (mx.random.normal((64,), key=mx.random.key(k)).astype(dtype) for k in (2, 3))
    source = f"T x = a[i], y = b[i]; x = {operation}; x = {operation}; x = {operation}; out[i] = x;"
    out = run(
        metal_kernel, source, [x, y], threads=64, shape=(64,), dtype=dtype, template=[("T", dtype)]
    )
    for _ in range(3):
        names = {"x": as_float64(x), "y": as_float64(y)}
        x = mx.array(eval(operation, names).astype(np.float32)).astype(dtype)
    assert out.tolist() == x.tolist()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_conversions_round_to_nearest_even(dtype: mx.Dtype, metal_kernel: KernelFactory) -> None:
    bits = np.random.default_rng(4).integers(0, 1 << 32, 4096, dtype=np.uint32)
    ties = (np.arange(4096, dtype=np.uint32) << 19) | 0x3F808000
    x = mx.array(np.concatenate([bits, ties, ties >> 3 << 3]).view(np.float32))
    n = x.size
    out = run(
        metal_kernel,
        "out[i] = static_cast<T>(a[i]);",
        [x],
        threads=n,
        shape=(n,),
        dtype=dtype,
        template=[("T", dtype)],
    )
    np.testing.assert_array_equal(as_float64(out), as_float64(x.astype(dtype)))


FUNCTIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "exp(x)": np.exp,
    "log(x)": np.log,
    "sqrt(x)": np.sqrt,
    "rsqrt(x)": lambda x: 1 / np.sqrt(x),
    "precise::exp2(x)": np.exp2,
    "tanh(x)": np.tanh,
    "sin(x)": np.sin,
    "pow(x, 1.5f)": lambda x: x**1.5,
    "fma(x, x, 1.0f)": lambda x: x * x + 1,
    "clamp(x, 0.5f, 1.5f)": lambda x: np.clip(x, 0.5, 1.5),
    "max(0.5f, min(x, 1.5f))": lambda x: np.clip(x, 0.5, 1.5),
    "fmax(NAN, x) + fmin(x, NAN)": lambda x: 2 * x,
    "floor(4 * x) + fract(4 * x)": lambda x: 4 * x,
    "rint(4 * x)": lambda x: np.rint(4 * x),
    "select(x, -x, x > 1.0f)": lambda x: np.where(x > 1, -x, x),
    "dot(float4(x, 1, float2(2.0f)), float4(1, x, x, x).wzyx)": lambda x: (
        x * x + x + 4 * x - 2 * x + 2
    ),
    "float3(x).y + length(float2(3 * x, 4 * x))": lambda x: 6 * x,
    "as_type<float>(as_type<uint>(x) ^ 0x80000000u)": lambda x: -x,
}


def test_functions(metal_kernel: KernelFactory) -> None:
    x = mx.random.uniform(0.1, 2.0, (64,), key=mx.random.key(5))
    stores = [f"out[{64 * n} + i] = {e};" for n, e in enumerate(FUNCTIONS)]
    out = run(
        metal_kernel,
        "float x = a[i];" + "\n".join(stores),
        [x],
        threads=64,
        shape=(len(FUNCTIONS), 64),
        dtype=mx.float32,
    )
    for values, (expression, function) in zip(as_float64(out), FUNCTIONS.items(), strict=True):
        # Metal allows its functions a few units in the last place.
        np.testing.assert_allclose(
            values, function(as_float64(x)), rtol=2.0**-20, atol=2.0**-24, err_msg=expression
        )


def test_integer_functions(metal_kernel: KernelFactory) -> None:
    source = (
        "uint x = a[i]; uint r[8] = {popcount(x), clz(x), ctz(x), reverse_bits(x), mulhi(x, x),"
        "extract_bits(x, 3u, 7u), insert_bits(x, 5u, 4u, 3u), rotate(x, 9u)};"
        "for (uint j = 0; j < 8; j++) out[8 * i + j] = r[j];"
    )
    x = contents(INTEGERS).astype(np.uint32)
    out = run(metal_kernel, source, [mx.array(x)], threads=64, shape=(64, 8), dtype=mx.uint32)
    expected = [
        [
            v.bit_count(),
            32 - v.bit_length(),
            (v & -v).bit_length() - 1,
            int(f"{v:032b}"[::-1], 2),
            v * v >> 32,
            v >> 3 & 127,
            (v & ~0x70) | 5 << 4,
            (v << 9 | v >> 23) & 0xFFFFFFFF,
        ]
        for v in map(int, x)
    ]
    assert out.tolist() == expected
