"""The expert kernels against float64, from the same codes, and against MLX's operations."""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine.ops.expert_tiles import routed_tiles_metal, tile_rows
from mlx_engine.ops.experts import moe, moe_reference
from mlx_engine.ops.experts_bytes import moe_traffic, tiles_traffic
from mlx_engine.ops.router import Router, Routing, choose_reference
from mlx_engine.ops.topk import top_k
from mlx_engine.weights import FfnWeights, Fp4, Fp8
from tests.kernels.counted import Launches, check_traffic
from tests.msl.memory import as_float64, contents
from tests.reference.formats import e2m1, e4m3, e8m0
from tests.unit.arrays import routing

Float = NDArray[np.float64]

# Half the distance from 1 to the next value.
UNIT = {mx.float32: 2.0**-24, mx.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Case:
    """Inputs of the operation, and the weights' values."""

    x: mx.array
    ids: mx.array
    weights: mx.array
    ffn: FfnWeights
    routed: tuple[Float, Float, Float]  # w1, w2, w3
    shared: tuple[Float, Float, Float]

    def run(self, limit: float) -> mx.array:
        chosen = routing(contents(self.ids), contents(self.weights), self.ffn.w1.weight.shape[0])
        return moe(self.x, chosen, self.ffn, limit=limit)

    @property
    def pairs_of(self) -> list[int]:
        """How many tokens chose each expert that any did."""
        return np.unique(contents(self.ids), return_counts=True)[1].tolist()

    def expected(self, limit: float, *, with_shared: bool = True) -> tuple[Float, Float]:
        """The exact result and how far from it f32 sums and two roundings to x's type may lead."""
        (w1, w2, w3), (s1, s2, s3) = self.routed, self.shared
        x, weights = as_float64(self.x), as_float64(self.weights)
        unit = UNIT[self.x.dtype]
        shared = np.full((x.shape[0], 1), float(with_shared))
        out, bound = _expert(x, s1, s2, s3, shared, limit, unit)
        for slot, ids in enumerate(contents(self.ids).T):
            for t, e in enumerate(ids):
                w = weights[t : t + 1, slot : slot + 1]
                more, error = _expert(x[t : t + 1], w1[e], w2[e], w3[e], w, limit, unit)
                out[t] += more[0]
                bound[t] += error[0]
        return out, bound + unit * np.abs(out)


def _expert(
    x: Float, w1: Float, w2: Float, w3: Float, weight: Float, limit: float, unit: float
) -> tuple[Float, Float]:
    """An expert's output and its error bound before the last rounding."""
    # A sum of n products in f32 is off by at most n roundings of the sum of their magnitudes.
    sum_unit = x.shape[1] * 2.0**-24
    gate, up = np.minimum(x @ w1.T, limit), x @ w3.T
    gate_error, up_error = (
        sum_unit * (np.abs(x) @ np.abs(w1.T)),
        sum_unit * (np.abs(x) @ np.abs(w3.T)),
    )
    clipped = np.clip(up, -limit, limit)
    silu = gate / (1 + np.exp(np.minimum(-gate, 700)))
    # The slope of silu is below 1.1; the product has a dozen roundings of its own.
    act = silu * clipped * weight
    act_error = (1.1 * gate_error * (np.abs(clipped) + up_error) + np.abs(silu) * up_error) * weight
    act_error += (unit + 16 * 2.0**-24) * np.abs(act)
    down_unit = 8 * w2.shape[1] * 2.0**-24
    return act @ w2.T, (act_error + down_unit * np.abs(act)) @ np.abs(w2.T)


def case(
    T: int, k: int, E: int, D: int, inter: int, dtype: mx.Dtype, *, seed: int = 0, spread: int = 3
) -> Case:
    """Random weights of every code; scales over 2 * spread + 1 powers of two."""
    rng = np.random.default_rng(seed)

    def fp4(N: int, K: int) -> tuple[Fp4, Float]:
        codes = rng.integers(0, 256, (E, N, K // 2), dtype=np.uint8)
        scales = rng.integers(121 - spread, 122 + spread, (E, N, K // 32), dtype=np.uint8)
        values = e2m1(codes) * e8m0(scales).repeat(32, axis=-1)
        return Fp4(mx.array(codes.view(np.uint32)), mx.array(scales)), values

    def fp8(N: int, K: int) -> tuple[Fp8, Float]:
        codes = rng.integers(0, 256, (N, K), dtype=np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x80
        scales = rng.integers(115 - spread, 116 + spread, (N // 32, K // 32), dtype=np.uint8)
        values = e4m3(codes) * e8m0(scales).repeat(32, axis=0).repeat(32, axis=1)
        return Fp8(mx.array(codes.view(np.uint32)), mx.array(scales)), values

    w1, w2, w3 = fp4(inter, D), fp4(D, inter), fp4(inter, D)
    s1, s2, s3 = fp8(inter, D), fp8(D, inter), fp8(inter, D)
    none = mx.zeros((1,))
    ids = np.argsort(rng.random((T, E)), axis=1)[:, :k].astype(np.int32)
    return Case(
        mx.array(rng.standard_normal((T, D)).astype(np.float32)).astype(dtype),
        mx.array(ids),
        mx.array(rng.random((T, k)).astype(np.float32)),
        FfnWeights(none, none, w1[0], w2[0], w3[0], s1[0], s2[0], s3[0]),
        (w1[1], w2[1], w3[1]),
        (s1[1], s2[1], s3[1]),
    )


def agrees(found: mx.array, expected: tuple[Float, Float]) -> None:
    values, bound = expected
    error = np.abs(as_float64(found) - values)
    assert (error <= bound).all(), f"off by {np.nanmax(error / bound)} of the bound"


# T, k, E, D, inter. Widths are multiples of 32: one and odd numbers of a lane's steps, and more
# than the lanes of a simdgroup take in one; experts that all tokens, some and none share; and the
# released number of experts.
SHAPES = [
    (1, 1, 1, 32, 32),
    (1, 6, 9, 544, 96),
    (2, 6, 7, 32, 288),
    (3, 2, 2, 96, 64),
    (5, 3, 4, 160, 32),
    (7, 1, 3, 32, 32),
    (4, 2, 31, 32, 32),
    (6, 4, 63, 32, 32),
    (8, 8, 33, 64, 32),
    (8, 6, 384, 32, 32),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_tokens(
    shape: tuple[int, int, int, int, int], dtype: mx.Dtype, kernels_on: Launches
) -> None:
    """Within the rounding bound of float64; the bytes are those of the formula."""
    T, k, E, D, inter = shape
    c = case(*shape, dtype)
    found = c.run(0.75)
    assert found.dtype == dtype
    agrees(found, c.expected(0.75))
    if kernels_on is not None:
        assert [r.kernel for r in kernels_on] == ["moe_gate_up", "moe_down"]
    planned = moe_traffic(T, k, E, D, inter, dtype.size, experts=len(c.pairs_of))
    check_traffic(kernels_on, *planned)


# T, k, E, D, inter: tiles of 8, 16 and 32 rows; experts with no pair, with whole tiles and with
# one row over; columns that end within a tile; and the released number of experts.
MANY = [
    (9, 1, 65, 32, 32),
    (31, 2, 9, 96, 64),
    (63, 1, 1, 64, 32),
    (65, 3, 33, 32, 96),
    (127, 2, 31, 32, 32),
    (129, 2, 2, 160, 32),
    (129, 6, 384, 32, 32),
]


def met_by_searches(ids: NDArray[Any], E: int) -> int:
    """How many pairs the list's threads read, each of which looks for two experts' first pairs."""
    experts, met = np.sort(ids, axis=None), set[int]()
    for expert in range(E + 1):
        low, left = 0, len(experts)
        while left > 1:
            middle = low + left // 2 - 1
            met.add(middle)
            low += left // 2 if experts[middle] < expert else 0
            left -= left // 2
        met.add(low)
    return len(met)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_many_tokens(
    shape: tuple[int, int, int, int, int], dtype: mx.Dtype, kernels_on: Launches
) -> None:
    """The routed experts within the same bound; the bytes are those of the formulas."""
    T, k, E, D, inter = shape
    c = case(*shape, dtype)
    found = routed_tiles_metal(c.x, c.ids, c.weights, c.ffn, limit=0.75)
    assert found.dtype == mx.float32
    agrees(found, c.expected(0.75, with_shared=False))
    met = met_by_searches(contents(c.ids), E)
    planned = tiles_traffic(T, k, E, D, inter, dtype.size, pairs_of=c.pairs_of, met=met)
    check_traffic(kernels_on, *planned)


@pytest.mark.parametrize("norm", [False, True])
def test_few_tokens_choose_as_the_router_does(norm: bool, kernels_on: Launches) -> None:
    """From scores and a bias, in the launch of the first products."""
    c = case(3, 2, 5, 64, 32, mx.float32, seed=7)
    random = np.random.default_rng(7)
    scores, bias = (mx.array(random.random(n, np.float32)) for n in ((3, 5), (5,)))
    chosen = Routing(scores, Router(mx.zeros((5, 1)), bias, 2, 1.0, norm, 2.5))
    ids, weights = choose_reference(chosen)
    assert not mx.array_equal(ids, top_k(scores, 2))
    found = moe(c.x, chosen, c.ffn, limit=0.75)
    agrees(found, replace(c, ids=ids, weights=weights).expected(0.75))


def test_many_tokens_and_the_shared_expert(kernels_on: Launches) -> None:
    """The dispatcher's sum, in f32, where both ways have the same roundings."""
    c = case(33, 2, 5, 64, 32, mx.float32, seed=6)
    agrees(c.run(0.75), c.expected(0.75))


def test_tiles_hold_twice_the_mean() -> None:
    released = [tile_rows(6 * T, 384) for T in (9, 256, 257, 512, 513, 8192)]
    assert released == [8, 8, 16, 16, 32, 32]


def test_against_the_reference(kernels_on: Launches) -> None:
    """MLX's f32 sums may be off as far as ours, so twice the bound."""
    c = case(4, 3, 5, 128, 64, mx.float32, seed=1)
    values, bound = c.expected(2.0)
    reference = moe_reference(c.x, c.ids, c.weights, c.ffn, limit=2.0)
    agrees(reference, (values, bound))
    agrees(c.run(2.0), (as_float64(reference), 2 * bound))


def test_extreme_scales(kernels_on: Launches) -> None:
    """Scales over 81 powers of two, and the least and largest bytes that cancel each other."""
    c = case(2, 2, 3, 64, 64, mx.float32, seed=2, spread=40)
    agrees(c.run(10.0), c.expected(10.0))


def test_scales_at_both_ends(kernels_on: Launches) -> None:
    """The bytes 0 and 254 by turns, in products that stay within f32's range."""
    six = np.zeros((1, 32, 4), np.uint32)
    six[..., 0] = 7  # the code of 6 for the first input of every row

    def fp4(scale: int) -> Fp4:
        return Fp4(mx.array(six), mx.full((1, 32, 1), scale, dtype=mx.uint8))

    tiles = mx.zeros((1, 1), dtype=mx.uint8)
    none, zero = mx.zeros((1,)), Fp8(mx.zeros((32, 8), dtype=mx.uint32), tiles)
    x = mx.array(2.0**-120 * np.eye(1, 32, dtype=np.float32))
    for first, last in ((254, 0), (127, 254)):
        ffn = FfnWeights(none, none, fp4(first), fp4(last), fp4(254), zero, zero, zero)
        found = moe(x, routing(np.array([[0]]), np.ones((1, 1)), 1), ffn, limit=2.0**100)
        gate, up = (6 * 2.0 ** (scale - 127 - 120) for scale in (first, 254))
        act = np.float32(gate / (1 + np.exp(-gate)) * up)
        # The result is subnormal with the least scale; on a GPU it may be flushed to zero.
        wanted = 6 * float(act) * 2.0 ** (last - 127)
        np.testing.assert_allclose(found.tolist(), [[wanted] * 32], rtol=2.0**-20, atol=2.0**-126)


def test_routing_weight_is_outside_the_clamp(kernels_on: Launches) -> None:
    """Weights above 1 and a limit that most gates and ups reach."""
    c = case(2, 2, 4, 64, 32, mx.float32, seed=3)
    c = replace(c, weights=mx.array([[3.0, 0.0], [1.5, 2.5]]))
    agrees(c.run(0.01), c.expected(0.01))


@pytest.mark.parametrize("widths", [(5120, 64), (64, 2304)], ids=str)
def test_released_widths(widths: tuple[int, int], kernels_on: Launches) -> None:
    """Sums as long as the released ones, for two tokens that share an expert."""
    c = case(2, 2, 3, *widths, mx.bfloat16, seed=4)
    c = replace(c, ids=mx.array([[0, 2], [2, 1]]))
    agrees(c.run(10.0), c.expected(10.0))


@pytest.mark.parametrize("T", [1, 9])
def test_more_than_the_kernels_hold(T: int, kernels_on: Launches) -> None:
    """15 slots at few tokens, and at many tokens more experts than threads: the reference."""
    c = case(T, 15, 16, 32, 32, mx.float32) if T == 1 else case(T, 1, 1025, 32, 32, mx.float32)
    agrees(c.run(1.0), c.expected(1.0))
    if kernels_on is not None:
        assert {r.kernel for r in kernels_on} == {"router_choose", "fp8_rows"}
