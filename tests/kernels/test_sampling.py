"""The sampling kernels against float64 and against MLX's operations.

Where rounding decides nothing a draw is one known token, so that no frequencies are needed: the
unit tests of mlx_engine.sampling show that the reference draws them rightly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine.ops import launch
from mlx_engine.ops.sampling import agrees, draw, draw_reference, greedy
from mlx_engine.ops.sampling_bytes import draw_traffic
from mlx_engine.sampling import Sampler, Sampling
from tests.kernels.counted import Launches, check_traffic
from tests.msl import emulator
from tests.msl.emulator import EmulatedKernel, Order
from tests.unit.arrays import Float

Logits = NDArray[np.float32]

V_RELEASED = 129_280
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Rule:
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0

    def draw(self, logits: Logits, seed: int, compute: Callable[..., mx.array] = draw) -> int:
        token = compute(mx.array(logits), mx.random.key(seed), **vars(self))
        assert (token.dtype, token.shape) == (mx.uint32, ())
        return cast(int, token.item())


RULES = [
    *(Rule(), Rule(temperature=0.6), Rule(temperature=3.0, min_p=0.02)),
    *(Rule(top_p=0.95), Rule(temperature=0.7, top_p=0.4), Rule(top_p=0.8, min_p=0.05)),
]


def weights(logits: Logits, rule: Rule) -> Float:
    with np.errstate(invalid="ignore"):
        scaled = (logits.astype(np.float64) - logits.max()) / rule.temperature
        scaled[logits == logits.max()] = 0
    w = np.exp(scaled)
    return np.where(w >= rule.min_p, w, 0)


def times(V: int, seed: int) -> Float:
    """What each token takes in the race for a weight of one."""
    uniform = np.array(mx.random.uniform(shape=(V,), key=mx.random.key(seed)), np.float64)
    return -np.log1p(-np.maximum(uniform, 2.0**-33))


def winners(logits: Logits, rule: Rule, seed: int) -> set[int]:
    """The token in float64, and any that follow so closely that rounding may put them first."""
    w = weights(logits, rule)
    order = np.argsort(-logits, kind="stable")
    before = np.cumsum(w[order]) - w[order]
    target = rule.top_p * w.sum() if rule.top_p < 1 else INF
    kept = order[(before < target) & (w[order] > 0)]
    race = w[kept] / times(len(logits), seed)[kept]
    return set(kept[race > (1 - 1e-4) * race.max()].tolist())


def expected(logits: Logits, rule: Rule, seed: int) -> set[int]:
    """The token, or those between which f32 decides: in the race or at an edge of what is kept."""
    near = (1 - 1e-5, 1 + 1e-5)
    rules = [
        Rule(rule.temperature, rule.top_p * (p if rule.top_p < 1 else 1), min(rule.min_p * m, 1))
        for p in near
        for m in near
    ]
    return set[int]().union(*(winners(logits, each, seed) for each in rules))


def normal(V: int, spread: float = 3.0) -> Logits:
    return (spread * np.random.default_rng(V).standard_normal(V)).astype(np.float32)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("V", [1, 2, 7, 31, 33, 63, 65, 127, 129, 2047, 2048, 2049, 6151])
def test_draw(V: int, rule: Rule, kernels_on: Launches) -> None:
    """One part of the logits, several, and a part that is not full."""
    logits = normal(V)
    possible = [expected(logits, rule, seed) for seed in range(2)]
    assert min(map(len, possible)) == 1
    for seed, tokens in enumerate(possible):
        assert rule.draw(logits, seed) in tokens
        assert rule.draw(logits, seed, draw_reference) in tokens


@pytest.mark.parametrize("rule", [RULES[0], RULES[5]], ids=str)
def test_the_released_vocabulary(rule: Rule, kernels_on: Launches) -> None:
    logits = normal(V_RELEASED)
    (token,) = expected(logits, rule, 5)
    assert rule.draw(logits, 5) == token == rule.draw(logits, 5, draw_reference)
    check_traffic(kernels_on, *draw_traffic(V_RELEASED, has_top_p=rule.top_p < 1))


def test_flat_logits_are_a_race_of_all(kernels_on: Launches) -> None:
    """The random bits are MLX's, for even and odd counts."""
    for V in (2, 3, 64, 2049, 4098):
        flat = np.full(V, 1.5, np.float32)
        drawn = [Rule().draw(flat, seed) for seed in range(4)]
        assert drawn == [int(np.argmin(times(V, seed))) for seed in range(4)]


