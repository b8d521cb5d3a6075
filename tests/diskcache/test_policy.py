"""Which anchors go first, against the rules one by one."""

import math
import random

import pytest

from mlx_engine.diskcache.index import Anchor, Index
from mlx_engine.diskcache.policy import (
    HALF_LIFE_S,
    PolicyClock,
    Ranking,
    hits_at,
    weight_at,
    with_hit,
    worth,
)
from tests.diskcache.content import tokens
from tests.diskcache.test_index import ROOT, anchor_file

NOW_S = 1.7e9
LINE = tokens(0, 8000)


class Shelf:
    """An index with a ranking, and anchors by a letter."""

    def __init__(self) -> None:
        self.index = Index(ROOT)
        self.names: dict[Anchor, str] = {}
        self.ranking = Ranking(self.index)

    def add(self, name: str, seed: int, position: int, weight: float = 0.0) -> Anchor:
        """An anchor of a sequence; seed 0 is one line that the others leave at token 1,000."""
        ids = LINE if seed == 0 else tokens(seed, 7000, after=LINE[:1000])
        anchor = self.index.add(anchor_file(self.index, ids, position), 1000, weight)
        self.names[anchor] = name
        self.ranking.changed(anchor)
        return anchor

    def remove(self, anchor: Anchor) -> None:
        parent = anchor.parent
        self.index.remove(anchor)
        if parent:
            self.ranking.changed(parent)

    def order(self, need_bytes: int, **options: object) -> str | None:
        """The letters in the order of removal, those that lose only the tail in capitals."""
        plan = self.ranking.plan(need_bytes, **options)  # pyright: ignore[reportArgumentType]
        if plan is None:
            return None
        gone = "".join(self.names[anchor] for anchor in plan.anchors)
        return gone + "".join(self.names[anchor].upper() for anchor in plan.thinned)


def test_uses_decay_and_add_up() -> None:
    weight = weight_at(1.0, NOW_S, NOW_S)
    assert hits_at(weight, NOW_S) == pytest.approx(1.0, rel=1e-6)
    assert hits_at(weight, NOW_S + HALF_LIFE_S) == pytest.approx(0.5, rel=1e-6)
    later = with_hit(weight, NOW_S + HALF_LIFE_S)
    assert hits_at(later, NOW_S + HALF_LIFE_S) == pytest.approx(1.5, rel=1e-6)
    # The order of events does not matter.
    assert with_hit(with_hit(weight, NOW_S), NOW_S + HALF_LIFE_S) == pytest.approx(
        with_hit(with_hit(weight, NOW_S + HALF_LIFE_S), NOW_S)
    )


@pytest.mark.parametrize("counted_s", [-1e18, 0.0, NOW_S, 1e18])
@pytest.mark.parametrize("now_s", [-1e12, 0.0, NOW_S, 1e15])
def test_no_time_breaks_a_weight(counted_s: float, now_s: float) -> None:
    weight = weight_at(3.0, counted_s, now_s)
    assert math.isfinite(weight)
    assert math.isfinite(with_hit(weight, now_s))
    assert math.isfinite(worth(weight, 1.0, 1000))
    assert 0 <= hits_at(weight, now_s) <= 3.0 * (1 + 1e-6)


def test_the_clock_never_runs_backwards() -> None:
    times = iter([10.0, 12.0, 5.0, 11.0, 13.0])
    clock = PolicyClock(lambda: next(times))
    assert [clock.now() for _ in range(4)] == [12.0, 12.0, 12.0, 13.0]


def test_the_least_worth_goes_first() -> None:
    shelf = Shelf()
    old = weight_at(1.0, NOW_S - HALF_LIFE_S, NOW_S)
    new = weight_at(1.0, NOW_S, NOW_S)
    shelf.add("a", 1, 3000, new)
    shelf.add("b", 2, 3000, old)
    shelf.add("c", 3, 3000, with_hit(old, NOW_S))
    assert shelf.order(9000) == "bac"
    assert shelf.order(1) == "b"
    assert shelf.order(10**9) is None
    # To plan is not to remove.
    assert shelf.order(9000) == "bac"


def test_long_sessions_are_worth_more_only_by_what_they_add() -> None:
    shelf = Shelf()
    shelf.add("a", 1, 7000)
    shelf.add("b", 2, 2000)
    shelf.add("c", 2, 2100)
    # 100 tokens and a tail of 1,000 bytes, against 2,000 tokens and more with one tail.
    assert shelf.order(1) == "c"
    assert shelf.order(4000) == "cb"


