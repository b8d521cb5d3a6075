"""Which things go for room: a plan over things that are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_engine.eviction import Candidate, Holding, held_bytes, plan


def thing(name: str, worth_s: float, *parts: Holding) -> Candidate[str]:
    return Candidate(name, worth_s, frozenset(parts))


def test_what_is_worth_least_a_byte_goes_first() -> None:
    small, large, dear = Holding(1, 1, 10), Holding(2, 2, 100), Holding(3, 3, 10)
    things = [thing("dear", 50, dear), thing("small", 2, small), thing("large", 10, large)]
    held = [small, large, dear]
    assert plan(things, held, 0).victims == plan(things, held, -5).victims == ()
    found = plan(things, held, 1)
    assert (found.victims, found.freed_bytes, found.worth_s) == (("large",), 100, 10)
    found = plan(things, held, 101)
    assert (found.victims, found.freed_bytes, found.worth_s) == (("large", "small"), 110, 12)
    found = plan(things, held, 130)
    assert (len(found.victims), found.freed_bytes, found.missing_bytes) == (3, 120, 10)


def test_what_two_share_goes_with_the_second() -> None:
    ours, theirs = Holding(1, 7, 40), Holding(2, 7, 40)
    state, other = Holding(1, 1, 10), Holding(2, 2, 10)
    held = [ours, theirs, state, other]
    assert held_bytes(held) == 60
    things = [thing("part", 0, ours), thing("one", 1, ours, state), thing("two", 2, theirs, other)]
    found = plan(things, held, 15)
    # Of the second the shared part counts as free once the first has let it go.
    assert found.victims == ("part", "one", "two") and found.freed_bytes == 60
    found = plan(things[1:], held, 10)
    assert found.victims == ("one",) and found.freed_bytes == 10


def test_what_has_gone_with_another_goes_once() -> None:
    state, part = Holding(1, 1, 10), Holding(1, 2, 10)
    held = [state, part]
    found = plan([thing("whole", 1, state, part), thing("part", 9, part)], held, 100)
    assert found.victims == ("whole",)
    assert (found.freed_bytes, found.missing_bytes) == (20, 80)


@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.sets(st.integers(0, 8), min_size=1)), min_size=1, max_size=8
    ),
    st.integers(0, 60),
)
def test_a_plan_is_enough_or_everything(
    owners: list[tuple[float, set[int]]], needed_bytes: int
) -> None:
    things = [
        Candidate(owner, worth_s, frozenset(Holding(owner, item, item) for item in items))
        for owner, (worth_s, items) in enumerate(owners)
    ]
    held = [part for each in things for part in each.holdings]
    found = plan(things, held, needed_bytes)
    left = [part for each in things if each.what not in found.victims for part in each.holdings]
    assert found.freed_bytes == held_bytes(held) - held_bytes(left)
    assert found.missing_bytes == max(needed_bytes - found.freed_bytes, 0)
    assert not found.missing_bytes or not left
    assert found.worth_s == pytest.approx(sum(owners[owner][0] for owner in found.victims))
    if found.victims:
        # Without the last it would not have been enough.
        last = [part for part in things[found.victims[-1]].holdings]
        assert held_bytes(held) - held_bytes([*left, *last]) < needed_bytes
