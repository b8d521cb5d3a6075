"""The router kernels against float64 and against MLX's operations."""

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine.ops.router import route, route_bytes, route_reference
from tests.msl.emulator import Report
from tests.msl.memory import as_float64

Float = NDArray[np.float64]


def inputs(T: int, E: int, D: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(0)
    x, gate = (mx.array(rng.standard_normal((n, D)).astype(np.float32)) for n in (T, E))
    bias = mx.array(rng.standard_normal(E).astype(np.float32))
    return x.astype(dtype), gate.astype(mx.bfloat16), bias


def expected_scores(x: mx.array, gate: mx.array, temp: float) -> Float:
    logits = as_float64(x) @ as_float64(gate).T / temp
    return np.sqrt(np.maximum(logits, 0) + np.log1p(np.exp(-np.abs(logits))))


# T, k, E, D. Experts: fewer and more than lanes, the released 384, odd; inputs: fewer than the
# threads of a row take at once, the released 5,120; more than 8 tokens go through MLX's product.
SHAPES = [
    (1, 1, 1, 32),
    (1, 6, 384, 5120),
    (2, 31, 31, 96),
    (3, 7, 33, 1056),
    (5, 6, 127, 64),
    (8, 3, 129, 1024),
    (9, 2, 65, 64),
    (33, 6, 63, 32),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route(shape: tuple[int, int, int, int], dtype: mx.Dtype, kernels_on: list[Report]) -> None:
    """Choices are those of float64, weights within the rounding of f32 sums of D products."""
    T, k, E, D = shape
    norm = T % 2 == 1
    x, gate, bias = inputs(T, E, D, dtype)
    ids, weights = route(x, gate, bias, k=k, gate_temp=0.7, norm_topk_prob=norm, scaling_factor=2.5)
    assert (ids.dtype, weights.dtype) == (mx.int32, mx.float32)
    scores = expected_scores(x, gate, 0.7)
    order = np.argsort(-(scores + as_float64(bias)), axis=1, kind="stable")
    wanted = np.sort(order[:, :k], axis=1)
    assert ids.tolist() == wanted.tolist()
    chosen = np.take_along_axis(scores, wanted, axis=1)
    if norm:
        chosen /= chosen.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(as_float64(weights), 2.5 * chosen, rtol=D * 2.0**-20)
    if kernels_on and T <= 8:
        assert [r.kernel for r in kernels_on] == ["router_scores", "router_choose"]
        assert sum(r.unique_bytes for r in kernels_on) == route_bytes(T, k, E, D, dtype.size)


def test_ties_go_to_the_lowest(kernels_on: list[Report]) -> None:
    """Equal experts within a lane, in neighbouring and in far lanes."""
    E = 384
    x, gate = mx.zeros((2, 32)), mx.zeros((E, 32), dtype=mx.bfloat16)
    bias = np.full(E, -1.0, np.float32)
    bias[[5, 6, 40, 41, 200, 383]] = 0.5
    bias[[100, 7]] = 1.0
    for k, wanted in ((1, [7]), (4, [5, 6, 7, 100]), (6, [5, 6, 7, 40, 41, 100])):
        ids, weights = route(
            *(x, gate, mx.array(bias)),
            k=k,
            gate_temp=1.0,
            norm_topk_prob=True,
            scaling_factor=1.0,
        )
        assert ids.tolist() == [wanted] * 2
        np.testing.assert_allclose(as_float64(weights), 1 / k, rtol=1e-6)


def test_order_of_biased_scores(kernels_on: list[Report]) -> None:
    """Negative sums, zeros of both signs, infinities and scores from nothing to hundreds."""
    logits = [[-60.0], [-20], [-1], [-600], [1], [20], [60000], [3], [-600]]
    gate = mx.pad(mx.array(logits), [(0, 0), (0, 31)]).astype(mx.bfloat16)
    x = mx.array(np.eye(1, 32, dtype=np.float32))
    inf = float("inf")
    bias = mx.array([0.0, -0.0, -3.0, -0.0, -1e30, -inf, -500.0, inf, 0.0])
    for k in range(1, 10):
        (ids, weights), (wanted, wanted_weights) = (
            compute(*(x, gate, bias), k=k, gate_temp=1.0, norm_topk_prob=False, scaling_factor=1.0)
            for compute in (route, route_reference)
        )
        assert ids.tolist() == wanted.tolist()
        # An f32 exponential of -60 may be off by 60 roundings of its argument.
        found, expected = as_float64(weights), as_float64(wanted_weights)
        np.testing.assert_allclose(found, expected, rtol=60 * 2.0**-24)
