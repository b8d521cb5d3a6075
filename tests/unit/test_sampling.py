"""Sampling: what may be drawn, how often, and that a seed repeats it."""

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from mlx_engine.errors import BadRequest
from mlx_engine.sampling import Sampler, Sampling, score

Array = NDArray[np.float32]

# Few distinct values, so that ties are common.
some_logits = hnp.arrays(
    np.float32, st.integers(1, 40), elements=st.integers(-12, 12).map(lambda n: n / 2)
)
shares = st.floats(0.01, 0.99)
seeds = st.integers(0, 2**63 - 1)


def draw(sampling: Sampling, logits: Array, n: int) -> NDArray[np.int64]:
    sampler = Sampler(sampling)
    values = mx.array(logits)
    return np.array(mx.stack([sampler(values) for _ in range(n)]), np.int64)


def probabilities(logits: Array, temperature: float = 1.0) -> NDArray[np.float64]:
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    return np.exp(scaled) / np.exp(scaled).sum()


def nucleus(probabilities: NDArray[np.float64], top_p: float) -> set[int]:
    """The nucleus in float64; draws whose edge float32 may put elsewhere are left out."""
    order = np.argsort(-probabilities, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(probabilities[order])[:-1]])
    assume(np.abs(before - top_p).min() > 1e-5)
    return set(order[before < top_p].tolist())


def kept(sampling: Sampling, logits: Array) -> set[int]:
    """The tokens that turn up in many draws: all that may, where none is rare."""
    return set(draw(sampling, logits, 150).tolist())


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"top_k": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": -0.5},
        {"top_p": 1.0001},
        {"top_p": math.nan},
        {"min_p": -0.01},
        {"min_p": 1.5},
        {"min_p": math.nan},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_impossible_values_are_refused(values: dict[str, float]):
    ((name, value),) = values.items()
    with pytest.raises(BadRequest, match=rf"^{name} is {value}, it must be"):
        Sampling(**values)  # pyright: ignore[reportArgumentType]


def test_values_at_the_limits_are_taken():
    Sampling(temperature=0.0, top_p=5e-324, min_p=1.0, seed=2**63 - 1)
    Sampling(temperature=1e30, top_p=1.0, min_p=0.0, seed=0)


def test_the_defaults_are_the_vendors():
    recipe = pytest.importorskip("deepseek_recipe")
    for thinking in ("enabled", "disabled"):
        body = {
            "model": "DeepSeek-V4.1-Flash",
            "messages": [{"role": "user", "content": "Hi"}],
            "thinking": {"type": thinking},
        }
        request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
        options = request.inference_options
        assert (options.temperature, options.top_p) == (Sampling().temperature, Sampling().top_p)
        assert (options.seed, Sampling().seed, Sampling().min_p) == (None, None, 0.0)


@settings(deadline=None)
@given(some_logits)
def test_temperature_zero_takes_the_first_of_the_greatest(logits: Array):
    token = Sampler(Sampling(temperature=0))(mx.array(logits))
    assert (token.dtype, token.shape) == (mx.uint32, ())
    assert token.item() == int(np.argmax(logits))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_frequencies_follow_the_probabilities(temperature: float):
    logits = np.array([1.5, 1.0, 0.5, 0.5, 0.0, -0.5], np.float32)
    n = 3000
    drawn = draw(Sampling(temperature=temperature, seed=7), logits, n)
    expected = n * probabilities(logits, temperature)
    counts = np.bincount(drawn, minlength=len(logits))
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: one fair sampler in a thousand passes it


def test_frequencies_inside_the_nucleus_are_renormalised():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    n = 3000
    counts = np.bincount(draw(Sampling(top_p=0.65, seed=3), logits, n), minlength=4)
    expected = n * np.array([4 / 7, 3 / 7])
    assert counts[2:].tolist() == [0, 0]
    assert ((counts[:2] - expected) ** 2 / expected).sum() < 10.8  # 1 degree: one in a thousand


@settings(deadline=None, max_examples=40)
@given(some_logits, shares, seeds)
def test_top_p_draws_all_of_the_nucleus_and_nothing_else(logits: Array, top_p: float, seed: int):
    inside = nucleus(probabilities(logits), top_p)
    drawn = set(draw(Sampling(top_p=top_p, seed=seed), logits, 60).tolist())
    assert drawn <= inside
    likely = {i for i in inside if probabilities(logits)[i] > 0.3}
    assert likely <= drawn  # missed with a chance of 0.7 ** 60


@pytest.mark.parametrize("n_kept", range(1, 7))
def test_of_equal_tokens_the_nucleus_takes_the_lowest_ids(n_kept: int):
    logits = np.array([0, 1, 1, 0, 1, 0], np.float32)  # the first three make up 0.731
    order = [1, 2, 4, 0, 3, 5]
    top_p = float(probabilities(logits)[order][:n_kept].sum()) - 0.01
    drawn = set(draw(Sampling(top_p=top_p, seed=n_kept), logits, 300).tolist())
    assert drawn == set(order[:n_kept])