def test_nothing_goes_before_what_stands_on_it() -> None:
    rng = random.Random(0)
    shelf = Shelf()
    for seed in range(6):
        for position in sorted(rng.sample(range(1002, 7000, 2), 6)):
            shelf.add(".", seed, position, rng.uniform(0, 20))
    total = sum(map(shelf.index.own_bytes, shelf.index.anchors.values()))
    for need in (1, total // 3, total // 2):
        plan = shelf.ranking.plan(need)
        assert plan is not None
        seen: set[Anchor] = set()
        for anchor in plan.anchors:
            assert seen.issuperset(anchor.children)
            seen.add(anchor)
        assert plan.n_bytes >= need
        freed = 0
        for anchor in plan.anchors:
            file_bytes = anchor.file_bytes + anchor.tail_bytes
            freed += file_bytes + sum(each.n_bytes for each in shelf.index.remove(anchor))
            if anchor.parent:
                shelf.ranking.changed(anchor.parent)
        assert freed == plan.n_bytes


def test_the_parent_goes_next_if_it_is_worth_the_least() -> None:
    shelf = Shelf()
    shelf.add("a", 0, 1002, 0.0)
    shelf.add("b", 0, 5000, 1.0)
    shelf.add("c", 1, 5000, 30.0)
    assert shelf.order(7000) == "ba"


def test_what_is_kept_stays_with_all_that_it_stands_on() -> None:
    shelf = Shelf()
    shelf.add("a", 0, 1000)
    b = shelf.add("b", 0, 3000)
    shelf.add("c", 1, 3000, 50.0)
    assert shelf.order(1, kept={b}, cores={b}) == "c"
    assert shelf.order(3700, kept={b}, cores={b}) == "cA"
    assert shelf.order(10_000, kept={b}, cores={b}) is None


def test_tails_in_the_middle_go_last_and_never_the_core_or_the_used() -> None:
    shelf = Shelf()
    a = shelf.add("a", 0, 1000, weight=9.0)
    shelf.add("b", 0, 3000)
    shelf.add("c", 0, 3100)
    d = shelf.add("d", 0, 5000)
    assert shelf.order(1, kept={d}, cores={d}) == "C"
    assert shelf.order(2000, kept={d}, cores={d}) == "CB"
    assert shelf.order(3000, kept={d}, cores={d}, weight=8.0) is None
    assert shelf.order(3000, kept={d}, cores={d, a}) is None
    assert shelf.order(3000, kept={d}, cores={d}) == "CBA"


def test_nothing_is_planned_that_is_worth_more_than_the_new() -> None:
    shelf = Shelf()
    a, b = shelf.add("a", 1, 3000, 1.0), shelf.add("b", 2, 3000, 2.0)
    low, high = shelf.ranking.worth(a), shelf.ranking.worth(b)
    assert low < high
    assert shelf.order(2000, at_most=low) == "a"
    assert shelf.order(5000, at_most=low) is None
    assert shelf.order(5000, at_most=high) == "ab"
    assert shelf.order(1, at_most=low - 0.1) is None


def test_an_anchor_without_a_tail_is_worth_nothing() -> None:
    shelf = Shelf()
    shelf.add("a", 1, 3000, 1.0)
    bare = shelf.add("b", 2, 3000, 50.0)
    bare.tail_bytes = 0
    shelf.ranking.changed(bare)
    assert shelf.order(1) == "b"


def test_a_change_takes_effect() -> None:
    shelf = Shelf()
    a, b = shelf.add("a", 1, 3000, 1.0), shelf.add("b", 2, 3000, 2.0)
    assert shelf.order(1) == "a"
    a.weight = 3.0
    shelf.ranking.changed(a)
    assert shelf.order(1) == "b"
    shelf.remove(b)
    assert shelf.order(1) == "a"
    shelf.remove(a)
    assert shelf.order(1) is None


def test_a_plan_costs_what_it_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    for seed in range(1, 120):
        shelf.add(".", seed, 1100 + 2 * seed, seed / 10)
    asked = 0
    measure = Ranking.worth

    def counting(self: Ranking, anchor: Anchor) -> float:
        nonlocal asked
        asked += 1
        return measure(self, anchor)

    monkeypatch.setattr(Ranking, "worth", counting)
    plan = shelf.ranking.plan(4000)
    assert plan is not None
    assert asked <= 4 * len(plan.anchors)
