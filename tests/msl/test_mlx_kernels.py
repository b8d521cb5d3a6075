"""Kernels that MLX itself wrote, taken from the installed wheel, against numpy in float64."""

import inspect
import re

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.msl import toolchain
from tests.msl.conftest import KernelFactory
from tests.msl.emulator import EmulatedKernel
from tests.msl.faults import KernelFault, Kind
from tests.msl.memory import as_float64

# Half a step of the type beside the products' rounding in float32.
RELATIVE = {mx.float32: 1e-6, mx.float16: 2.0**-11 + 1e-6, mx.bfloat16: 2.0**-8 + 1e-6}


def documented_body() -> str:
    """The example of the documentation of `mx.fast.metal_kernel`."""
    quoted = re.search(r"source = '''(.*?)'''", inspect.getdoc(mx.fast.metal_kernel) or "", re.S)
    assert quoted is not None
    return quoted[1]


def test_documented_example(metal_kernel: KernelFactory) -> None:
    kernel = metal_kernel(
        name="myexp", input_names=["inp"], output_names=["out"], source=documented_body()
    )
    a = mx.random.normal(shape=(4, 16), key=mx.random.key(0)).astype(mx.float16)
    (out,) = kernel(
        inputs=[a],
        template=[("T", mx.float32)],
        grid=(a.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[a.shape],
        output_dtypes=[a.dtype],
    )
    expected = np.exp(as_float64(a))
    np.testing.assert_allclose(as_float64(out), expected, rtol=2.0**-11 + 1e-6)


TABLE = mx.arange(60, dtype=mx.float32).reshape(6, 10).astype(mx.bfloat16)
VIEWS = {
    "transposed": TABLE.T,
    "strided": TABLE[::2, 1::3],
    "backwards": TABLE[::-1],
    "broadcast": mx.broadcast_to(TABLE[:1], TABLE.shape),
    "offset": TABLE[3:],
}


@pytest.mark.parametrize("x", VIEWS.values(), ids=VIEWS.keys())
def test_documented_way_to_read_strided_inputs(x: mx.array, metal_kernel: KernelFactory) -> None:
    kernel = metal_kernel(
        name="copy",
        input_names=["inp"],
        output_names=["out"],
        source="uint i = thread_position_in_grid.x;\n"
        "out[i] = inp[elem_to_loc(int(i), inp_shape, inp_strides, inp_ndim)];",
        ensure_row_contiguous=False,
    )
    (out,) = kernel(
        inputs=[x],
        grid=(x.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    assert out.tolist() == x.tolist()


def fp_quantized() -> str:
    """MLX's header of FP4 and FP8 products up to the matrix products, constants given."""
    header = (toolchain.MLX_INCLUDE / toolchain.MLX_KERNELS / "fp_quantized.h").read_text()
    header = re.sub(r"(constant bool \w+) \[\[function_constant\(\d+\)\]\];", r"\1 = true;", header)
    end = header.index("METAL_FUNC void fp_qmm_t_impl")
    return header[: header.rindex("template", 0, end)]


def products(
    metal_kernel: KernelFactory, function: str, dtype: mx.Dtype, K: int, N: int, bits: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """MLX's kernel over random weights: its result, the exact one, and the sum of magnitudes."""
    rng = np.random.default_rng(K + N)
    codes = rng.integers(0, 1 << 32, (N, K * bits // 32), dtype=np.uint32)
    # Two codes of e4m3 mean NaN; this leaves them out with some others.
    w = mx.array(codes & 0x77777777) if bits == 8 else mx.array(codes)
    scales = mx.array(rng.integers(120, 130, (N, K // 32), dtype=np.uint8))
    x = mx.array(rng.standard_normal((1, K)).astype(np.float32)).astype(dtype)
    kernel = metal_kernel(
        name="mlx_qmv",
        input_names=["w", "scales", "x", "K", "N"],
        output_names=["out"],
        header=fp_quantized(),
        source=f"{function}<T, 32, {bits}>(w, scales, nullptr, x, out, K, N,"
        "threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
    )
    (out,) = kernel(
        inputs=[w, scales, x, K, N],
        template=[("T", dtype)],
        grid=(32, 2 * -(-N // 8), 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(1, N)],
        output_dtypes=[dtype],
    )
    weights = mx.dequantize(
        w, scales, group_size=32, bits=bits, mode={4: "mxfp4", 8: "mxfp8"}[bits]
    )
    matrix, vector = as_float64(weights), as_float64(x[0])
    return as_float64(out[0]), matrix @ vector, np.abs(matrix) @ np.abs(vector)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("function", "K", "N"),
    [("fp_qmv_fast_impl", 1024, 24), ("fp_qmv_impl", 96, 24), ("fp_qmv_impl", 96, 5)],
)
@pytest.mark.parametrize("dtype", RELATIVE)
def test_quantised_matrix_by_vector(
    dtype: mx.Dtype, function: str, K: int, N: int, bits: int, metal_kernel: KernelFactory
) -> None:
    found, exact, magnitude = products(metal_kernel, function, dtype, K, N, bits)
    assert (np.abs(found - exact) <= RELATIVE[dtype] * magnitude).all()


def test_checker_sees_that_mlx_computes_some_rows_twice(
    emulated_kernel: type[EmulatedKernel],
) -> None:
    """Of 21 rows the last two simdgroups take four each, from row 16 and from row 17."""
    with pytest.raises(KernelFault) as caught:
        products(emulated_kernel, "fp_qmv_impl", mx.float32, 96, 21, 4)
    assert caught.value.kinds == {Kind.RACE}
    assert "threadgroup (0,2,0) writes byte 68" in str(caught.value)
