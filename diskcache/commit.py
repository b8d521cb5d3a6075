"""Changes of the folder: an anchor is written, room is made for it, the folder is tidied.

Each is one transaction under the store's lock, on the writer's thread. The order on the disk:
nothing is written before there is room for all of it, what is evicted is gone for good before its
space is used again, and an anchor's file comes after all that it names.
"""

import contextlib
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass

from mlx_engine.diskcache import names
from mlx_engine.diskcache.compose import Composer, Draft, RowsGone
from mlx_engine.diskcache.files import Buffer
from mlx_engine.diskcache.index import Anchor
from mlx_engine.diskcache.layout import Parts, TokenIds
from mlx_engine.diskcache.names import Object
from mlx_engine.diskcache.policy import Plan, PolicyClock, weight_at, worth
from mlx_engine.diskcache.reader import Reader
from mlx_engine.diskcache.save import Pin, Save
from mlx_engine.diskcache.shelf import Shelf
from mlx_engine.diskcache.store import News, Store


@dataclass(slots=True)
class Written:
    """What the transactions did so far."""

    saved: int = 0
    saved_bytes: int = 0
    refused: int = 0
    dropped: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    damaged: int = 0


class Committer:
    """Writes to one shelf of a store and makes room in all of it."""

    def __init__(
        self,
        shelf: Shelf,
        parts: Parts,
        root: bytes,
        reader: Reader,
        clock: PolicyClock,
        pins: Callable[[], list[Pin]],
        on_too_large: Callable[[TokenIds, int, int], None],
    ) -> None:
        self.written = Written()
        self._composer = Composer(shelf, parts, root, reader, clock)
        self._shelf = shelf
        self._store: Store = shelf.store
        self._clock = clock
        self._pins = pins
        self._on_too_large = on_too_large
        self._others: dict[str, Shelf] = {}
        self._is_announced = False
        # Whether files that nobody was sure of may stand on an anchor that was written.
        self._has_new_parents = False

    @contextlib.contextmanager
    def transaction(self, deadline_s: float) -> Generator[None]:
        """Hold the store's lock, with the index up to date and the folder tidy."""
        with self._store.locked(deadline_s) as is_changed:
            self._is_announced = False
            news = News([], [])
            if is_changed:
                self._others.clear()
                news = self._store.news.get(self._shelf.folder, news)
            if is_changed or self._has_new_parents or self._shelf.is_readable_again():
                self._has_new_parents = False
                self._shelf.refresh(news)
            self._tidy()
            yield

    def trim(self, deadline_s: float) -> None:
        """Tidy the folder, and bring it within its limits if what is ours can do that."""
        with self.transaction(deadline_s):
            self.make_room(0)

    def save(self, save: Save, deadline_s: float, check_time: Callable[[], None]) -> None:
        """Write an anchor, unless it is there, or is not worth what would have to go for it."""
        with self.transaction(deadline_s):
            try:
                draft = self._composer.draft(save)
            except RowsGone:
                self.written.dropped += 1
                return
            if draft is None:
                return
            weight = weight_at(1.0, draft.file.created_s, self._clock.now())
            if not self.make_room(draft.n_bytes, draft, weight):
                self.written.refused += 1
                limit_bytes = self._limit_bytes(draft, weight)
                if limit_bytes > self._store.space_bytes:
                    self._on_too_large(save.ids, save.position, limit_bytes)
                return
            self._write(draft, check_time)
            self._take_up(draft, weight)
            self.written.saved += 1
            self.written.saved_bytes += draft.n_bytes

    def write(self, name: str, buffers: list[Buffer]) -> bool:
        """Write one small file within a transaction; False if no room can be made for it."""
        if not self.make_room(sum(memoryview(buffer).nbytes for buffer in buffers)):
            return False
        self._announce()
        self._store.make_folder(self._shelf.folder)
        self._store.write(self._shelf.folder, name, buffers)
        self._store.sync(self._shelf.folder)
        return True

    def remove(self, gone: list[str]) -> None:
        """Remove files within a transaction."""
        self._announce()
        self._shelf.delete(gone)
        self._store.sync(self._shelf.folder)

    def _write(self, draft: Draft, check_time: Callable[[], None]) -> None:
        folder = self._shelf.folder
        self._announce()
        self._store.make_folder(folder)
        done: list[str] = []
        try:
            for name, buffers in draft.writes:
                check_time()
                self._store.write(folder, name, buffers)
                done.append(name)
            # All names at once: an anchor whose other files were lost with the power is no anchor.
            self._store.sync(folder)
        except OSError:
            # The anchor's file first: without the others it says what is not so.
            self._shelf.delete(reversed(done))
            raise
        except BaseException:
            self._shelf.left_over.update(done)
            raise

    def _take_up(self, draft: Draft, weight: float) -> None:
        tail_bytes = self._shelf.sizes[names.tail_name(draft.file.key)]
        with self._shelf.lock:
            anchor = self._shelf.index.anchors.get(draft.file.key)
            if anchor is None:
                anchor = self._shelf.index.add(draft.file, tail_bytes, weight)
            anchor.tail_bytes = tail_bytes
            anchor.weight = weight
            self._shelf.ranking.changed(anchor)
            self._has_new_parents = bool(self._shelf.unsure)

    def make_room(
        self, n_bytes: int, draft: Draft | None = None, weight: float = float("inf")
    ) -> bool:
        """Evict until `n_bytes` more may be written; False, and nothing is gone, if that cannot be.

        First what was put aside or is perhaps of no use, then other root keys' anchors, then ours
        that are worth less.
        """
        missing = self._store.missing_bytes(n_bytes)
        if not missing:
            return True
        own = self._shelf.folder
        others = [folder for folder in self._store.sizes if folder not in ("", own)]
        sizes = self._shelf.sizes
        useless = [name for name in sizes if names.is_damaged(name)]
        if not self._shelf.unread:
            useless += [name for name in self._shelf.unsure if name in sizes]
        free = sum(sizes[name] for name in useless)
        free += sum(sum(self._store.sizes[folder].values()) for folder in others)
        plan = None
        if missing > free:
            plan = self._plan(missing - free, n_bytes, draft, weight)
            if plan is None and self._shelf.unread:
                # What an anchor stands on that can never be read must not hold its place for good.
                useless += [name for name in self._shelf.unsure if name in sizes]
                free += sum(sizes[name] for name in self._shelf.unsure if name in sizes)
                plan = self._plan(missing - free, n_bytes, draft, weight)
            if plan is None:
                return False
        self._announce()
        self._shelf.delete(useless)
        for folder in others:
            still = self._store.missing_bytes(n_bytes)
            if still:
                evict(self._other(folder), still)
                self._store.sync(folder)
        if plan is not None:
            self.written.evicted += len(plan.anchors) + len(plan.thinned)
            self.written.evicted_bytes += plan.n_bytes
            self._shelf.delete(self._shelf.detach(plan))
        if own in self._store.sizes:
            self._store.sync(own)
        return not self._store.missing_bytes(n_bytes)

    def _plan(self, missing: int, n_bytes: int, draft: Draft | None, weight: float) -> Plan | None:
        at_most = math.inf
        if draft is not None:
            seconds = draft.file.token_s * (draft.file.position - draft.below)
            at_most = worth(weight, seconds, n_bytes)
        with self._shelf.lock:
            kept, cores = self._in_use(draft)
            return self._shelf.ranking.plan(
                missing, kept=kept, cores=cores, at_most=at_most, weight=weight
            )

    def _limit_bytes(self, draft: Draft, weight: float) -> int:
        """A limit under which there is room for an anchor; the smallest, if it is above ours."""
        own = self._shelf.sizes
        useless = [name for name in own if names.is_damaged(name) or name in self._shelf.unsure]
        others = [files for name, files in self._store.sizes.items() if name and files is not own]
        needed = self._store.total_bytes + draft.n_bytes - sum(own[name] for name in useless)
        needed -= sum(sum(files.values()) for files in others)
        with self._shelf.lock:
            kept, cores = self._in_use(draft)
            return needed - self._shelf.ranking.evictable_bytes(
                needed - self._store.space_bytes, kept=kept, cores=cores, weight=weight
            )

    def _in_use(self, draft: Draft | None) -> tuple[set[Anchor], set[Anchor]]:
        """Anchors that are kept for prompts in use and for a draft; and those with their tails."""
        index = self._shelf.index
        kept: set[Anchor] = set(draft.carriers) if draft else set()
        cores: set[Anchor] = set()
        for pin in self._pins():
            found = index.find(pin.ids, pin.last, pin.keys)
            kept.update(found, index.way(pin.ids, pin.last, pin.keys).carriers)
            cores.update(found[-1:])
        return kept, cores

    def _other(self, folder: str) -> Shelf:
        """A shelf of another root key, read when room is needed for the first time."""
        if folder not in self._others:
            shelf = Shelf(self._store, folder, None, self._clock)
            shelf.load()
            self._others[folder] = shelf
        return self._others[folder]

    def _tidy(self) -> None:
        partial = [name for name in self._store.sizes[""] if names.is_left_over(name)]
        if partial:
            self._announce()
            for name in partial:
                self._store.remove("", name)
        if self._shelf.faults or self._shelf.left_over:
            self._announce()
            self.written.damaged += self._shelf.sweep()
            self._store.sync(self._shelf.folder)

    def _announce(self) -> None:
        if not self._is_announced:
            self._store.announce()
            self._is_announced = True


def evict(shelf: Shelf, need_bytes: int) -> list[str]:
    """Remove at least `need_bytes` of a shelf's files, or all of them; returns their names."""
    useless = shelf.left_over | shelf.unsure
    gone = [name for name in shelf.sizes if name in useless or names.is_damaged(name)]
    need_bytes -= sum(shelf.sizes[name] for name in gone)
    if need_bytes > 0:
        plan = shelf.ranking.plan(need_bytes)
        if plan is not None:
            gone += shelf.detach(plan)
        else:
            gone = sorted(
                shelf.sizes, key=lambda name: names.object_kind(name) is not Object.ANCHOR
            )
    shelf.delete(gone)
    return gone
