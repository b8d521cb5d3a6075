"""What keeps a cache from writing, in one sentence for the user.

Judges by the limits, the folder and the disk as they stand, and remembers what did not fit.
"""

import logging
import threading

from mlx_engine.diskcache.store import START_BYTES, Store

_log = logging.getLogger(__name__)


class Notice:
    """What is wrong with a store; `least_bytes` are those of the smallest anchor."""

    def __init__(self, store: Store, least_bytes: int) -> None:
        self._store = store
        self._least_bytes = START_BYTES + least_bytes
        self._lock = threading.Lock()
        # What was too large for the limit, at its largest: a limit for it, and its tokens.
        self._too_large = (0, 0)
        self._logged_bytes = 0

    def too_large(self, tokens: int, limit_bytes: int) -> None:
        """Remember a limit that has room for a prompt; a line of the log, again for twice of it.

        Any thread may say it.
        """
        with self._lock:
            self._too_large = max(self._too_large, (limit_bytes, tokens))
            if limit_bytes >= 2 * self._logged_bytes:
                self._logged_bytes = limit_bytes
                _log.warning("%s", self._of_too_large())

    def sentence(self) -> str | None:
        """What is wrong now, None if nothing is."""
        store = self._store
        if store.is_gone:
            return (
                f"The cache's folder {store.directory} has been removed, so nothing is written: "
                "start again to have it made anew."
            )
        if store.space_bytes < self._least_bytes:
            return (
                f"The limit of {store.space_bytes} bytes for {store.directory} is too small for a "
                f"cache, so nothing is written: allow at least {self._least_bytes} with "
                "--kv-disk-space."
            )
        if store.space_bytes - store.foreign_bytes < self._least_bytes:
            return (
                f"Files that are not the cache's fill {store.directory} up to its limit of "
                f"{store.space_bytes} bytes, so nothing is written: name an empty folder, "
                "or allow more with --kv-disk-space."
            )
        try:
            free_bytes = store.files.space(store.directory).free_bytes
        except OSError as error:
            return f"The cache's folder {store.directory} cannot be used: {error.strerror}."
        least_bytes = START_BYTES if store.is_unmarked else 0
        if free_bytes < store.free_floor_bytes + least_bytes:
            return (
                f"The disk of {store.directory} has {free_bytes} bytes free and the cache leaves "
                f"{store.free_floor_bytes} to others, so nothing is written: free some space."
            )
        return self._of_too_large() if self._too_large[0] else None

    def _of_too_large(self) -> str:
        limit_bytes, tokens = self._too_large
        return (
            f"What is computed of a prompt of {tokens} tokens does not fit into the limit of "
            f"{self._store.space_bytes} bytes for {self._store.directory}, so it is not all kept: "
            f"allow {limit_bytes} with --kv-disk-space, and more for a long answer."
        )
