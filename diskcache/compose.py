"""Puts an anchor together: which stored rows it stands on, and the files that it lacks.

Reads the index and, to find what it shares with others, the ids of stored segments. Writes nothing
and makes no room.
"""

from dataclasses import dataclass

import numpy as np

from mlx_engine.diskcache import layout, names
from mlx_engine.diskcache.files import Buffer, is_absent, is_passing
from mlx_engine.diskcache.index import Anchor, Path, Segment
from mlx_engine.diskcache.layout import (
    BLOCK_TOKENS,
    AnchorFile,
    Parts,
    PrefixKeys,
    SegmentId,
    TokenIds,
    Use,
)
from mlx_engine.diskcache.policy import PolicyClock
from mlx_engine.diskcache.reader import Reader
from mlx_engine.diskcache.save import Save
from mlx_engine.diskcache.shelf import Fault, Shelf
from mlx_engine.errors import CacheCorrupt

# A shared piece is read whole at every restore, so a short one is not worth it; it costs less than
# what an anchor of 1,024 tokens may take above its rows and tail.
_SHARED_TOKENS = 64
_SIBLINGS = 64


class RowsGone(Exception):
    """Rows that the caller was told are there have gone since."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An anchor as it will be, and the files that it lacks."""

    file: AnchorFile
    below: int
    carriers: tuple[Anchor, ...]
    writes: list[tuple[str, list[Buffer]]]

    @property
    def n_bytes(self) -> int:
        return sum(memoryview(buffer).nbytes for _, buffers in self.writes for buffer in buffers)


class Composer:
    """Puts anchors of one shelf together."""

    def __init__(
        self, shelf: Shelf, parts: Parts, root: bytes, reader: Reader, clock: PolicyClock
    ) -> None:
        self._shelf = shelf
        self._parts = parts
        self._root = root
        self._reader = reader
        self._clock = clock

    def draft(self, save: Save) -> Draft | None:
        """What to write for an anchor, None if it is there; RowsGone, OSError."""
        ids, position = save.ids, save.position
        with self._shelf.lock:
            paths, block_key = self._shelf.index.ways(ids, position)
        path, shared = paths[-1], None
        stored = path.parent if path.position == position and not path.uses else None
        if stored is not None and stored.tail_bytes:
            return None
        if path.position < position:
            found = self._shared_use(paths, block_key, ids[:position])
            if found is None:
                return self.draft(save)
            path, shared = found
        uses, writes = list(path.uses), list[tuple[str, list[Buffer]]]()
        carriers = path.carriers
        at, key = path.position, path.key
        if shared is not None:
            use, owner = shared
            uses.append(use)
            carriers += (owner,)
            at, key = use.end, use.key
            block_key = key if at % BLOCK_TOKENS == 0 else block_key
        for first, last in layout.pieces(at, position):
            start = first // BLOCK_TOKENS * BLOCK_TOKENS
            last_key = PrefixKeys(block_key).after(ids[start:last])
            rows = next((r for r in save.rows_given if r.first <= first and last <= r.last), None)
            if rows is None:
                raise RowsGone
            segment = SegmentId(last_key, last - first)
            buffers = layout.encode_segment(
                self._root, segment, first, key, ids[first:last], rows.cut(self._parts, first, last)
            )
            n_bytes = layout.segment_file_bytes(self._parts, first, last)
            uses.append(Use(last_key, last, segment, last - first, n_bytes))
            writes.append((segment.name, buffers))
            key = last_key
            block_key = key if last % BLOCK_TOKENS == 0 else block_key
        writes.append(
            (names.tail_name(key), layout.encode_tail(self._root, key, position, save.tail))
        )
        parent = path.parent
        below = 0
        if parent is not None:
            below = parent.position if parent.tail_bytes else parent.below()
            carriers += (parent,)
        file = AnchorFile(
            key,
            position,
            parent.key if parent else b"",
            parent.position if parent else 0,
            self._clock.now(),
            save.saved_s / (position - below),
            tuple(uses),
        )
        if stored is None:
            writes.append((names.anchor_name(key), layout.encode_anchor(self._root, file)))
        return Draft(file, below, carriers, writes)

    def _shared_use(
        self, paths: list[Path], block_key: bytes, ids: TokenIds
    ) -> tuple[Path, tuple[Use, Anchor] | None] | None:
        """The way that leads furthest with the start of one more stored segment, and that segment.

        It may set out from an earlier joint of the block than the furthest one. None if the index
        has changed, since a segment turned out to be damaged.
        """
        furthest = paths[-1]
        best: tuple[Path, Segment] | None = None
        best_end = furthest.position + _SHARED_TOKENS - 1
        with self._shelf.lock:
            candidates = [
                (path, segment)
                for path in paths
                for segment in self._shelf.index.starting_at(path.key)
                if segment.end > best_end
            ]
        is_damaged = False
        for path, segment in candidates[-_SIBLINGS:]:
            try:
                stored_ids = self._reader.read_ids(segment.id)
            except (OSError, CacheCorrupt) as error:
                if isinstance(error, OSError) and is_passing(error):
                    raise
                if not isinstance(error, OSError) or not is_absent(error):
                    self._shelf.report(Fault(segment.id.name, str(error)))
                self._shelf.lose_segment(segment.id)
                is_damaged = True
                continue
            step = layout.step_tokens(self._parts)
            end = path.position + _common(stored_ids, ids[path.position :]) // step * step
            if end > best_end:
                best, best_end = (path, segment), end
        if is_damaged:
            return None
        if best is None:
            return furthest, None
        path, segment = best
        start = path.position // BLOCK_TOKENS * BLOCK_TOKENS
        key = PrefixKeys(block_key).after(ids[start:best_end])
        tokens = best_end - path.position
        use = Use(key, best_end, segment.id, tokens, segment.n_bytes)
        return path, (use, segment.owners[0])


def _common(a: TokenIds, b: TokenIds) -> int:
    """How many tokens two sequences share from the start."""
    count = min(len(a), len(b))
    different = np.flatnonzero(a[:count] != b[:count])
    return int(different[0]) if len(different) else count
