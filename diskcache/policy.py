"""What an anchor is worth and which ones go first. Touches no file.

An anchor's worth is (how often it was of use, decayed) x (seconds it saves) / (bytes that only it
needs), where without it one would go on from the nearest anchor below. That it was stored counts as
the first use, so a long session that nobody continues gives way in the end. Since all uses decay
alike, the order of two anchors changes only with an event, never with time alone: worth is kept as
a logarithm, a heap is kept in order at the events, and a plan costs as much as what it removes.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from mlx_engine.diskcache.index import Anchor, Index

HALF_LIFE_S = 24 * 3600.0


class PolicyClock:
    """The time of uses, which never runs backwards, whatever the system's clock does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latest_s = clock()

    def now(self) -> float:
        """Seconds since the epoch, at least what was said before."""
        self._latest_s = max(self._latest_s, self._clock())
        return self._latest_s


def weight_at(hits: float, counted_s: float, now_s: float) -> float:
    """The logarithm of `hits` uses at a time; one that lies in the future is taken for now."""
    return min(counted_s, now_s) / HALF_LIFE_S + math.log2(max(hits, 1e-9))


def hits_at(weight: float, now_s: float) -> float:
    """The uses that are left of a weight at a time."""
    return 2.0 ** min(weight - now_s / HALF_LIFE_S, 64.0)


def with_hit(weight: float, now_s: float) -> float:
    """A weight after one more use."""
    high, low = sorted((weight, now_s / HALF_LIFE_S), reverse=True)
    return high + math.log2(1.0 + 2.0 ** (low - high))


def worth(weight: float, saved_s: float, own_bytes: int) -> float:
    """The logarithm of an anchor's worth."""
    return weight + math.log2(max(saved_s, 1e-9) / own_bytes)


@dataclass(slots=True)
class Plan:
    """What to remove, in this order, each anchor before what it stands on.

    Of the anchors in `thinned` only the tail goes: others stand on them.
    """

    anchors: list[Anchor] = field(default_factory=list[Anchor])
    thinned: list[Anchor] = field(default_factory=list[Anchor])
    n_bytes: int = 0


class Ranking:
    """The anchors of an index that nothing stands on, by worth."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Anchor]] = []
        self._rebuild()

    def worth(self, anchor: Anchor) -> float:
        """The logarithm of what a stored anchor is worth; one without a tail is worth nothing."""
        if not anchor.tail_bytes:
            return -math.inf
        saved_s = anchor.token_s * (anchor.position - anchor.below())
        return worth(anchor.weight, saved_s, self._index.own_bytes(anchor))

    def changed(self, anchor: Anchor) -> None:
        """Put an anchor where it belongs after it was added, used, or lost what stood on it."""
        if anchor.children or self._index.anchors.get(anchor.key) is not anchor:
            return
        self._push(anchor)
        if len(self._heap) > 2 * len(self._index.anchors) + 64:
            self._rebuild()

    def plan(
        self,
        need_bytes: int,
        *,
        kept: AbstractSet[Anchor] = frozenset(),
        cores: AbstractSet[Anchor] = frozenset(),
        at_most: float = math.inf,
        weight: float = math.inf,
    ) -> Plan | None:
        """What to remove for `need_bytes`, worth `at_most` as much; None if that is not there.

        The least worth of those that nothing stands on goes first, then perhaps what it stood on.
        Where nothing is left but what `kept` names and what that stands on, tails of the latter
        go, except those of `cores` and those with more uses than `weight`: in a session that goes
        on, the newest anchor takes the place of the middle ones, whose tails are cheap to keep by
        the second but seldom asked for.
        """
        plan = self._plan(need_bytes, kept, cores, at_most, weight)
        return plan if plan.n_bytes >= need_bytes else None

    def evictable_bytes(
        self,
        need_bytes: int,
        *,
        kept: AbstractSet[Anchor],
        cores: AbstractSet[Anchor],
        weight: float,
    ) -> int:
        """What a plan could free that nothing is worth too much for, as far as it is needed."""
        return self._plan(need_bytes, kept, cores, math.inf, weight).n_bytes

    def _plan(
        self,
        need_bytes: int,
        kept: AbstractSet[Anchor],
        cores: AbstractSet[Anchor],
        at_most: float,
        weight: float,
    ) -> Plan:
        plan = Plan()
        gone: set[Anchor] = set()
        aside: list[tuple[float, int, Anchor]] = []
        fits = True
        while fits and plan.n_bytes < need_bytes and self._heap:
            entry = heapq.heappop(self._heap)
            value, _, anchor = entry
            if not self._is_current(value, anchor, gone):
                continue
            aside.append(entry)
            if anchor in kept:
                continue
            fits = value <= at_most
            if fits:
                gone.add(anchor)
                plan.anchors.append(anchor)
                plan.n_bytes += self._freed(anchor, gone)
                parent = anchor.parent
                if parent is not None and gone.issuperset(parent.children):
                    self._push(parent)
        if fits and plan.n_bytes < need_bytes:
            self._thin(plan, need_bytes, gone, cores, weight)
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return plan

    def _thin(
        self,
        plan: Plan,
        need_bytes: int,
        gone: set[Anchor],
        cores: AbstractSet[Anchor],
        weight: float,
    ) -> None:
        candidates = [
            (self.worth(anchor), anchor.position, anchor)
            for anchor in self._index.anchors.values()
            if anchor.children and anchor.tail_bytes and anchor.weight <= weight
            if anchor not in gone and anchor not in cores
        ]
        for _, _, anchor in sorted(candidates, key=lambda entry: entry[:2]):
            if plan.n_bytes >= need_bytes:
                return
            plan.thinned.append(anchor)
            plan.n_bytes += anchor.tail_bytes

    def _is_current(self, value: float, anchor: Anchor, gone: set[Anchor]) -> bool:
        """Whether an entry says what is; one whose anchor has changed is put where it belongs."""
        if self._index.anchors.get(anchor.key) is not anchor or anchor in gone:
            return False
        if not gone.issuperset(anchor.children):
            return False
        now = self.worth(anchor)
        if now != value:
            self._push(anchor)
        return now == value

    def _freed(self, anchor: Anchor, gone: set[Anchor]) -> int:
        """Bytes that go with an anchor once all of `gone` are gone."""
        segments = {self._index.segments[use.segment] for use in anchor.uses}
        alone = sum(s.n_bytes for s in segments if gone.issuperset(s.owners))
        return anchor.file_bytes + anchor.tail_bytes + alone

    def _push(self, anchor: Anchor) -> None:
        heapq.heappush(self._heap, (self.worth(anchor), next(self._order), anchor))

    def _rebuild(self) -> None:
        leaves = [anchor for anchor in self._index.anchors.values() if not anchor.children]
        self._heap = [(self.worth(anchor), next(self._order), anchor) for anchor in leaves]
        heapq.heapify(self._heap)
