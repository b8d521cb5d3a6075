"""The cache's folder on disk: who may use it, how many bytes it holds, and its lock.

Owns the limit: no byte is written that would pass it, and what is not ours counts and is never
touched. Knows names and sizes of files and nothing of what they say. Everything that changes the
folder is called with the lock held.
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_engine.diskcache import names
from mlx_engine.diskcache.files import PRIVATE_MODE, Buffer, Files, Kind, is_absent, opened
from mlx_engine.diskcache.folder import (
    check_owner,
    check_unmarked,
    hide,
    is_emptied,
    make_folders,
    marker_of,
)
from mlx_engine.diskcache.lock import COUNT_BYTES, Busy, FolderLock, Gone
from mlx_engine.errors import CacheUnusable

FLOOR_BYTES = 10 * 10**9
FLOOR_SHARE = 0.05

_MARK_WAIT_S = 5.0
# What a folder needs to be a cache: the marker and the lock file.
START_BYTES = len(names.MARKER) + COUNT_BYTES

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class News:
    """Names that are new in a folder, and names that have gone from it."""

    added: list[str]
    gone: list[str]


class Store:
    """A folder of cache files, as names and sizes."""

    def __init__(
        self, directory: Path, files: Files, space_bytes: int, free_floor_bytes: int | None
    ) -> None:
        self.directory = directory
        self.files = files
        self.space_bytes = space_bytes
        if free_floor_bytes is None:
            share = int(files.space(directory).total_bytes * FLOOR_SHARE)
            free_floor_bytes = min(share, FLOOR_BYTES)
        self.free_floor_bytes = free_floor_bytes
        # Whether the folder waits for room for the marker: until then nothing is written.
        self.is_unmarked = False
        # Whether the folder was removed while it was in use: then nothing is written any more.
        self.is_gone = False
        # What was written so far, by which a caller sees that it goes on.
        self.written_bytes = 0
        # Folder of ours -> name of ours -> bytes; "" is the directory itself.
        self.sizes: dict[str, dict[str, int]] = {"": {}}
        # What is not ours: path below the directory -> bytes.
        self.foreign: dict[str, int] = {}
        # What the last scan found changed, by folder.
        self.news: dict[str, News] = {}
        self._lasting: set[str] = set()
        self._links: list[str] = []
        self._own_bytes = 0
        self._lock = FolderLock(self.path("", names.LOCK_NAME), files, self._check_folder)

    @classmethod
    def open(
        cls, directory: Path, files: Files, space_bytes: int, free_floor_bytes: int | None
    ) -> "Store":
        """The store in a folder, made and marked if it is not there. CacheUnusable."""
        directory = Path(os.path.abspath(directory))
        try:
            make_folders(directory, files)
            status = check_owner(directory, files)
            store = cls(directory, files, space_bytes, free_floor_bytes)
            try:
                is_marked = store.is_marked()
                if not is_marked:
                    store._refuse_anothers()
                if status.mode != PRIVATE_MODE:
                    files.make_private(directory, status.file_id)
                if is_marked:
                    store._begin()
                else:
                    store._mark()
            except BaseException:
                # A lock that stays held would keep other processes out.
                store.close()
                raise
        except OSError as error:
            raise CacheUnusable(
                f"The cache's folder {directory} cannot be used ({error.strerror or error}): "
                "make it writable, or name another with --kv-disk-dir."
            ) from error
        return store

    @classmethod
    def existing(cls, directory: Path, files: Files) -> "Store":
        """The store in a folder with our marker, be it emptied; left as it is. CacheUnusable."""
        directory = Path(os.path.abspath(directory))
        try:
            check_owner(directory, files)
            store = cls(directory, files, 2**63, 0)
            # Somebody's own folder is not gone through.
            if marker_of(directory, files) == b"" or store.is_marked():
                store._scan()
            if not (store.is_marked() or is_emptied(store.sizes[""], store.foreign)):
                raise CacheUnusable(f"{directory} is not a cache of ds41: it lacks its marker.")
            store._refuse_links()
        except OSError as error:
            reason = "it is not there" if is_absent(error) else error.strerror or error
            raise CacheUnusable(
                f"The cache's folder {directory} cannot be read: {reason}."
            ) from error
        return store

    @property
    def foreign_bytes(self) -> int:
        return sum(self.foreign.values())

    @property
    def total_bytes(self) -> int:
        """Every byte in the folder."""
        return self._own_bytes + self.foreign_bytes

    def missing_bytes(self, n_bytes: int) -> int:
        """How many bytes must go before `n_bytes` more may be written."""
        free_bytes = self.files.space(self.directory).free_bytes
        over_limit = self.total_bytes + n_bytes - self.space_bytes
        return max(0, over_limit, self.free_floor_bytes + n_bytes - free_bytes)

    def can_write(self) -> bool:
        """Whether anything can be written, if there is room for it."""
        if self.is_gone:
            return False
        try:
            return not self.is_unmarked or not self.missing_bytes(START_BYTES)
        except OSError:
            return False

    def path(self, folder: str, name: str) -> Path:
        return self.directory.joinpath(folder, name)

    @contextlib.contextmanager
    def locked(self, deadline_s: float) -> Generator[bool]:
        """Hold the lock among processes; Busy if it is not free by then (time.monotonic).

        Gives whether another process has changed the folder, in which case it has been read again.
        """
        count = self._lock.take(deadline_s)
        try:
            is_changed = not self._lock.is_known(count)
            if is_changed:
                self._scan()
            else:
                self._scan_top(self.files.names(self.directory))
            self._lock.know(count)
            if self.is_unmarked:
                self._write_marker()
            yield is_changed
        finally:
            self._lock.release()

    def announce(self) -> None:
        """Tell the other processes that the folder is about to change.

        Before the first change, since one that dies half-way must have told them too.
        """
        self._lock.announce()

    def make_folder(self, folder: str) -> None:
        """Make a folder of ours, to last, unless it is there."""
        if folder in self._lasting:
            return
        if folder not in self.sizes:
            with contextlib.suppress(FileExistsError):
                self.files.make_folder(self.directory / folder)
            self.sizes[folder] = {}
        # One that is there may be left from a process that was killed before this call.
        self.files.sync_folder(self.directory)
        self._lasting.add(folder)

    def write(self, folder: str, name: str, buffers: Sequence[Buffer]) -> None:
        """Write a whole file, or nothing; an OSError if it fails or would pass the limit.

        It lasts once the folder is synced.
        """
        n_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._check_room(n_bytes)
        partial = names.partial_name(0)
        path = self.path(folder, partial)
        with contextlib.suppress(FileNotFoundError):
            if partial in self.sizes[folder]:
                self.files.unlink(path)
        self._set(folder, partial, n_bytes)
        try:
            with opened(self.files, self.files.create(path)) as handle:
                self.files.write(handle, buffers)
                self.files.sync(handle)
            self.files.rename(path, self.path(folder, name))
            self.written_bytes += n_bytes
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(folder, partial)
            raise
        self._set(folder, partial, None)
        self._set(folder, name, n_bytes)

    def sync(self, folder: str) -> None:
        """Return once the folder's names are on the disk as they stand."""
        self.files.sync_folder(self.directory / folder)

    def remove(self, folder: str, name: str) -> None:
        """Remove a file of ours; one that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(self.path(folder, name))
        self._set(folder, name, None)

    def put_aside(self, folder: str, name: str) -> None:
        """Give a damaged file a name under which nobody reads it."""
        aside = names.damaged_name(name)
        self.files.rename(self.path(folder, name), self.path(folder, aside))
        n_bytes = self.sizes[folder].get(name, 0)
        self._set(folder, name, None)
        self._set(folder, aside, n_bytes)

    def read(self, folder: str, name: str, most_bytes: int = 2**63) -> bytes:
        """A small file, whole, or its first `most_bytes`."""
        return self.files.contents(self.path(folder, name), most_bytes)

    def remove_empty_folders(self) -> None:
        """Remove the folders of ours that hold nothing at all."""
        for folder in [folder for folder, files in self.sizes.items() if folder and not files]:
            with contextlib.suppress(OSError):
                self.files.remove_folder(self.directory / folder)
                del self.sizes[folder]
        self.files.sync_folder(self.directory)

    def close(self) -> None:
        """Let the lock file go."""
        self._lock.close()

    def is_marked(self) -> bool:
        """Whether our marker lies in the folder."""
        return (marker_of(self.directory, self.files) or b"").startswith(names.MARKER_START)

    def _begin(self) -> None:
        """Read a marked folder, if that can be while nobody writes: then it need not be again."""
        try:
            with self.locked(time.monotonic()):
                self._refuse_links()
                probe = self.path("", names.partial_name(0))
                with contextlib.suppress(FileNotFoundError):
                    self.files.unlink(probe)
                self.files.close(self.files.create(probe))
                self.files.unlink(probe)
        except Busy:
            # Who writes there shows that one can.
            self._scan()
            self._refuse_links()

    def _mark(self) -> None:
        """Put the marker into a new folder, unless what lies there leaves no room for it."""
        if self.is_marked():
            # By another process, just now.
            return self._begin()
        self.is_unmarked = True
        if self.missing_bytes(START_BYTES):
            return
        with self.locked(time.monotonic() + _MARK_WAIT_S):
            pass

    def _refuse_anothers(self) -> None:
        """CacheUnusable if a folder without our marker holds anything that cannot be ours."""
        self._scan()
        self._refuse_links()
        if self.is_marked():
            # By another process, just now.
            return
        check_unmarked(self.directory, self.sizes[""], self.foreign)

    def _write_marker(self) -> None:
        if not self.is_marked():
            self.announce()
            hide(self.directory, self.files)
            self.write("", names.MARKER_NAME, [names.MARKER])
        self.is_unmarked = False
        # The folder itself may be new as well; who may not list its parent cannot have made it.
        with contextlib.suppress(PermissionError):
            self.files.sync_folder(self.directory.parent)

    def _check_folder(self) -> None:
        """Gone if the folder is no more what it was."""
        if self.is_unmarked or self.is_marked():
            return
        if not self.is_gone:
            _log.warning("%s is no disk cache any more: nothing is written.", self.directory)
        self.is_gone = True
        raise Gone(errno.ENOENT, "the folder has gone")

    def _scan(self) -> None:
        """Names and sizes of everything; an immutable file that is known is not asked again."""
        sizes: dict[str, dict[str, int]] = {}
        foreign: dict[str, int] = {}
        found = self.files.names(self.directory)
        for folder, kind in found:
            if kind is Kind.FOLDER and names.is_folder_name(folder):
                sizes[folder] = self._scan_folder(folder, foreign)
        before = self.sizes
        nothing: dict[str, int] = {}
        self.news = {
            folder: News(
                list(sizes.get(folder, nothing).keys() - before.get(folder, nothing).keys()),
                list(before.get(folder, nothing).keys() - sizes.get(folder, nothing).keys()),
            )
            for folder in before.keys() | sizes.keys()
        }
        self.sizes, self.foreign = {"": {}, **sizes}, foreign
        self._own_bytes = sum(sum(files.values()) for files in sizes.values())
        self._lasting.clear()
        self._scan_top(found)

    def _scan_folder(self, folder: str, foreign: dict[str, int]) -> dict[str, int]:
        before = self.sizes.get(folder, {})
        known: dict[str, int] = {}
        new: list[str] = []
        for name, kind in self.files.names(self.directory / folder):
            if kind is not Kind.FILE or not names.is_name(name):
                foreign[f"{folder}/{name}"] = self._size(f"{folder}/{name}", kind)
                self._note_link(f"{folder}/{name}", kind)
            elif name in before and names.is_immutable(name):
                known[name] = before[name]
            else:
                new.append(name)
        sizes = self.files.sizes(self.directory / folder, new)
        return known | dict(zip(new, sizes, strict=True))

    def _scan_top(self, found: list[tuple[str, Kind]]) -> None:
        """What lies beside our folders; what is foreign in those is known from the last `_scan`."""
        folders = self.sizes.keys()
        foreign = {p: n for p, n in self.foreign.items() if p.partition("/")[0] in folders}
        for name in list(self.sizes[""]):
            self._set("", name, None)
        for name, kind in found:
            if kind is Kind.FILE and names.is_top_name(name):
                # A power cut may have emptied the lock file: it gets its bytes back.
                least = COUNT_BYTES if name == names.LOCK_NAME else 0
                self._set("", name, max(self._size(name, kind), least))
            elif kind is not Kind.FOLDER or not names.is_folder_name(name):
                foreign[name] = self._size(name, kind)
                self._note_link(name, kind)
        self.foreign = foreign

    def _note_link(self, below: str, kind: Kind) -> None:
        if kind is Kind.LINK:
            self._links.append(below)

    def _size(self, below: str, kind: Kind) -> int:
        """Bytes of a file, or of all in a foreign folder; a link is not followed."""
        path = self.directory / below
        try:
            if kind is not Kind.FOLDER:
                return self.files.status(path).n_bytes
            return sum(
                self._size(f"{below}/{name}", inner) for name, inner in self.files.names(path)
            )
        except OSError:
            # Gone since it was listed, or nobody may look: what cannot be seen cannot be counted.
            return 0

    def _check_room(self, n_bytes: int) -> None:
        if self.missing_bytes(n_bytes):
            raise OSError(errno.ENOSPC, "no room within the cache's limits")

    def _refuse_links(self) -> None:
        """CacheUnusable if the scan met a link where a file or folder of ours could be."""
        if self._links:
            raise CacheUnusable(
                f"{self.directory / self._links[0]} is a symbolic link, which a cache never "
                "follows: remove it, or name another folder with --kv-disk-dir."
            )

    def _set(self, folder: str, name: str, n_bytes: int | None) -> None:
        sizes = self.sizes.get(folder, {})
        self._own_bytes -= sizes.pop(name, 0)
        if n_bytes is not None:
            sizes[name] = n_bytes
            self._own_bytes += n_bytes