def seed_for(token: int, rivals: NDArray[np.int64], logits: Logits, rule: Rule) -> int:
    """A seed with which `token` wins clearly against the others of `rivals`."""
    w = weights(logits, rule)
    others = rivals[rivals != token]
    for seed in range(20_000):
        t = times(len(logits), seed)
        if len(others) == 0 or w[token] / t[token] > 1.001 * (w[others] / t[others]).max():
            return seed
    raise AssertionError(f"{token} does not win")


def check_edge(logits: Logits, n: int, rule: Rule) -> None:
    """Of the tokens in their order n are kept: the last one is drawn, and the next one is not.

    Each with a seed that makes it win as soon as it is kept.
    """
    w = weights(logits, rule)
    order = np.argsort(-logits, kind="stable")
    sums = np.cumsum(w[order])
    top_p = float(sums[n - 1] - 0.5 * w[order[n - 1]]) / float(sums[-1])
    rule = Rule(rule.temperature, top_p, rule.min_p)
    last, following = int(order[n - 1]), int(order[n])
    assert rule.draw(logits, seed_for(last, order[:n], logits, rule)) == last
    seed = seed_for(following, order[: n + 1], logits, rule)
    assert rule.draw(logits, seed) in expected(logits, rule, seed) - {following}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8, 9, 30])
def test_the_edge_of_the_nucleus(n: int, kernels_on: Launches) -> None:
    """Also among equals, which lie in several parts, and between neighbouring floats."""
    logits = normal(6151) - 12
    above = np.nextafter(np.float32(4), np.float32(5))
    logits[[4000, 17]] = above
    logits[[5, 2047, 2048, 2051, 6150]] = 4  # the third to the seventh
    logits[[9, 6000]] = -0.0, 0.0
    check_edge(logits, n, Rule(temperature=2.0))


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_edge_among_thousands_of_equals(sign: int, kernels_on: Launches) -> None:
    logits = np.full(4500, sign * 20, np.float32)
    check_edge(logits, 1300, Rule())


def test_a_tail_of_small_weights_counts(kernels_on: Launches) -> None:
    """Each of the tail is below 2^-19 of the greatest, together they are 3% of it."""
    logits = np.full(20_000, math.log(1.6e-6), np.float32)
    logits[7] = 0
    rule = Rule(top_p=(1 + 0.016) / (1 + 0.032))
    drawn = ((expected(logits, rule, seed), seed) for seed in range(600))
    token, seed = next((tokens.pop(), seed) for tokens, seed in drawn if not tokens & {7})
    assert rule.draw(logits, seed) == token


def test_a_race_is_decided_by_little(kernels_on: Launches) -> None:
    """Of two tokens one wins by 2^-13, the other one by as little if that is taken from it.

    Those that draw the least and the greatest time of 300, and others.
    """
    for seed in range(4):
        t = times(300, seed)
        order = np.argsort(t)
        for rank in (0, 150, 240):
            one, other = int(order[rank]), int(order[299 - rank])
            for winner, share in ((one, 2.0**-13), (other, -(2.0**-13))):
                logits = np.full(300, -INF, np.float32)
                logits[one], logits[other] = 0, math.log(t[other] / t[one]) - share
                assert Rule().draw(logits, seed) == winner


def test_a_wide_temperature_ranks_by_the_logits(kernels_on: Launches) -> None:
    """Weights that are all one do not make the logits equal."""
    logits = normal(300)
    check_edge(logits, 20, Rule(temperature=1e30))


