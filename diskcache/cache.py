"""DiskCache: the states of token sequences on disk, found by the tokens themselves.

What a caller sees of the package. A fault of the disk is a miss here and one line in the log, never
an error of the caller's work; nothing is written on the caller's thread.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.diskcache import layout, names
from mlx_engine.diskcache.commit import Committer
from mlx_engine.diskcache.files import Files
from mlx_engine.diskcache.layout import Part, Parts, TokenIds
from mlx_engine.diskcache.notice import Notice
from mlx_engine.diskcache.policy import PolicyClock
from mlx_engine.diskcache.reader import Reader, Restored, Unreadable
from mlx_engine.diskcache.records import Records
from mlx_engine.diskcache.save import Pin, RecentKeys, Save
from mlx_engine.diskcache.shelf import Fault, Shelf
from mlx_engine.diskcache.store import START_BYTES, Store
from mlx_engine.diskcache.writer import Job, Writer

__all__ = ["CacheStats", "DiskCache", "Part", "Pin", "Restored", "Save"]

SPACE_BYTES = 64 * 10**9
# An anchor of 1,048,576 tokens and its tail.
QUEUE_BYTES = 1_000_000_000
CLOSE_S = 5.0
# What is queued is waited for so long at most, and for a disk that takes nothing for so long.
DRAIN_S, STALL_S = 60.0, 30.0

_LOCK_WAIT_S = 60.0
_DRAIN_POLL_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What the folder holds and what the process did with it; `notice` says what is wrong."""

    directory: Path
    anchors: int
    stored_tokens: int
    total_bytes: int
    own_bytes: int
    other_models_bytes: int
    foreign_bytes: int
    foreign_names: tuple[str, ...]
    space_bytes: int
    free_floor_bytes: int
    queued_bytes: int
    hits: int
    misses: int
    restored_tokens: int
    saved: int
    saved_bytes: int
    refused: int
    dropped: int
    evicted: int
    evicted_bytes: int
    damaged: int
    faults: int
    notice: str | None


