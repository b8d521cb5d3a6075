"""What can be asked of a cache's folder, and done to it, without the model that fills it.

Works on all root keys at once, in a folder that has our marker, and removes only names of ours.
Raises CacheUnusable for any other folder.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlx_engine.diskcache import layout, names
from mlx_engine.diskcache.files import Files, is_absent
from mlx_engine.diskcache.lock import Busy
from mlx_engine.diskcache.names import Object
from mlx_engine.diskcache.policy import PolicyClock, hits_at
from mlx_engine.diskcache.shelf import Fault, Shelf
from mlx_engine.diskcache.store import Store
from mlx_engine.errors import CacheCorrupt, CacheUnusable

_LOCK_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class AnchorEntry:
    """A stored position; `model` names the folder of its root key, `own_bytes` what only it needs.

    `hits` are its uses, decayed to now; storing it was the first.
    """

    model: str
    key: str
    position: int
    parent_position: int
    own_bytes: int
    created_s: float
    hits: float
    has_tail: bool


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """What lies there for one model; what another version of ds41 wrote is only counted."""

    model: str
    anchors: int
    tokens: int
    n_bytes: int
    is_other_version: bool = False


@dataclass(frozen=True, slots=True)
class FolderStats:
    """Every byte of a folder, by whose it is."""

    directory: Path
    total_bytes: int
    models: tuple[ModelEntry, ...]
    damaged_bytes: int
    left_over_bytes: int
    foreign_bytes: int
    foreign_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """What a check of every file found; a fault's name is its path in the folder.

    `unknown_files` are of another version of ds41, which alone can check them.
    """

    files: int
    n_bytes: int
    faults: tuple[Fault, ...]
    unknown_files: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed, or would be: paths in the folder, and what is left."""

    names: tuple[str, ...]
    n_bytes: int
    left_bytes: int


def list_anchors(
    directory: Path, *, files: Files | None = None, clock: Callable[[], float] = time.time
) -> list[AnchorEntry]:
    """The stored positions, model by model, ascending."""
    policy_clock = PolicyClock(clock)
    entries: list[AnchorEntry] = []
    for shelf in _shelves(Store.existing(directory, files or Files()), policy_clock):
        for anchor in sorted(shelf.index.anchors.values(), key=lambda anchor: anchor.position):
            entries.append(
                AnchorEntry(
                    model=shelf.folder,
                    key=anchor.key.hex(),
                    position=anchor.position,
                    parent_position=anchor.parent.position if anchor.parent else 0,
                    own_bytes=shelf.index.own_bytes(anchor),
                    created_s=anchor.created_s,
                    hits=hits_at(anchor.weight, policy_clock.now()),
                    has_tail=anchor.tail_bytes > 0,
                )
            )
    return entries


def stats(directory: Path, *, files: Files | None = None) -> FolderStats:
    """What the folder holds."""
    store = Store.existing(directory, files or Files())
    models: list[ModelEntry] = []
    damaged_bytes = left_over_bytes = 0
    for shelf in _shelves(store, PolicyClock(time.time)):
        anchors = [anchor for anchor in shelf.index.anchors.values() if anchor.tail_bytes]
        tokens = sum(segment.id.tokens for segment in shelf.index.segments.values())
        models.append(
            ModelEntry(
                shelf.folder, len(anchors), tokens, sum(shelf.sizes.values()), shelf.is_opaque
            )
        )
        for name, size in shelf.sizes.items():
            damaged_bytes += size if names.is_damaged(name) else 0
            left_over_bytes += size if name in shelf.left_over else 0
    return FolderStats(
        store.directory,
        store.total_bytes,
        tuple(models),
        damaged_bytes,
        left_over_bytes,
        store.foreign_bytes,
        tuple(sorted(store.foreign)),
    )


def verify(directory: Path, *, put_aside: bool = False, files: Files | None = None) -> Verified:
    """Read every file of ours and compare its digests; `put_aside` renames those that are bad."""
    store = Store.existing(directory, files or Files())
    count = n_bytes = unknown = 0
    faults: list[Fault] = []
    bad: dict[str, list[Fault]] = {}
    for shelf in _shelves(store, PolicyClock(time.time)):
        if shelf.is_opaque:
            unknown += len(shelf.sizes)
            continue
        found = list(shelf.faults.values())
        for name, size in shelf.sizes.items():
            kind = names.object_kind(name)
            if kind is None or name in shelf.faults:
                continue
            count += 1
            n_bytes += size
            try:
                reason = _fault_of(store, shelf.folder, name, kind)
            except OSError as error:
                # It may be in order all the same, so it is not put aside.
                path, reason = f"{shelf.folder}/{name}", error.strerror or str(error)
                faults.append(Fault(path, f"it cannot be read: {reason}"))
                continue
            if reason is not None:
                found.append(Fault(name, reason))
        faults += [Fault(f"{shelf.folder}/{fault.name}", fault.reason) for fault in found]
        bad[shelf.folder] = found
    if put_aside and faults:
        with _locked(store):
            store.announce()
            for shelf in _shelves(store, PolicyClock(time.time)):
                if shelf.is_opaque:
                    continue
                for fault in bad.get(shelf.folder, []):
                    if fault.name in shelf.sizes:
                        shelf.report(fault)
                shelf.sweep()
                store.sync(shelf.folder)
    return Verified(count, n_bytes, tuple(faults), unknown)


