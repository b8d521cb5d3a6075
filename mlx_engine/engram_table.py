"""One Engram table: its rows on disk, read by offset, and the hot ones in memory.

A table is about 100 GB and lives in a checkpoint shard, so it is never loaded or mapped: a row
is 256 bytes of e4m3 codes and 8 of e8m0 scales, read where they stand. Owns the file, the
bounded cache and the counts; which rows a token needs is engram's part.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_engine.config import TILE
from mlx_engine.errors import ModelFileError
from mlx_engine.inventory import is_nan

# Runs of rows that one reader takes at a time. Handing over costs about as much as a read from an
# SSD, so a decode step's 24 rows go to few readers; the upper bound lets the reads of another
# table or session have their turn soon.
_MIN_RUNS_PER_TASK = 3
_MAX_RUNS_PER_TASK = 128
# So many runs, as a decode step has, are read by one thread where it can first ask the system for
# all of them: it took half as long from an SSD, and a quarter less from memory.
_FEW_RUNS = 64


@dataclass(frozen=True)
class TableLocation:
    """Where a table stands: byte offsets of `embed.weight` and `embed.scale` in a shard."""

    path: Path
    weight_offset: int
    scale_offset: int
    n_rows: int
    head_dim: int


@dataclass(frozen=True)
class EngramStats:
    """Counts of rows: asked for, distinct within a call, and of those found in memory."""

    rows_requested: int = 0
    rows_distinct: int = 0
    cache_hits: int = 0
    bytes_read: int = 0

    def __add__(self, other: EngramStats) -> EngramStats:
        return EngramStats(
            self.rows_requested + other.rows_requested,
            self.rows_distinct + other.rows_distinct,
            self.cache_hits + other.cache_hits,
            self.bytes_read + other.bytes_read,
        )

    def __sub__(self, other: EngramStats) -> EngramStats:
        return EngramStats(
            self.rows_requested - other.rows_requested,
            self.rows_distinct - other.rows_distinct,
            self.cache_hits - other.cache_hits,
            self.bytes_read - other.bytes_read,
        )


class HotRows:
    """A bounded cache of rows: each has one slot, and a row that was used gets a second chance.

    One slot a row makes every step an array operation. On the rows of a million tokens of code
    and prose it found 1 to 3 points fewer than an exact LRU of the same size. Not thread-safe.
    """

    def __init__(self, max_bytes: int, head_dim: int) -> None:
        n_groups = head_dim // TILE
        self.n_slots = max_bytes // self.slot_bytes(head_dim)
        self._rows = np.full(self.n_slots, -1, np.int64)
        self._was_used = np.zeros(self.n_slots, np.bool_)
        self._codes = np.zeros((self.n_slots, head_dim), np.uint8)
        self._scales = np.zeros((self.n_slots, n_groups), np.uint8)

    @staticmethod
    def slot_bytes(head_dim: int) -> int:
        """What one row takes: codes, scales, its number and whether it was used."""
        return head_dim + head_dim // TILE + 8 + 1

    @property
    def nbytes(self) -> int:
        """What the arrays take when every slot is filled."""
        arrays = (self._rows, self._was_used, self._codes, self._scales)
        return sum(array.nbytes for array in arrays)

    def get(
        self, rows: NDArray[np.int64], codes: NDArray[np.uint8], scales: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Copy the rows that are here into `codes` and `scales`; return which ones, bool [N]."""
        if not self.n_slots:
            return np.zeros(rows.size, np.bool_)
        slots = rows % self.n_slots
        found = self._rows[slots] == rows
        hits = slots[found]
        codes[found] = self._codes[hits]
        scales[found] = self._scales[hits]
        self._was_used[hits] = True
        return found

    def put(
        self, rows: NDArray[np.int64], codes: NDArray[np.uint8], scales: NDArray[np.uint8]
    ) -> None:
        """Keep rows that were not here, except where a used row holds the slot for once more."""
        if not self.n_slots:
            return
        slots = rows % self.n_slots
        yields = ~self._was_used[slots]
        self._was_used[slots] = False
        # Of several rows for a slot the last stays, and it must be the same one in all arrays.
        slots, last = np.unique(slots[yields][::-1], return_index=True)
        kept = np.flatnonzero(yields)[::-1][last]
        self._rows[slots] = rows[kept]
        self._codes[slots] = codes[kept]
        self._scales[slots] = scales[kept]


