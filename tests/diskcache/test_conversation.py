"""An agent's conversation of 40 requests computes hardly more than its new tokens.

Exact retries, an edit, side requests and a restart are among them; bench/conversation.py holds the
same one at an agent's sizes.
"""

import pytest

from tests.conversation import REQUESTS, Outcome, Sizes, converse
from tests.engine.support import build, tiny_config

SIZES = Sizes(head=600, question=40, result=160, answer=8, side=60)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    subject = build(tiny_config(max_position_embeddings=8192), seed=0)
    return converse(
        subject.model,
        subject.reader,
        tmp_path_factory.mktemp("conversation") / "cache",
        SIZES,
        budget_bytes=1 << 30,
    )


def test_hardly_more_than_the_new_tokens_is_computed(outcome: Outcome) -> None:
    for cost in outcome.costs:
        print(cost)
    assert len(outcome.costs) == REQUESTS
    assert outcome.costs[0].computed == outcome.costs[0].new
    assert outcome.computed <= 1.05 * outcome.new


def test_an_exact_retry_costs_next_to_nothing(outcome: Outcome) -> None:
    assert len(outcome.retries()) == 2 and max(outcome.retries()) <= 2


def test_no_anchor_is_dropped(outcome: Outcome) -> None:
    assert len(outcome.caches) == 2
    for cache in outcome.caches:
        assert cache.saved and not (cache.dropped or cache.refused or cache.evicted)
        assert not (cache.faults or cache.damaged)
    assert outcome.sessions[1].restored == 1
