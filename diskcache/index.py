"""What is stored under one root key, in memory: which positions of which token sequences.

Owns the tree of anchors, which segments they stand on, and the way from tokens to them. Reads no
file, keeps no token and weighs nothing. Its caller holds a lock: it is not safe among threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from mlx_engine.diskcache.layout import (
    BLOCK_TOKENS,
    AnchorFile,
    PrefixKeys,
    SegmentId,
    TokenIds,
    Use,
    anchor_file_bytes,
)

_V = TypeVar("_V")


@dataclass(eq=False, slots=True)
class Segment:
    """A stored segment and the anchors whose own steps use it."""

    id: SegmentId
    first: int
    first_key: bytes
    n_bytes: int
    owners: list["Anchor"] = field(default_factory=list["Anchor"])

    @property
    def end(self) -> int:
        return self.first + self.id.tokens


@dataclass(eq=False, slots=True)
class Anchor:
    """A stored position; without a tail it only carries the anchors that stand on it.

    `weight` is the policy's. `block_key` is the key of the start of the block that the next token
    falls into.
    """

    key: bytes
    position: int
    parent: "Anchor | None"
    uses: tuple[Use, ...]
    block_key: bytes
    token_s: float
    created_s: float
    weight: float
    tail_bytes: int = 0
    children: list["Anchor"] = field(default_factory=list["Anchor"])

    @property
    def file_bytes(self) -> int:
        return anchor_file_bytes(len(self.uses))

    def below(self) -> int:
        """The position of the nearest anchor with a tail that this one stands on, 0 for none."""
        anchor = self.parent
        while anchor is not None and not anchor.tail_bytes:
            anchor = anchor.parent
        return anchor.position if anchor else 0


@dataclass(frozen=True, slots=True)
class Path:
    """The way to a position: an anchor and the steps from there. `carriers` hold it in place."""

    position: int
    key: bytes
    parent: Anchor | None
    uses: tuple[Use, ...]
    carriers: tuple[Anchor, ...]


class Index:
    """The anchors under one root key."""

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.anchors: dict[bytes, Anchor] = {}
        self.segments: dict[SegmentId, Segment] = {}
        # A joint is where a step of a path ends; others can go on from there.
        self._joints: dict[bytes, list[Anchor]] = {}
        # How many steps end at each offset of the block whose start has the key.
        self._offsets: dict[bytes, dict[int, int]] = {}
        self._starts: dict[bytes, list[Segment]] = {}

    def add(self, file: AnchorFile, tail_bytes: int, weight: float) -> Anchor:
        """Take up an anchor whose parent is here; LookupError if it is not, or does not fit."""
        parent = None
        if file.parent_key:
            parent = self.anchors[file.parent_key]
            if parent.position != file.parent_position:
                raise LookupError("the parent has another position")
        if file.key in self.anchors:
            raise LookupError("the anchor is here already")
        anchor = Anchor(
            file.key,
            file.position,
            parent,
            file.uses,
            self.root,
            file.token_s,
            file.created_s,
            weight,
            tail_bytes,
        )
        key, block_key = (parent.key, parent.block_key) if parent else (self.root, self.root)
        # A start takes up tens of thousands of steps here.
        segments, joints, offsets_of = self.segments, self._joints, self._offsets
        for use_key, end, segment_id, tokens, segment_bytes in file.uses:
            segment = segments.get(segment_id)
            if segment is None:
                segment = Segment(segment_id, end - tokens, key, segment_bytes)
                segments[segment_id] = segment
                self._starts.setdefault(key, []).append(segment)
            segment.owners.append(anchor)
            joints.setdefault(use_key, []).append(anchor)
            offsets = offsets_of.get(block_key)
            if offsets is None:
                offsets = offsets_of[block_key] = {}
            offset = _offset(end)
            offsets[offset] = offsets.get(offset, 0) + 1
            if offset == BLOCK_TOKENS:
                block_key = use_key
            key = use_key
        anchor.block_key = block_key
        self.anchors[file.key] = anchor
        if parent:
            parent.children.append(anchor)
        return anchor

    def remove(self, anchor: Anchor) -> list[Segment]:
        """Forget an anchor that nothing stands on; returns the segments that nobody uses now."""
        assert not anchor.children
        del self.anchors[anchor.key]
        if anchor.parent:
            anchor.parent.children.remove(anchor)
        block_key = anchor.parent.block_key if anchor.parent else self.root
        freed: list[Segment] = []
        for use in anchor.uses:
            _remove_from(self._joints, use.key, anchor)
            offset = _offset(use.end)
            offsets = self._offsets[block_key]
            offsets[offset] -= 1
            if not offsets[offset]:
                del offsets[offset]
                if not offsets:
                    del self._offsets[block_key]
            if offset == BLOCK_TOKENS:
                block_key = use.key
            segment = self.segments[use.segment]
            segment.owners.remove(anchor)
            if not segment.owners:
                del self.segments[segment.id]
                _remove_from(self._starts, segment.first_key, segment)
                freed.append(segment)
        return freed

    def find(self, ids: TokenIds, last: int, keys: dict[int, bytes] | None = None) -> list[Anchor]:
        """The anchors with a tail at prefixes of ids[:last], ascending.

        `keys` are those of positions of `ids` that are known; new ones are added.
        """
        found = (self.anchors.get(key) for _, key, _ in self._walk(ids, last, keys))
        return [anchor for anchor in found if anchor and anchor.tail_bytes]

    def way(self, ids: TokenIds, last: int, keys: dict[int, bytes] | None = None) -> Path:
        """The way to the longest prefix of ids[:last] whose rows are here; `keys` as in `find`."""
        joints, _ = self._last_joints(ids, last, keys)
        return self._path(*joints[-1])

    def ways(self, ids: TokenIds, last: int) -> tuple[list[Path], bytes]:
        """The ways to all joints of the block that the longest prefix ends in, ascending.

        The block is the one that the next token falls into; also the key of its start.
        """
        joints, block_key = self._last_joints(ids, last)
        return [self._path(*joint) for joint in joints], block_key

    def starting_at(self, key: bytes) -> list[Segment]:
        """The segments whose first token stands at the position with this key, oldest first."""
        return self._starts.get(key, [])

    def steps(self, anchor: Anchor) -> list[Use]:
        """The whole way to an anchor, from position 0."""
        parts: list[tuple[Use, ...]] = []
        at: Anchor | None = anchor
        while at is not None:
            parts.append(at.uses)
            at = at.parent
        return [use for uses in reversed(parts) for use in uses]

    def own_bytes(self, anchor: Anchor) -> int:
        """Bytes of what goes with an anchor and is of use to no other."""
        alone = sum(
            segment.n_bytes
            for segment in {self.segments[use.segment] for use in anchor.uses}
            if all(owner is anchor for owner in segment.owners)
        )
        return anchor.file_bytes + anchor.tail_bytes + alone

    def standing_on(self, anchors: list[Anchor]) -> list[Anchor]:
        """These anchors and all that stand on them, each before what it stands on."""
        seen: dict[bytes, Anchor] = {}
        waiting = list(anchors)
        while waiting:
            anchor = waiting.pop()
            if anchor.key not in seen:
                seen[anchor.key] = anchor
                waiting.extend(anchor.children)
        return sorted(seen.values(), key=lambda anchor: -anchor.position)

    def _last_joints(
        self, ids: TokenIds, last: int, keys: dict[int, bytes] | None = None
    ) -> tuple[list[tuple[int, bytes]], bytes]:
        joints, block_key = [(0, self.root)], self.root
        for position, key, next_key in self._walk(ids, last, keys):
            if next_key != block_key:
                joints, block_key = [], next_key
            joints.append((position, key))
        return joints, block_key

    def _path(self, position: int, key: bytes) -> Path:
        if not position:
            return Path(0, key, None, (), ())
        anchor = self.anchors.get(key)
        if anchor is not None:
            return Path(position, key, anchor, (), (anchor,))
        owner = self._joints[key][0]
        count = next(i for i, use in enumerate(owner.uses) if use.key == key) + 1
        return Path(position, key, owner.parent, owner.uses[:count], (owner,))

    def _walk(
        self, ids: TokenIds, last: int, known: dict[int, bytes] | None = None
    ) -> Iterator[tuple[int, bytes, bytes]]:
        """Joints at prefixes of ids[:last], ascending: position, key, key of the next block."""
        last = min(last, len(ids))
        known = {} if known is None else known
        block_key, start = self.root, 0
        while offsets := self._offsets.get(block_key):
            keys, done, next_key = PrefixKeys(block_key), 0, b""
            for offset in sorted(offsets):
                if start + offset > last:
                    return
                key = known.get(start + offset, b"")
                if not key:
                    key = known[start + offset] = keys.after(ids[start + done : start + offset])
                    done = offset
                if key in self._joints:
                    next_key = key if offset == BLOCK_TOKENS else b""
                    yield start + offset, key, next_key or block_key
            if not next_key:
                return
            block_key, start = next_key, start + BLOCK_TOKENS


def _offset(end: int) -> int:
    """How far into its block a position lies, the block's end counted to the block."""
    return (end - 1) % BLOCK_TOKENS + 1


def _remove_from(lists: dict[bytes, list[_V]], key: bytes, value: _V) -> None:
    lists[key].remove(value)
    if not lists[key]:
        del lists[key]
