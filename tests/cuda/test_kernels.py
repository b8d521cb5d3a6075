"""What MLX is given to launch a kernel, without launching it."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.cuda import compiler, kernels
from mlx_engine.cuda.kernels import CudaKernels
from mlx_engine.ops import launch
from mlx_engine.ops.launch import FastPaths

BODY = """
    threadgroup float sums[4];
    threadgroup float* first = sums;
    out[thread_position_in_grid.x] = eps + float(x_shape[1]) + first[0];
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `mx.fast.precompiled_cuda_kernel` is called with."""
    calls: list[dict[str, Any]] = []

    def note(**call: Any) -> list[mx.array]:
        calls.append(call)
        return []

    def text_itself(text: str, architecture: str) -> bytes:
        assert architecture == "sm_80"
        return text.encode()

    def code_itself(name: str, code: bytes, architecture: str) -> bytes:
        return code

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", note)
    monkeypatch.setattr(kernels, "architecture", lambda: "sm_80")
    monkeypatch.setattr(compiler, "cubin", text_itself)
    monkeypatch.setattr(kernels, "handle", code_itself)
    return calls


def launch_body(*grids: int, eps: float = 1.0) -> None:
    kernel = CudaKernels()(
        name="body", input_names=["x", "eps"], output_names=["out"], source=BODY, header=""
    )
    for grid in grids:
        launch_over(grid, kernel, eps)


def launch_over(
    grid: int, kernel: Callable[..., Any], eps: float | mx.array, threads: int = 32
) -> None:
    kernel(
        inputs=[mx.zeros((3, 5), mx.bfloat16), eps],
        template=[("T", mx.float32), ("N", 2), ("IS_ON", True)],
        grid=(grid, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
    )


def test_numbers_are_f32_and_stand_before_lengths(launched: list[dict[str, Any]]) -> None:
    launch_body(64, eps=1e-6)
    assert launched[0]["scalars"] == [float(np.float32(1e-6)), 5]
    assert [x.shape for x in launched[0]["inputs"]] == [(3, 5)]


def test_a_kernel_of_metal_becomes_one_of_cuda(launched: list[dict[str, Any]]) -> None:
    launch_body(64)
    text = launched[0]["compiled_source"].decode()
    signature, body = text[text.index('extern "C"') :].split("{", 1)
    parameters = [p.strip() for p in signature.split("body(")[1].rstrip(") ").split(",")]
    assert parameters == [
        "const bfloat16_t* __restrict__ x",
        "float* __restrict__ out",
        "const float eps",
        "const int x_extent_1",
    ]
    assert "using T = float;" in body
    assert "constexpr int N = 2;" in body
    assert "constexpr bool IS_ON = true;" in body
    assert "__shared__ __align__(16) float sums[4];" in body
    assert "threadgroup float* first" in body


def test_a_grid_of_parts_of_blocks_is_refused(launched: list[dict[str, Any]]) -> None:
    with pytest.raises(AssertionError, match="no multiple"):
        launch_body(65)
    assert not launched


def test_blocks_of_like_sizes_share_machine_code(launched: list[dict[str, Any]]) -> None:
    """Those that grow with the context would else be compiled at every length."""
    kernel = CudaKernels()(
        name="body", input_names=["x", "eps"], output_names=["out"], source=BODY, header=""
    )
    for threads in (16, 32, 160, 224, 256, 288):
        launch_over(threads, kernel, 1.0, threads)
    bounds = [call["compiled_source"].decode().split("__launch_bounds__(")[1] for call in launched]
    assert [int(text.split(",")[0]) for text in bounds] == [32, 32, 256, 256, 256, 512]


def test_an_array_without_axes_is_a_value_to_the_body(launched: list[dict[str, Any]]) -> None:
    kernel = CudaKernels()(
        name="body", input_names=["x", "eps"], output_names=["out"], source=BODY, header=""
    )
    launch_over(64, kernel, mx.array(3))
    text = launched[0]["compiled_source"].decode()
    assert "const int* __restrict__ eps_at" in text
    assert "const int eps = *eps_at;" in text
    assert launched[0]["scalars"] == [5]


def test_a_length_that_a_stand_in_does_not_have_is_zero(launched: list[dict[str, Any]]) -> None:
    kernel = CudaKernels()(
        name="body", input_names=["x", "eps"], output_names=["out"], source=BODY, header=""
    )
    kernel(
        inputs=[mx.zeros((3,), mx.bfloat16), 1.0],
        template=[("T", mx.float32), ("N", 2), ("IS_ON", True)],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
    )
    assert launched[0]["scalars"] == [1.0, 0]


@pytest.mark.parametrize("has_metal", [True, False])
def test_the_gpu_here_gets_its_own_kernels(
    has_metal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(factory: Any) -> FastPaths:
        started.append(factory)
        return FastPaths((), ())

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: not has_metal)
    launch.start_here.__wrapped__()
    assert len(started) == 1
    assert isinstance(started[0], CudaKernels) is not has_metal