def prune(
    directory: Path,
    to_bytes: int | None = None,
    *,
    dry_run: bool = False,
    files: Files | None = None,
    clock: Callable[[], float] = time.time,
) -> Removed:
    """Remove what is of no use, then what is worth least, until the folder holds `to_bytes`.

    None removes only what is of no use: half-written files and those that were put aside. What
    another version of ds41 wrote stays.
    """
    store = Store.existing(directory, files or Files())
    with _locked(store, not dry_run):
        shelves = [s for s in _shelves(store, PolicyClock(clock)) if not s.is_opaque]
        gone = _Gone(store, dry_run)
        for shelf in shelves:
            damaged = [name for name in shelf.sizes if names.is_damaged(name)]
            # While an anchor cannot be read, nobody knows what it stands on.
            gone.add(shelf.folder, [*shelf.faults, *shelf.left_over, *damaged])
            if not shelf.unread:
                gone.add(shelf.folder, sorted(shelf.unsure))
        if to_bytes is not None:
            while gone.left_bytes > to_bytes and _evict_least(shelves, gone):
                pass
            for shelf in shelves:
                if gone.left_bytes > to_bytes:
                    gone.add(shelf.folder, sorted(shelf.sizes))
        return gone.finish()


def purge(directory: Path, *, dry_run: bool = False, files: Files | None = None) -> Removed:
    """Remove everything of ours; who has the folder open then writes no more to it.

    Where other files lie, the marker and the lock stay: it is a cache's folder for the next run.
    """
    store = Store.existing(directory, files or Files())
    with _locked(store, not dry_run):
        gone = _Gone(store, dry_run)
        for shelf in _shelves(store, PolicyClock(time.time), is_loaded=False):
            gone.add(shelf.folder, sorted(shelf.sizes))
        top = [] if store.foreign else sorted(store.sizes[""])
        gone.add("", [name for name in top if name != names.LOCK_NAME])
        gone.remove_empty_folders()
        # The lock last: until then nobody else can take the folder for a new one.
        gone.add("", [name for name in top if name == names.LOCK_NAME])
        return gone.finish()


def is_empty(directory: Path, *, files: Files | None = None) -> bool:
    """Whether a folder is not there, or has nothing in it. CacheUnusable if it cannot be read."""
    try:
        return not (files or Files()).names(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise CacheUnusable(
            f"The cache's folder {directory} cannot be read: {error.strerror or error}."
        ) from error


class _Gone:
    """Collects what is removed, and removes it unless it is only asked what would be."""

    def __init__(self, store: Store, dry_run: bool) -> None:
        self._store = store
        self._dry_run = dry_run
        self._names: dict[str, int] = {}
        self._n_bytes = 0
        self._folders: set[str] = set()
        self._total_bytes = store.total_bytes
        if not dry_run:
            store.announce()

    @property
    def left_bytes(self) -> int:
        return self._total_bytes - self._n_bytes

    def add(self, folder: str, gone: list[str]) -> None:
        """Remove files of one folder, each once, in this order."""
        sizes = self._store.sizes[folder]
        for name in gone:
            path = f"{folder}/{name}" if folder else name
            if name not in sizes or path in self._names:
                continue
            self._names[path] = sizes[name]
            self._n_bytes += sizes[name]
            self._folders.add(folder)
            if not self._dry_run:
                self._store.remove(folder, name)

    def remove_empty_folders(self) -> None:
        """Make it last, and remove the folders that are empty by now."""
        self._sync()
        if not self._dry_run:
            self._store.remove_empty_folders()

    def finish(self) -> Removed:
        """Make it last."""
        self._sync()
        return Removed(tuple(self._names), self._n_bytes, self.left_bytes)

    def _sync(self) -> None:
        if not self._dry_run:
            for folder in self._folders:
                self._store.sync(folder)
        self._folders.clear()


def _evict_least(shelves: list[Shelf], gone: _Gone) -> bool:
    """Remove the anchor that is worth least of all; False if there is none."""
    plans = [(shelf, plan) for shelf in shelves if (plan := shelf.ranking.plan(1)) is not None]
    if not plans:
        return False
    shelf, plan = min(plans, key=lambda each: each[0].ranking.worth(each[1].anchors[0]))
    gone.add(shelf.folder, shelf.detach(plan))
    return True


def _fault_of(store: Store, folder: str, name: str, kind: Object) -> str | None:
    """What is wrong with a file, None if nothing is; OSError if it cannot be read."""
    try:
        data = store.read(folder, name)
        if kind is Object.ANCHOR:
            layout.decode_anchor(data, names.object_key(name))
        else:
            key = None if kind is Object.HITS else names.object_key(name)
            layout.decode_whole(data, kind, key)
    except CacheCorrupt as error:
        return str(error)
    except OSError as error:
        if not is_absent(error):
            raise
    return None


def _shelves(store: Store, clock: PolicyClock, *, is_loaded: bool = True) -> Iterator[Shelf]:
    for folder in sorted(store.sizes):
        if folder:
            shelf = Shelf(store, folder, None, clock)
            if is_loaded:
                shelf.load()
            yield shelf


@contextmanager
def _locked(store: Store, is_wanted: bool = True) -> Generator[None]:
    if not is_wanted:
        yield
        return
    try:
        with store.locked(time.monotonic() + _LOCK_WAIT_S):
            yield
    except Busy:
        raise CacheUnusable(
            f"Another process has been writing to {store.directory} for {_LOCK_WAIT_S:.0f} s: "
            "try again later."
        ) from None
    except OSError as error:
        raise CacheUnusable(
            f"The cache's folder {store.directory} cannot be changed: {error.strerror or error}."
        ) from error
    finally:
        store.close()
