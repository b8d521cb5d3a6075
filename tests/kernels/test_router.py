"""The router kernels against float64, and the half of a launch that finishes hyper-connections."""

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine.ops.mhc import MhcSublayer, Mixing, mhc_between
from mlx_engine.ops.mhc_bytes import HC, mhc_between_traffic
from mlx_engine.ops.router import (
    Router,
    Routing,
    choose_reference,
    mhc_route,
    route,
)
from mlx_engine.ops.router_bytes import choose_traffic, router_scores_traffic
from mlx_engine.weights import MhcWeights
from tests.kernels.counted import Launches, check_traffic
from tests.msl.memory import as_float64

Float = NDArray[np.float64]
Written = tuple[mx.array, mx.array, Mixing, mx.array, MhcSublayer]


def normal(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def inputs(T: int, D: int, dtype: mx.Dtype) -> Written:
    """What lies between two sublayers, with weights of random size."""
    rng = np.random.default_rng(T + D)
    columns = (2 + HC) * HC
    w = MhcWeights(normal(rng, columns, HC * D) / D, normal(rng, columns), normal(rng, 3))
    to = MhcSublayer(w, (1 + 0.2 * normal(rng, D)).astype(mx.bfloat16), 3, 0.02, 1e-20)
    last = Mixing(normal(rng, T, HC), normal(rng, T, HC), normal(rng, T, HC, HC))
    h, streams = normal(rng, T, D).astype(dtype), normal(rng, T, HC, D).astype(dtype)
    return h, streams, last, normal(rng, T, HC), to


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
    (129, 1, 9, 32),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route(shape: tuple[int, int, int, int], dtype: mx.Dtype, kernels_on: Launches) -> None:
    """Choices are those of float64, weights within the rounding of f32 sums of D products.

    What `mhc_between` gives beside them is the same to the last bit, whoever finishes it.
    """
    T, k, E, D = shape
    rng, norm = np.random.default_rng(0), T % 2 == 1
    gate, bias = (normal(rng, E, D) / D**0.5).astype(mx.bfloat16), normal(rng, E)
    router = Router(gate, bias, k, 0.7, norm, 2.5)
    given = inputs(T, D, dtype)
    streams, x, mixing, routing = mhc_route(*given, router)
    ids, weights = routing.chosen()
    assert (ids.dtype, weights.dtype) == (mx.int32, mx.float32)
    if kernels_on is not None and T <= 8:
        assert [r.kernel for r in kernels_on] == ["mhc_between", "router_scores", "router_choose"]
        between, _ = mhc_between_traffic(T, D, value_bytes=dtype.size)
        scored = router_scores_traffic(T, E, D, value_bytes=dtype.size)
        check_traffic(kernels_on, between, scored, choose_traffic(T, k, E))
    right_streams, right_x, right = mhc_between(*given)
    for a, b in (
        *((streams, right_streams), (x, right_x), (mixing.pre, right.pre)),
        *((mixing.post, right.post), (mixing.comb, right.comb)),
    ):
        assert mx.array_equal(a, b).item()
    scores = expected_scores(x, gate, 0.7)
    np.testing.assert_allclose(as_float64(routing.scores), scores, rtol=D * 2.0**-20)
    order = np.argsort(-(scores + as_float64(bias)), axis=1, kind="stable")
    wanted = np.sort(order[:, :k], axis=1)
    assert ids.tolist() == wanted.tolist()
    chosen = np.take_along_axis(scores, wanted, axis=1)
    if norm:
        chosen /= chosen.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(as_float64(weights), 2.5 * chosen, rtol=D * 2.0**-20)


def test_ties_go_to_the_lowest(kernels_on: Launches) -> None:
    """Equal experts within a lane, in neighbouring and in far lanes."""
    E = 384
    bias = np.full(E, -1.0, np.float32)
    bias[[5, 6, 40, 41, 200, 383]] = 0.5
    bias[[100, 7]] = 1.0
    for k, wanted in ((1, [7]), (4, [5, 6, 7, 100]), (6, [5, 6, 7, 40, 41, 100])):
        router = Router(mx.zeros((E, 32)), mx.array(bias), k, 1.0, True, 1.0)
        ids, weights = Routing(mx.full((2, E), 0.75), router).chosen()
        assert ids.tolist() == [wanted] * 2
        np.testing.assert_allclose(as_float64(weights), 1 / k, rtol=1e-6)


def test_order_of_biased_scores(kernels_on: Launches) -> None:
    """Negative sums, zeros of both signs, infinities and scores from nothing to hundreds."""
    logits = [[-60.0], [-20], [-1], [-600], [1], [20], [60000], [3], [-600]]
    gate = mx.pad(mx.array(logits), [(0, 0), (0, 31)]).astype(mx.bfloat16)
    inf = float("inf")
    bias = mx.array([0.0, -0.0, -3.0, -0.0, -1e30, -inf, -500.0, inf, 0.0])
    # An input that is near 1 in its first channel after the norm, and 0 in the others.
    first = mx.array(np.eye(1, 32, dtype=np.float32))
    _, _, _, _, to = inputs(1, 32, mx.float32)
    to = MhcSublayer(to.w, mx.full((32,), 32**-0.5), 3, 0.02, 1e-20)
    given = (first, mx.zeros((1, HC, 32)), mixing_of_ones(), mx.full((1, HC), 0.25), to)
    for k in range(1, 10):
        _, x, _, routing = mhc_route(*given, Router(gate, bias, k, 1.0, False, 1.0))
        ids, weights = routing.chosen()
        wanted, wanted_weights = choose_reference(route(x, routing.router))
        assert ids.tolist() == wanted.tolist()
        # An f32 exponential of -60 may be off by 60 roundings of its argument.
        found, expected = as_float64(weights), as_float64(wanted_weights)
        np.testing.assert_allclose(found, expected, rtol=60 * 2.0**-24)


def mixing_of_ones() -> Mixing:
    return Mixing(mx.ones((1, HC)), mx.ones((1, HC)), mx.ones((1, HC, HC)))
