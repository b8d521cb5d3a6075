"""The index against a plain search: which prefixes are stored, and what leads to them."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_engine.diskcache import layout
from mlx_engine.diskcache.index import Anchor, Index
from mlx_engine.diskcache.layout import (
    BLOCK_TOKENS,
    AnchorFile,
    PrefixKeys,
    SegmentId,
    TokenIds,
    Use,
)
from mlx_engine.diskcache.save import RecentKeys
from tests.diskcache.content import tokens

ROOT = bytes(range(32))
# Sequences that leave each other inside a block, at its edge, and at once.
TRUNK = tokens(0, 5000)
SEQUENCES = [
    TRUNK,
    *(tokens(at, 5000 - at, after=TRUNK[:at]) for at in (0, 1, 1500, 2047, 2048, 2049, 4500)),
]
POSITIONS = (2, 1500, 1502, 2046, 2048, 2050, 4096, 4500, 5000)


def key_of(ids: TokenIds, position: int) -> bytes:
    key = ROOT
    for first, last in layout.pieces(0, position):
        key = PrefixKeys(key).after(ids[first:last])
    return key


def anchor_file(index: Index, ids: TokenIds, position: int) -> AnchorFile:
    """An anchor that goes on from the longest way there is."""
    path = index.way(ids, position)
    uses = list(path.uses)
    for first, last in layout.pieces(path.position, position):
        key = key_of(ids, last)
        uses.append(Use(key, last, SegmentId(key, last - first), last - first, last - first))
    parent = path.parent
    return AnchorFile(
        key_of(ids, position),
        position,
        parent.key if parent else b"",
        parent.position if parent else 0,
        0.0,
        1.0,
        tuple(uses),
    )


def is_prefix(ids: TokenIds, of: TokenIds) -> bool:
    return len(ids) <= len(of) and np.array_equal(ids, of[: len(ids)])


@dataclass
class Stored:
    ids: TokenIds
    anchor: Anchor
    uses: list[Use] = field(default_factory=list[Use])


class IndexMachine(RuleBasedStateMachine):
    """Adds and removes anchors, and asks for every prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(ROOT)
        self.stored: dict[bytes, Stored] = {}

    @rule(sequence=st.sampled_from(SEQUENCES), position=st.sampled_from(POSITIONS))
    def add(self, sequence: TokenIds, position: int) -> None:
        if key_of(sequence, position) in self.stored:
            return
        anchor = self.index.add(anchor_file(self.index, sequence, position), 7, 0.0)
        uses = self.index.steps(anchor)
        self.stored[anchor.key] = Stored(sequence[:position], anchor, uses)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        leaves = [each for each in self.stored.values() if not each.anchor.children]
        gone = data.draw(st.sampled_from(leaves))
        segments = set(self.index.segments)
        freed = {segment.id for segment in self.index.remove(gone.anchor)}
        del self.stored[gone.anchor.key]
        assert segments - freed == set(self.index.segments)

    @invariant()
    def finds_what_is_stored(self) -> None:
        for ids in SEQUENCES:
            wanted = sorted(
                len(each.ids) for each in self.stored.values() if is_prefix(each.ids, ids)
            )
            assert [anchor.position for anchor in self.index.find(ids, len(ids))] == wanted
            for last in (1, 1501, 2047, 4999):
                found = self.index.find(ids, last)
                assert [anchor.position for anchor in found] == [p for p in wanted if p <= last]

    @invariant()
    def steps_lead_on_without_gaps(self) -> None:
        used: set[SegmentId] = set()
        for each in self.stored.values():
            steps = self.index.steps(each.anchor)
            assert steps == each.uses
            end = 0
            for use in steps:
                assert use.first == end
                assert use.key == key_of(each.ids, use.end)
                end = use.end
                used.add(use.segment)
            assert end == len(each.ids)
        assert used == set(self.index.segments)

    @invariant()
    def the_way_is_the_longest(self) -> None:
        for ids in SEQUENCES:
            ends = {
                use.end
                for each in self.stored.values()
                for use in each.uses
                if is_prefix(each.ids[: use.end], ids)
            }
            path = self.index.way(ids, len(ids))
            assert path.position == max(ends, default=0)
            assert path.key == (key_of(ids, path.position) if path.position else ROOT)
            steps = (self.index.steps(path.parent) if path.parent else []) + list(path.uses)
            assert sum(use.tokens for use in steps) == path.position

    @invariant()
    def every_byte_belongs_to_someone(self) -> None:
        for segment in self.index.segments.values():
            assert segment.owners
            assert segment.n_bytes == segment.id.tokens
            assert segment in self.index.starting_at(segment.first_key)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@given(st.lists(st.sampled_from(POSITIONS), min_size=2, max_size=6, unique=True))