def test_min_p_goes_before_top_p(kernels_on: Launches) -> None:
    """Of the first three tokens the first has 0.53, of all four 0.5."""
    logits = np.log(np.array([0.05, 0.5, 0.3, 0.15], np.float32))
    rule = Rule(top_p=0.515, min_p=0.2)
    rivals = np.array([1, 2])
    seed = seed_for(2, rivals, logits, rule)
    assert rule.draw(logits, seed) == 1
    assert Rule(top_p=0.515).draw(logits, seed) == 2


@pytest.mark.parametrize("rule", [Rule(), Rule(top_p=0.9), Rule(min_p=0.1)], ids=str)
def test_what_is_no_finite_number(rule: Rule, kernels_on: Launches) -> None:
    """NaN counts as -inf and is not drawn unless there is nothing else; infinities win."""
    logits = normal(2100)
    logits[::2] = NAN
    logits[1] = -INF
    for compute in (draw, draw_reference):
        assert {rule.draw(logits, seed, compute) % 2 for seed in range(3)} == {1}
    infinite = logits.copy()
    infinite[[77, 2099]] = INF
    drawn = {rule.draw(infinite, seed) for seed in range(12)}
    assert drawn == {77, 2099}
    for nothing in (np.full(2100, NAN, np.float32), np.full(2100, -INF, np.float32)):
        for compute in (draw, draw_reference):
            assert 0 <= rule.draw(nothing, 1, compute) < 2100
    assert 0 <= cast(int, greedy(mx.array(np.full(2100, NAN, np.float32))).item()) < 2100


@pytest.mark.parametrize(
    "rule",
    [
        *(Rule(temperature=1e-6), Rule(temperature=1e-6, top_p=0.5), Rule(top_p=5e-324)),
        *(Rule(top_p=1e-7, min_p=1e-300), Rule(min_p=1.0), Rule(min_p=1.0, top_p=0.9999)),
    ],
    ids=str,
)
def test_rules_at_their_limits_leave_the_greatest(rule: Rule, kernels_on: Launches) -> None:
    logits = normal(2500)
    logits[2400] = 20
    assert {rule.draw(logits, seed) for seed in range(3)} == {2400}


def test_a_share_of_all_but_nothing_keeps_what_rounding_leaves(kernels_on: Launches) -> None:
    rule = Rule(temperature=50.0, top_p=float(np.nextafter(np.float32(1), np.float32(0))))
    logits = normal(2500)
    for seed in range(3):
        assert {rule.draw(logits, seed)} == expected(logits, Rule(temperature=50.0), seed)


def test_logits_of_any_size(kernels_on: Launches) -> None:
    """Large numbers, and small ones that differ in their last bits only."""
    for scale, offset in ((1e30, 0.0), (1e-30, 0.0), (1e-5, 100.0)):
        logits = (normal(2200) * np.float32(scale) + np.float32(offset)).astype(np.float32)
        rule = Rule(temperature=0.5 * scale, top_p=0.7)
        assert {rule.draw(logits, 1)} == expected(logits, rule, 1)


@pytest.mark.parametrize("order", list(Order))
def test_the_order_of_threads_decides_nothing(order: Order, kernels_on: Launches) -> None:
    logits, rule = normal(4099), Rule(top_p=0.9)
    with emulator.using(order=order):
        for seed in range(2):
            assert {rule.draw(logits, seed)} == expected(logits, rule, seed)


def test_a_seed_gives_the_tokens_of_the_reference(kernels_on: Launches) -> None:
    def tokens() -> list[int]:
        sampler = Sampler(Sampling(temperature=0.8, top_p=0.9, seed=11))
        return [cast(int, sampler(mx.array(normal(3001))).item()) for _ in range(8)]

    found = tokens()
    assert len(set(found)) > 4
    with launch.using(None):
        assert tokens() == found


def broken(**arguments: Any) -> Callable[..., list[mx.array]]:
    """A kernel whose last launch is off by one."""
    kernel = EmulatedKernel(**arguments)
    off = arguments["name"] == "sampling_first"

    def run(**call: Any) -> list[mx.array]:
        return [x + 1 if off else x for x in kernel(**call)]

    return run


def test_the_probe(kernels_on: Launches) -> None:
    assert agrees()
    if kernels_on is not None:
        with launch.using(broken):
            assert not agrees()
