"""The lock among the processes that share a cache's folder, and the count in its file.

The count goes up before every change, so that who takes the lock sees whether others have changed
the folder. Knows nothing of what else lies there.
"""

import contextlib
import errno
import time
from collections.abc import Callable
from pathlib import Path

from mlx_engine.diskcache.files import Files

# What the file holds.
COUNT_BYTES = 8

_POLL_S = 0.01


class Busy(OSError):
    """Another process holds the lock for too long."""


class Gone(OSError):
    """The folder was removed, or put in another's place, while it was in use."""


class FolderLock:
    """The lock of one open folder; `check_folder` is called before the file is opened again."""

    def __init__(self, path: Path, files: Files, check_folder: Callable[[], None]) -> None:
        self._path = path
        self._files = files
        self._check_folder = check_folder
        self._handle: int | None = None
        # The count as this process knows the folder, and which file it was read from.
        self._known = -1
        self._file_id: tuple[int, int] | None = None

    def take(self, deadline_s: float) -> int:
        """Hold the lock, and return the count; Busy if it is not free by then (time.monotonic)."""
        while True:
            if self._handle is None:
                if self._file_id is not None:
                    self._check_folder()
                self._handle = self._files.open_lock(self._path)
            if self._files.try_lock(self._handle):
                if self._is_shared(self._handle):
                    return self._read(self._handle)
                # Someone removed the file: the others will meet at its successor.
                self.close()
            elif time.monotonic() >= deadline_s:
                raise Busy(errno.EBUSY, "another process holds the cache's lock")
            else:
                time.sleep(_POLL_S)

    def is_known(self, count: int) -> bool:
        """Whether the folder is as it was when `know` was told this count."""
        return count == self._known

    def know(self, count: int) -> None:
        """The folder was read under this count."""
        self._known = count

    def announce(self) -> None:
        """Raise the count; the lock must be held."""
        assert self._handle is not None
        self._files.overwrite(self._handle, (self._known + 1).to_bytes(COUNT_BYTES, "little"))
        self._known += 1

    def release(self) -> None:
        """Let the lock go."""
        if self._handle is None:
            return
        try:
            self._files.unlock(self._handle)
        except OSError:
            # To close it lets it go as well.
            self.close()

    def close(self) -> None:
        """Let the file go."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            # The system closes it even where it says that something went wrong.
            with contextlib.suppress(OSError):
                self._files.close(handle)

    def _is_shared(self, handle: int) -> bool:
        """Whether the file is still the one under the name; another one counts anew."""
        try:
            file_id = self._files.handle_status(handle).file_id
            is_same = self._files.status(self._path).file_id == file_id
        except FileNotFoundError:
            return False
        except OSError:
            self.close()
            raise
        if is_same and file_id != self._file_id:
            self._known, self._file_id = -1, file_id
        return is_same

    def _read(self, handle: int) -> int:
        try:
            count = bytearray(COUNT_BYTES)
            self._files.read(handle, [count], 0)
        except BaseException:
            self.release()
            raise
        return int.from_bytes(count, "little")