@settings(max_examples=20, deadline=None)
def test_own_bytes_are_what_removal_frees(positions: list[int]) -> None:
    index = Index(ROOT)
    for number, position in enumerate(positions):
        ids = SEQUENCES[number % len(SEQUENCES)]
        if key_of(ids, position) not in index.anchors:
            index.add(anchor_file(index, ids, position), 7, 0.0)
    while index.anchors:
        anchor = next(a for a in index.anchors.values() if not a.children)
        own_bytes = index.own_bytes(anchor)
        freed = sum(segment.n_bytes for segment in index.remove(anchor))
        assert own_bytes == anchor.file_bytes + 7 + freed
    assert not index.segments
    assert index.find(TRUNK, len(TRUNK)) == []


def test_an_anchor_without_a_tail_is_not_found() -> None:
    index = Index(ROOT)
    low = index.add(anchor_file(index, TRUNK, 1500), 7, 0.0)
    high = index.add(anchor_file(index, TRUNK, 4096), 7, 0.0)
    assert high.below() == 1500
    low.tail_bytes = 0
    assert index.find(TRUNK, 5000) == [high]
    assert high.below() == 0
    assert index.way(TRUNK, 2000).parent is low


def test_what_stands_on_an_anchor_comes_before_it() -> None:
    index = Index(ROOT)
    anchors = [index.add(anchor_file(index, TRUNK, p), 7, 0.0) for p in (1500, 4096, 5000)]
    other = index.add(anchor_file(index, SEQUENCES[3], 5000), 7, 0.0)
    found = index.standing_on([anchors[0]])
    assert set(found) == {*anchors, other}
    assert [a.position for a in found] == sorted((a.position for a in found), reverse=True)


def test_an_anchor_that_does_not_fit_is_refused() -> None:
    index = Index(ROOT)
    file = anchor_file(index, TRUNK, 1500)
    index.add(file, 7, 0.0)
    with pytest.raises(LookupError):
        index.add(file, 7, 0.0)
    longer = anchor_file(index, TRUNK, 4096)
    other = Index(ROOT)
    with pytest.raises(LookupError):
        other.add(longer, 7, 0.0)
    assert not other.segments


def test_ways_start_at_every_joint_of_the_block() -> None:
    index = Index(ROOT)
    for position in (1500, 2046, BLOCK_TOKENS + 10):
        index.add(anchor_file(index, TRUNK, position), 7, 0.0)
    ways, block_key = index.ways(TRUNK, 2000)
    assert [path.position for path in ways] == [0, 1500]
    assert block_key == ROOT
    ways, block_key = index.ways(TRUNK, 3000)
    assert [path.position for path in ways] == [2048, 2058]
    assert block_key == key_of(TRUNK, 2048)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, len(SEQUENCES) - 1), st.integers(0, 5000)), max_size=8))
def test_recent_keys_are_those_of_the_tokens(asked: list[tuple[int, int]]) -> None:
    index, recent = Index(ROOT), RecentKeys()
    for ids in SEQUENCES:
        for position in POSITIONS:
            file = anchor_file(index, ids, position)
            if file.key not in index.anchors:
                index.add(file, 1, 1.0)
    for number, length in asked:
        ids = SEQUENCES[number][:length].copy()
        assert index.find(ids, length, recent.of(ids)) == index.find(ids, length)
        known = recent.of(ids)
        assert all(key == key_of(ids, at) for at, key in known.items() if at <= length)
        ids[:] = 0  # what was asked with may change


def test_what_two_prompts_share_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    index, recent, hashed = Index(ROOT), RecentKeys(), list[int]()
    index.add(anchor_file(index, TRUNK, 4096), 1, 1.0)
    after = PrefixKeys.after

    def counted(keys: PrefixKeys, ids: TokenIds) -> bytes:
        hashed.append(len(ids))
        return after(keys, ids)

    monkeypatch.setattr(PrefixKeys, "after", counted)
    assert [anchor.position for anchor in index.find(TRUNK, 4500, recent.of(TRUNK[:4500]))] == [
        4096
    ]
    assert sum(hashed) == 4096
    for ids in (TRUNK, TRUNK[:4096]):
        assert len(index.find(ids, len(ids), recent.of(ids))) == 1
    assert sum(hashed) == 4096