class EngramTable:
    """Reads rows of one table. Safe to call from several threads.

    Reads go to `readers`, at most `n_readers` tasks of them at a time. Raises ModelFileError
    when the file cannot be opened or ends before the table does.
    """

    def __init__(
        self, location: TableLocation, readers: Executor, n_readers: int, cache_bytes: int
    ) -> None:
        assert location.head_dim % TILE == 0
        self._location = location
        self._n_groups = location.head_dim // TILE
        self._readers = readers
        self._n_readers = n_readers
        # A small table never fills more.
        all_bytes = location.n_rows * HotRows.slot_bytes(location.head_dim)
        self._hot = HotRows(min(cache_bytes, all_bytes), location.head_dim)
        self._stats = EngramStats()
        self._lock = threading.Lock()  # of the hot rows and the counts
        try:
            self._fd = os.open(location.path, os.O_RDONLY)
        except OSError as error:
            raise ModelFileError(
                f"cannot open the Engram table in {location.path} ({error.strerror}): "
                "fetch the shard again"
            ) from error
        end = max(
            location.weight_offset + location.n_rows * location.head_dim,
            location.scale_offset + location.n_rows * self._n_groups,
        )
        size = os.fstat(self._fd).st_size
        if size < end:
            self.close()
            raise ModelFileError(
                f"{location.path} has {size} bytes, but its Engram table ends at {end}: "
                "fetch the shard again"
            )

    def read(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return codes [..., head_dim] and scales [..., head_dim/32] of rows int64 [...].

        Repeated rows are read once and neighbours in one piece; nothing else is read. Raises
        ModelFileError when the file cannot be read or holds a code that is no number.
        """
        distinct, inverse = np.unique(rows, return_inverse=True)
        assert not distinct.size or 0 <= distinct[0] <= distinct[-1] < self._location.n_rows
        codes = np.empty((distinct.size, self._location.head_dim), np.uint8)
        scales = np.empty((distinct.size, self._n_groups), np.uint8)
        with self._lock:
            found = self._hot.get(distinct, codes, scales)
        missing = np.flatnonzero(~found)
        if missing.size:
            codes[missing], scales[missing] = self._read_missing(distinct[missing])
        with self._lock:
            if missing.size:
                self._hot.put(distinct[missing], codes[missing], scales[missing])
            self._stats += EngramStats(
                rows_requested=rows.size,
                rows_distinct=distinct.size,
                cache_hits=distinct.size - missing.size,
                bytes_read=missing.size * (codes.shape[1] + scales.shape[1]),
            )
        return codes[inverse], scales[inverse]

    def stats(self) -> EngramStats:
        """Return the counts since the start."""
        with self._lock:
            return self._stats

    def close(self) -> None:
        """Close the file; a second call does nothing. No read may be under way."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _read_missing(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Read ascending distinct rows: codes [N, head_dim], scales [N, head_dim/32]."""
        codes = np.empty((rows.size, self._location.head_dim), np.uint8)
        scales = np.empty((rows.size, self._n_groups), np.uint8)
        # A run is rows[a:b] with consecutive numbers.
        edges = np.append(np.flatnonzero(np.diff(rows, prepend=-2) != 1), rows.size)
        n_runs = edges.size - 1

        def read_runs(first: int, last: int) -> None:
            mine = edges[first : last + 1]
            starts, counts = rows[mine[:-1]].tolist(), np.diff(mine).tolist()
            span = slice(mine[0], mine[-1])
            for array, offset in (
                (codes, self._location.weight_offset),
                (scales, self._location.scale_offset),
            ):
                width = array.shape[1]
                pieces = [
                    self._pread(count * width, offset + start * width)
                    for start, count in zip(starts, counts, strict=True)
                ]
                array[span] = np.frombuffer(b"".join(pieces), np.uint8).reshape(-1, width)

        if n_runs <= _FEW_RUNS and sys.platform == "linux":
            self._announce(rows[edges[:-1]].tolist(), np.diff(edges).tolist())
            read_runs(0, n_runs)
        else:
            fair = -(-n_runs // self._n_readers)
            step = min(max(fair, _MIN_RUNS_PER_TASK), _MAX_RUNS_PER_TASK)
            firsts = range(0, n_runs, step)
            for wave in range(0, len(firsts), self._n_readers):
                tasks = firsts[wave : wave + self._n_readers]
                for _ in self._readers.map(read_runs, tasks, (first + step for first in tasks)):
                    pass

        bad = np.flatnonzero(is_nan(codes, "F8_E4M3").any(1) | is_nan(scales, "F8_E8M0").any(1))
        if bad.size:
            raise ModelFileError(
                f"row {rows[bad[0]]} of the Engram table in {self._location.path} has a code or a "
                "scale that is no number: fetch the shard again"
            )
        return codes, scales

    def _announce(self, starts: list[int], counts: list[int]) -> None:
        """Let the system begin to read runs of rows, all of them at once."""
        location, advice = self._location, os.POSIX_FADV_WILLNEED
        for offset, width in (
            (location.weight_offset, location.head_dim),
            (location.scale_offset, self._n_groups),
        ):
            for start, count in zip(starts, counts, strict=True):
                # What is wrong with the file the read itself says.
                with suppress(OSError):
                    os.posix_fadvise(self._fd, offset + start * width, count * width, advice)

    def _pread(self, n_bytes: int, offset: int) -> bytes:
        try:
            data = os.pread(self._fd, n_bytes, offset)
        except OSError as error:
            raise ModelFileError(
                f"cannot read {self._location.path} at byte {offset} ({error.strerror}): "
                "check the disk or fetch the shard again"
            ) from error
        if len(data) != n_bytes:
            raise ModelFileError(
                f"{self._location.path} ends before byte {offset + n_bytes}, inside its Engram "
                "table: fetch the shard again"
            )
        return data
