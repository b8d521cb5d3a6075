"""Two and four ranks over a ring compute what one device computes."""

import numpy as np
import pytest

from tests.devices.rank import CONFIG, Arrays, compute
from tests.engine.support import load

TOLERANCE = {"rounded": 1e-3, "rounded chunks": 1e-3, "unrounded chunks": 5e-5}


@pytest.fixture(scope="module")
def alone() -> Arrays:
    subject = load(CONFIG, 0)
    found = compute(subject)
    subject.close()
    return found


def test_every_rank_has_the_same_bits(ranks: list[Arrays], alone: Arrays) -> None:
    for other in ranks:
        assert other.keys() > alone.keys()
        for name, values in ranks[0].items():
            if not name.startswith("own "):
                np.testing.assert_array_equal(other[name], values, err_msg=name)


@pytest.mark.parametrize("run", TOLERANCE)
def test_choices_and_logits_are_those_of_one_device(
    ranks: list[Arrays], alone: Arrays, run: str
) -> None:
    choices = [name for name in alone if name.startswith((f"{run} experts", f"{run} rows"))]
    assert len(choices) == 6 + 5
    for name in (*choices, f"{run} candidates"):
        np.testing.assert_array_equal(ranks[0][name], alone[name], err_msg=name)
    name = f"{run} logits"
    np.testing.assert_allclose(ranks[0][name], alone[name], rtol=0, atol=TOLERANCE[run])


@pytest.mark.parametrize("prefill", ["short", "full"])
def test_a_prompt_ends_alike(ranks: list[Arrays], alone: Arrays, prefill: str) -> None:
    name = f"{prefill} prefill logits"
    np.testing.assert_allclose(ranks[0][name], alone[name], rtol=0, atol=5e-5)


def test_greedy_tokens_are_those_of_one_device(ranks: list[Arrays], alone: Arrays) -> None:
    np.testing.assert_array_equal(ranks[0]["greedy"], alone["greedy"])
    np.testing.assert_allclose(ranks[0]["greedy logits"], alone["greedy logits"], rtol=0, atol=1e-3)
