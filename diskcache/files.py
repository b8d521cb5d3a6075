"""The file-system calls of the disk cache: every one of them goes through `Files`.

Owns no names, no formats and no policy. A test puts a recording or a failing `Files` in its place.
Paths are absolute, a last component that is a symbolic link is never followed, and every failure
is an OSError.
"""

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeAlias

Buffer: TypeAlias = "bytes | bytearray | memoryview[int]"

PRIVATE_MODE = 0o700
_OWNER_WRITES = 0o300
_FILE_MODE = 0o600
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
# Some file systems have no such call for files or for folders; then there is nothing to wait for.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOTTY}
# Out of handles or memory, a share that went away, rights that were taken.
_PASSING = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EACCES,
    errno.EPERM,
}
_TOOL_S = 10.0
# Below every system's IOV_MAX.
_VECTORS = 512


class Kind(Enum):
    """What a name in a folder stands for."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "symbolic link"
    OTHER = "special file"


@dataclass(frozen=True, slots=True)
class Status:
    """What lstat says of one name; `file_id` stays the same for as long as the file lives."""

    kind: Kind
    n_bytes: int
    owner: int
    mode: int
    file_id: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Space:
    """The disk that a folder lies on."""

    free_bytes: int
    total_bytes: int


class Files:
    """The system's files; a handle is a file descriptor of the process."""

    def status(self, path: Path) -> Status:
        """What the name stands for, a link not followed; FileNotFoundError if nothing does."""
        return _status(os.lstat(path))

    def handle_status(self, handle: int) -> Status:
        """What an open handle stands for."""
        return _status(os.fstat(handle))

    def names(self, folder: Path) -> list[tuple[str, Kind]]:
        """The names in a folder with what they stand for, in no order."""
        with os.scandir(folder) as entries:
            return [(entry.name, _entry_kind(entry)) for entry in entries]

    def sizes(self, folder: Path, names: Sequence[str]) -> list[int]:
        """The sizes of names in a folder, links not followed; 0 for one that has gone."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        try:
            return [_size(name, handle) for name in names]
        finally:
            os.close(handle)

    def user(self) -> int:
        """The user id that files are made under."""
        return os.geteuid()

    def space(self, folder: Path) -> Space:
        """Bytes that the user may still write on the folder's disk, and the disk's size."""
        found = os.statvfs(folder)
        return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def make_folder(self, path: Path) -> None:
        """Make a folder that only its owner may enter; FileExistsError if the name is taken."""
        os.mkdir(path, PRIVATE_MODE)

    def make_private(self, folder: Path, file_id: tuple[int, int]) -> None:
        """Take a folder's rights from everyone but its owner, unless it is another by now.

        PermissionError where its owner has none: who took them had a reason.
        """
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        try:
            status = self.handle_status(handle)
            if status.file_id != file_id:
                raise OSError(errno.ESTALE, "another folder took its place", str(folder))
            if status.mode & _OWNER_WRITES != _OWNER_WRITES:
                raise PermissionError(errno.EACCES, "its owner may not write there", str(folder))
            os.fchmod(handle, PRIVATE_MODE)
        finally:
            os.close(handle)

    def leave_out_of_backups(self, folder: Path) -> None:
        """Tell Time Machine to leave a folder out, where there is one; it may have failed.

        By the system's own tool, which puts the mark on the folder itself.
        """
        if sys.platform == "darwin":
            with contextlib.suppress(subprocess.SubprocessError):
                subprocess.run(
                    ["/usr/bin/tmutil", "addexclusion", folder],
                    capture_output=True,
                    timeout=_TOOL_S,
                )

    def create(self, path: Path) -> int:
        """Make a file for writing that only its owner may read; FileExistsError if it is there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
        return os.open(path, flags, _FILE_MODE)

    def open(self, path: Path) -> int:
        """Open a file for reading; whatever is not a file is refused, and not waited for."""
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN)
        try:
            _check_file(handle, path)
        except OSError:
            os.close(handle)
            raise
        return handle

    def contents(self, path: Path, most_bytes: int) -> bytes:
        """What a small file holds, or its first `most_bytes`; refuses what `open` refuses."""
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN)
        try:
            left_bytes = min(_check_file(handle, path), most_bytes)
            data = os.read(handle, left_bytes)
            while len(data) < left_bytes and (more := os.read(handle, left_bytes - len(data))):
                data += more
            return data
        finally:
            os.close(handle)

    def close(self, handle: int) -> None:
        """Close a handle; a lock that it holds is let go."""
        os.close(handle)

    def write(self, handle: int, buffers: Sequence[Buffer]) -> None:
        """Append all bytes of the buffers."""
        waiting = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while waiting:
            written = os.writev(handle, waiting[:_VECTORS])
            waiting = _after(waiting, written)

    def read(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill the buffers one after the other from `offset` on; return how many bytes there were.

        Fewer than the buffers hold only where the file ends. The handle must be the caller's alone.
        """
        waiting = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        os.lseek(handle, offset, os.SEEK_SET)
        total = 0
        while waiting:
            count = os.readv(handle, waiting[:_VECTORS])
            if not count:
                break
            total += count
            waiting = _after(waiting, count)
        return total

    def sync(self, handle: int) -> None:
        """Return once the file's bytes are on the disk, not only in its cache."""
        _sync(handle)

    def sync_folder(self, folder: Path) -> None:
        """Return once what was made, renamed and unlinked in the folder is so on the disk."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        try:
            _sync(handle)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name in one step; a file that had that name is gone."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file; who has it open can read on."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def open_lock(self, path: Path) -> int:
        """Open the lock file for reading and writing, made if it is not there."""
        return os.open(path, os.O_RDWR | os.O_CREAT | _OPEN, _FILE_MODE)

    def try_lock(self, handle: int) -> bool:
        """Take the lock among processes unless another handle holds it."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, handle: int) -> None:
        """Let the lock go."""
        fcntl.flock(handle, fcntl.LOCK_UN)

    def overwrite(self, handle: int, data: bytes) -> None:
        """Put bytes at the start of a lock file, in place, for the other processes to see."""
        os.pwrite(handle, data, 0)


def is_absent(error: OSError) -> bool:
    """Whether the call failed because the file is not there."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR)


def is_passing(error: OSError) -> bool:
    """Whether the process or the system lacks something for now, which says nothing of a file."""
    return error.errno in _PASSING


@contextlib.contextmanager
def opened(files: Files, handle: int) -> Generator[int]:
    """Close the handle at the end."""
    try:
        yield handle
    finally:
        files.close(handle)


def _sync(handle: int) -> None:
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        try:
            fcntl.fcntl(handle, full_sync)
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    os.fsync(handle)


def _check_file(handle: int, path: Path) -> int:
    """The size of what was opened, which must be a file."""
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return found.st_size


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers behind their first `count` bytes."""
    for i, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[i + 1 :]]
        count -= len(buffer)
    return []


def _status(found: os.stat_result) -> Status:
    if stat.S_ISLNK(found.st_mode):
        kind = Kind.LINK
    elif stat.S_ISDIR(found.st_mode):
        kind = Kind.FOLDER
    else:
        kind = Kind.FILE if stat.S_ISREG(found.st_mode) else Kind.OTHER
    mode = stat.S_IMODE(found.st_mode)
    return Status(kind, found.st_size, found.st_uid, mode, (found.st_dev, found.st_ino))


def _size(name: str, folder: int) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _entry_kind(entry: "os.DirEntry[str]") -> Kind:
    if entry.is_file(follow_symlinks=False):
        return Kind.FILE
    if entry.is_symlink():
        return Kind.LINK
    return Kind.FOLDER if entry.is_dir(follow_symlinks=False) else Kind.OTHER