class DiskCache:
    """The states of one model in a folder that it shares with other models and processes."""

    def __init__(
        self,
        store: Store,
        root: bytes,
        parts: Parts,
        clock: PolicyClock,
        queue_bytes: int,
        least_tokens: int,
        tail_bytes: int,
    ) -> None:
        self._store = store
        self._notice = Notice(store, layout.anchor_bytes(parts, least_tokens, tail_bytes))
        self._least_tokens = least_tokens
        self._tail_bytes = layout.TAIL_HEADER_BYTES + tail_bytes
        self._parts = parts
        self._clock = clock
        self._step = layout.step_tokens(parts)
        self._shelf = Shelf(store, names.folder_name(root), root, clock)
        folder = store.directory / self._shelf.folder
        self._reader = Reader(store.files, folder, root, parts)
        self._pins: weakref.WeakSet[Pin] = weakref.WeakSet()
        self._pins_lock = threading.Lock()
        self._recent = RecentKeys()  # used under the shelf's lock
        self._committer = Committer(
            self._shelf, parts, root, self._reader, clock, self._pins_in_use, self._too_large
        )
        self._shelf.load()
        self._records = Records(self._shelf, root, self._committer)
        self._hits = self._misses = self._restored_tokens = self._dropped = 0
        self._writer = Writer(queue_bytes)
        self._put(self._trim)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        fingerprint: bytes,
        parts: tuple[Part, ...],
        space_bytes: int = SPACE_BYTES,
        free_floor_bytes: int | None = None,
        queue_bytes: int = QUEUE_BYTES,
        least_tokens: int = 1,
        tail_bytes: int = 0,
        salt: bytes = b"",
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> "DiskCache":
        """Open a folder, made if it is not there, for states of one model.

        The fingerprint stands for the weights and the numerics, and caches with different salts
        (of two tenants, say) never share what is stored; the folder never grows beyond
        `space_bytes`, nor while the disk has less than `free_floor_bytes` free (5% of the disk or
        10 GB, whichever is less). Anchors lie `least_tokens` apart, and their tails have
        `tail_bytes`: where a prompt passes the limit, the notice says so. Raises CacheUnusable, one
        sentence; the caller says it, or the notice in `stats()`, to the user.
        """
        store = Store.open(directory, files or Files(), space_bytes, free_floor_bytes)
        root = layout.root_key(fingerprint, parts, salt)
        return cls(store, root, parts, PolicyClock(clock), queue_bytes, least_tokens, tail_bytes)

    def lookup(self, token_ids: Any) -> int:
        """The longest stored position whose tokens begin `token_ids` [T], 0 for none."""
        ids = layout.as_token_ids(token_ids)
        with self._shelf.lock:
            found = self._shelf.index.find(ids, len(ids), self._recent.of(ids))
        return found[-1].position if found else 0

    def restore(
        self, token_ids: Any, position: int, into: Sequence[NDArray[np.uint8]]
    ) -> Restored | None:
        """The state at `position`, or at the longest stored one below it that is in order.

        The rows go to where the buffers of `into` start, one a part, each with room for those
        before `position`. They count once this returns, and then only up to the restored position.
        """
        for buffer, part in zip(into, self._parts, strict=True):
            if buffer.nbytes < part.n_bytes(0, position):
                raise ValueError(f"a buffer of {buffer.nbytes} bytes is too small for {position}")
        ids = layout.as_token_ids(token_ids)
        pin = Pin(ids, len(ids))
        self._hold(pin)
        with pin:
            while True:
                with self._shelf.lock:
                    found = self._shelf.index.find(ids, position, pin.keys)
                    steps = self._shelf.index.steps(found[-1]) if found else []
                if not found:
                    self._misses += 1
                    return None
                try:
                    restored = self._reader.read(steps, found[-1].key, ids, into)
                except (MemoryError, RuntimeError) as error:
                    # No memory, or no thread to read with.
                    _log.warning("The disk cache cannot be read now: %s.", error)
                    self._misses += 1
                    return None
                except Unreadable as error:
                    if not self._give_up(found[-1].key, error):
                        self._misses += 1
                        return None
                    continue
                self._hits += 1
                self._restored_tokens += restored.position
                self._shelf.hit(found[-1])
                return restored

    def reject(self, token_ids: Any, position: int) -> None:
        """Give up what was restored at `position`: its content is of no use to the caller.

        Its tail is put aside: `lookup` leads to the next shorter anchor, and the state there can
        be stored again. Nothing happens if no anchor lies there.
        """
        ids = layout.as_token_ids(token_ids)
        with self._shelf.lock:
            found = self._shelf.index.find(ids, position)
            if not found or found[-1].position != position:
                return
            key = found[-1].key
            self._shelf.lose_tail(key)
        self._shelf.report(Fault(names.tail_name(key), "its content was refused"))
        self._put(self._trim)

    def begin(self, token_ids: Any, position: int) -> Save | None:
        """What it takes to store the state at `position`; None if it is stored, or cannot be.

        `position` is a multiple of every part's ratio and at most T; ValueError otherwise.
        """
        ids = layout.as_token_ids(token_ids)[:position].copy()
        if position <= 0 or position % self._step or len(ids) < position:
            raise ValueError(f"no anchor can lie at {position} of {len(ids)} tokens")
        if not self._store.can_write():
            return None
        pin = Pin(ids, position)
        self._hold(pin)
        with self._shelf.lock:
            pin.keys.update(self._recent.of(ids))
            path = self._shelf.index.way(ids, position, pin.keys)
        stored = path.parent if path.position == position and not path.uses else None
        if stored is not None and stored.tail_bytes:
            return None
        ranges = list(layout.pieces(path.position, position))
        rows_bytes = sum(part.n_bytes(path.position, position) for part in self._parts)
        room_bytes = self._store.space_bytes - self._store.foreign_bytes
        if rows_bytes > room_bytes:
            # The tail before stays until the next one is there.
            limit_bytes = START_BYTES + self._store.foreign_bytes + 2 * self._tail_bytes
            self._too_large(ids, 0, limit_bytes)
        if rows_bytes > min(room_bytes, self._writer.room_bytes):
            self._dropped += 1
            return None
        return Save(
            ids, position, ranges, self._parts, lambda: self._writer.room_bytes, self._submit, pin
        )

    def protect(self, token_ids: Any) -> Pin:
        """Keep what is stored of a prompt from eviction, until the context is left."""
        ids = layout.as_token_ids(token_ids).copy()
        pin = Pin(ids, len(ids))
        with self._shelf.lock:
            pin.keys.update(self._recent.of(ids))
            self._shelf.index.find(ids, len(ids), pin.keys)
        self._hold(pin)
        return pin

    def record_put(self, key: bytes, token_ids: Any) -> None:
        """Keep a turn's exact tokens under a key of 32 bytes; the oldest give way."""
        if len(key) != layout.KEY_BYTES:
            raise ValueError(f"a record's key has {layout.KEY_BYTES} bytes, this one {len(key)}")
        ids = layout.as_token_ids(token_ids).copy()
        put_s = self._clock.now()

        def run() -> None:
            self._records.put(key, ids, put_s, self._lock_deadline_s())

        if self._store.can_write() and not self._put(run, ids.nbytes):
            self._drop()

    def records(self) -> list[tuple[bytes, TokenIds]]:
        """The turns on record, oldest first."""
        return self._records.read()

    def stats(self) -> CacheStats:
        """Counts and bytes as they stand."""
        store, written = self._store, self._committer.written
        with self._shelf.lock:
            anchors = [a for a in self._shelf.index.anchors.values() if a.tail_bytes]
            stored_tokens = sum(s.id.tokens for s in self._shelf.index.segments.values())
        sizes = dict(store.sizes)
        own_bytes = sum(list(sizes.get(self._shelf.folder, {}).values()))
        others = [f for f in sizes if f not in ("", self._shelf.folder)]
        return CacheStats(
            directory=store.directory,
            anchors=len(anchors),
            stored_tokens=stored_tokens,
            total_bytes=store.total_bytes,
            own_bytes=own_bytes,
            other_models_bytes=sum(sum(list(sizes[f].values())) for f in others),
            foreign_bytes=store.foreign_bytes,
            foreign_names=tuple(sorted(store.foreign)),
            space_bytes=store.space_bytes,
            free_floor_bytes=store.free_floor_bytes,
            queued_bytes=self._writer.held_bytes,
            hits=self._hits,
            misses=self._misses,
            restored_tokens=self._restored_tokens,
            saved=written.saved,
            saved_bytes=written.saved_bytes,
            refused=written.refused,
            dropped=written.dropped + self._dropped,
            evicted=written.evicted,
            evicted_bytes=written.evicted_bytes,
            damaged=written.damaged + len(self._shelf.faults),
            faults=self._writer.faults,
            notice=self._notice.sentence(),
        )

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is on the disk; False if that takes longer."""
        return self._writer.flush(timeout_s)

    def drain(
        self,
        is_hurried: Callable[[], bool],
        stall_s: float = STALL_S,
        timeout_s: float = DRAIN_S,
    ) -> None:
        """Wait until all that was handed over is on the disk, for `timeout_s` at most.

        Ends as soon as `is_hurried` says so, or when nothing was written for `stall_s`.
        """
        before, since_s = (-1, -1), time.monotonic()
        end_s = since_s + timeout_s
        while not is_hurried() and not self.flush(_DRAIN_POLL_S):
            now, now_s = (self._writer.held_bytes, self._store.written_bytes), time.monotonic()
            if now != before:
                before, since_s = now, now_s
            if now_s - since_s >= stall_s or now_s >= end_s:
                return

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is queued, for at most this long; the rest is dropped and counted."""
        self._put(self._write_hits)
        if self._writer.close(timeout_s):
            self._store.close()

    def _submit(self, save: Save) -> None:
        def run() -> None:
            try:
                self._committer.save(save, self._lock_deadline_s(), self._writer.check_time)
            finally:
                save.pin.release()

        if save.is_dropped or not self._put(run, save.n_bytes):
            save.drop()
            self._drop()

    def _put(self, run: Callable[[], None], n_bytes: int = 0) -> bool:
        return self._writer.put(Job(run, n_bytes, self._drop))

    def _drop(self) -> None:
        self._dropped += 1

    def _trim(self) -> None:
        if self._store.can_write():
            self._committer.trim(self._lock_deadline_s())

    def _write_hits(self) -> None:
        file = self._shelf.hits_file()
        if file is not None and self._store.can_write():
            with self._committer.transaction(self._lock_deadline_s()):
                self._committer.write(names.HITS_NAME, file)

    def _lock_deadline_s(self) -> float:
        return min(time.monotonic() + _LOCK_WAIT_S, self._writer.deadline_s)

    def _give_up(self, key: bytes, error: Unreadable) -> bool:
        """Forget what cannot be read; False if trying another anchor is of no use."""
        if error.is_passing:
            _log.warning("The disk cache cannot be read now: %s.", error)
            return False
        if error.is_absent:
            _log.info("%s of the disk cache has gone since it was found.", error.name)
        else:
            self._shelf.report(Fault(error.name, str(error)))
        if error.use is None:
            self._shelf.lose_tail(key)
        else:
            self._shelf.lose_segment(error.use.segment)
        self._put(self._trim)
        return True

    def _hold(self, pin: Pin) -> None:
        with self._pins_lock:
            self._pins.add(pin)

    def _pins_in_use(self) -> list[Pin]:
        with self._pins_lock:
            return [pin for pin in self._pins if pin.is_held]

    def _too_large(self, ids: TokenIds, position: int, limit_bytes: int) -> None:
        """Tell a limit for the prompt that begins with `ids`; this one is enough to `position`.

        Beside its rows there is room for the heads of as many anchors as may lie there; for a block
        more, which it answers or shares the start of with an anchor that stays whole; and for two
        tails, of that anchor and of one that was of use.
        """
        with self._shelf.lock:
            prompts = [self._recent.ids, *(pin.ids for pin in self._pins_in_use())]
        begun = [len(each) for each in prompts if np.array_equal(each[: len(ids)], ids)]
        tokens = max(begun, default=len(ids))
        last = tokens + layout.BLOCK_TOKENS
        later_bytes = layout.most_bytes(self._parts, position, last, self._least_tokens)
        self._notice.too_large(tokens, limit_bytes + later_bytes + 2 * self._tail_bytes)