@settings(deadline=None, max_examples=40)
@given(some_logits, shares, seeds)
def test_min_p_draws_only_what_is_near_the_greatest(logits: Array, min_p: float, seed: int):
    share = probabilities(logits) / probabilities(logits).max()
    assume(np.abs(share - min_p).min() > 1e-5)
    drawn = draw(Sampling(min_p=min_p, seed=seed), logits, 60)
    assert (share[drawn] > min_p).all()


def test_min_p_is_taken_after_the_temperature_and_before_top_p():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    # Shares of the greatest are 1, 0.6, 0.3, 0.1, and at temperature 2 their roots.
    assert kept(Sampling(min_p=0.5, seed=1), logits) == {0, 1}
    assert kept(Sampling(temperature=2.0, min_p=0.5, seed=1), logits) == {0, 1, 2}
    # Of the first two, the greater has 0.625; of all four it has 0.5.
    assert kept(Sampling(min_p=0.5, top_p=0.6, seed=1), logits) == {0}
    assert kept(Sampling(top_p=0.6, seed=1), logits) == {0, 1}


def test_a_seed_repeats_and_another_differs():
    logits = np.zeros(50, np.float32)
    first = draw(Sampling(seed=5), logits, 40)
    assert (draw(Sampling(seed=5), logits, 40) == first).all()
    assert (draw(Sampling(seed=6), logits, 40) != first).any()
    assert (draw(Sampling(seed=5 + 2**32), logits, 40) != first).any()
    assert len(set(first.tolist())) > 10, "one key served several steps"


def test_without_a_seed_every_sampler_differs():
    logits = np.zeros(1000, np.float32)
    assert (draw(Sampling(), logits, 8) != draw(Sampling(), logits, 8)).any()


def test_other_random_draws_do_not_disturb_a_seed():
    logits = mx.zeros(50)

    def run(between: Callable[[], object]) -> Array:
        sampler = Sampler(Sampling(seed=5))
        tokens: list[mx.array] = []
        for _ in range(10):
            tokens.append(sampler(logits))
            between()
        return np.array(mx.stack(tokens), np.float32)

    assert (run(lambda: None) == run(lambda: mx.random.normal((3,)))).all()


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-8, 1e-3])
def test_a_temperature_near_zero_leaves_the_greatest(temperature: float):
    logits = np.array([-5e4, 3.0, 3.5, 3.5, -mx.inf], np.float32)
    assert kept(Sampling(temperature=temperature, seed=1), logits) == {2, 3}


def test_a_full_vocabulary():
    logits = np.random.default_rng(0).normal(0, 3, 129_280).astype(np.float32)
    inside = np.zeros(len(logits), bool)
    order = np.argsort(-logits, kind="stable")
    p = probabilities(logits)[order]
    # Wider by what float32 may lose in the sum.
    inside[order[np.cumsum(p) - p < 0.901]] = True
    drawn = draw(Sampling(top_p=0.9, seed=2), logits, 50)
    assert inside[drawn].all()
    assert len(set(drawn.tolist())) > 25


@settings(deadline=None, max_examples=50)
@given(some_logits, st.integers(1, 50))
def test_top_k_draws_the_most_likely_and_of_equals_the_lowest_ids(logits: Array, k: int):
    # So hot that none of them is rare.
    likeliest = np.argsort(-logits, kind="stable")[:k].tolist()
    assume(len(likeliest) <= 15)
    assert kept(Sampling(temperature=100, top_k=k), logits) == set(likeliest)


@settings(deadline=None, max_examples=50)
@given(some_logits, st.integers(1, 8), shares, shares, seeds)
def test_the_other_rules_see_only_what_top_k_keeps(
    logits: Array, k: int, top_p: float, min_p: float, seed: int
):
    masked = np.full_like(logits, -np.inf)
    likeliest = np.argsort(-logits, kind="stable")[:k]
    masked[likeliest] = logits[likeliest]
    found = draw(Sampling(top_p=top_p, min_p=min_p, seed=seed, top_k=k), logits, 20)
    expected = draw(Sampling(top_p=top_p, min_p=min_p, seed=seed), masked, 20)
    np.testing.assert_array_equal(found, expected)


@settings(deadline=None, max_examples=100)
@given(some_logits, st.integers(0, 45), st.data())
def test_a_token_is_scored_by_the_models_own_probabilities(
    logits: Array, n_top: int, data: st.DataObject
):
    token_id = data.draw(st.integers(0, logits.size - 1))
    scored = score(mx.array(logits), token_id, n_top)
    log_probs = np.log(probabilities(logits))
    assert scored.token_id == token_id
    assert scored.logprob == pytest.approx(log_probs[token_id], abs=1e-9)
    order = np.argsort(-logits, kind="stable")[:n_top]
    assert [token for token, _ in scored.top] == order.tolist()
    np.testing.assert_allclose([logprob for _, logprob in scored.top], log_probs[order], atol=1e-9)
