"""Reads an anchor's rows and tail back, several files at a time, straight to where they belong.

Every digest and every token is compared before anything is handed out. Knows nothing of the index:
it is told which files there are.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_engine.diskcache import layout, names
from mlx_engine.diskcache.files import Files, is_absent, is_passing, opened
from mlx_engine.diskcache.layout import TOKEN_BYTES, Parts, TokenIds, Use
from mlx_engine.diskcache.names import Object
from mlx_engine.errors import CacheCorrupt

# Whatever the cores: a cold disk is faster when it is asked for several files at a time.
READERS = 8


@dataclass(frozen=True, slots=True)
class Restored:
    """The position whose rows were put in place, and the tail that was stored there."""

    position: int
    tail: bytes


class Unreadable(Exception):
    """An anchor's file cannot be read; `use` is the step that needs it, None for the tail."""

    def __init__(self, use: Use | None, name: str, error: OSError | CacheCorrupt) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        super().__init__(reason or "it cannot be read")
        self.use = use
        self.name = name
        self.is_absent = isinstance(error, OSError) and is_absent(error)
        self.is_passing = isinstance(error, OSError) and is_passing(error)


class Reader:
    """Reads files of one folder."""

    def __init__(self, files: Files, folder: Path, root: bytes, parts: Parts) -> None:
        self._files = files
        self._folder = folder
        self._root = root
        self._parts = parts

    def read(
        self, steps: Sequence[Use], key: bytes, ids: TokenIds, rows: Sequence[NDArray[np.uint8]]
    ) -> Restored:
        """Read the state at the end of `steps`, whose key is `key`; its rows to where `rows` start.

        Raises Unreadable; nobody writes to `rows` any more then.
        """
        position = steps[-1].end
        with ThreadPoolExecutor(READERS, "ds41-kv-read") as pool:
            tail = pool.submit(self._read_tail, key, position)
            reads = [pool.submit(self._read_step, use, rows, ids) for use in steps]
            try:
                for read in reads:
                    read.result()
                return Restored(position, tail.result())
            except Unreadable:
                pool.shutdown(cancel_futures=True)
                raise

    def read_ids(self, segment: layout.SegmentId) -> TokenIds:
        """The ids of a segment alone; OSError or CacheCorrupt."""
        header = bytearray(layout.segment_header_bytes(self._parts))
        ids = np.empty(segment.tokens, "<u4")
        with opened(self._files, self._files.open(self._folder / segment.name)) as handle:
            count = self._files.read(handle, [header, ids.view(np.uint8).data], 0)
        found = layout.decode_header(header[:count], Object.SEGMENT, segment.key, self._root)
        if count != len(header) + ids.nbytes or found.lengths[0] != ids.nbytes:
            raise CacheCorrupt("it ends within its ids")
        layout.check_digest(ids.data, found.digests[0])
        return ids

    def _read_tail(self, key: bytes, position: int) -> bytes:
        name = names.tail_name(key)
        try:
            with opened(self._files, self._files.open(self._folder / name)) as handle:
                data = bytearray(self._files.handle_status(handle).n_bytes)
                count = self._files.read(handle, [data], 0)
            whole = memoryview(data)[:count]
            header, (tail,) = layout.decode_whole(whole, Object.TAIL, key, self._root)
            if layout.decode_tail(header) != position:
                raise CacheCorrupt("it belongs to another position")
            return bytes(tail)
        except (OSError, CacheCorrupt) as error:
            raise Unreadable(None, name, error) from error

    def _read_step(self, use: Use, rows: Sequence[NDArray[np.uint8]], ids: TokenIds) -> None:
        try:
            self._read_segment(use, rows, ids)
        except (OSError, CacheCorrupt) as error:
            raise Unreadable(use, use.segment.name, error) from error

    def _read_segment(self, use: Use, rows: Sequence[NDArray[np.uint8]], ids: TokenIds) -> None:
        first, end = use.first, use.first + use.segment.tokens
        header = bytearray(layout.segment_header_bytes(self._parts))
        own_ids = np.empty(use.segment.tokens, "<u4")
        # A segment that is used in part is read whole all the same, for its digest.
        is_whole = use.tokens == use.segment.tokens
        targets = [
            _rows_of(buffer, part, first, end)
            if is_whole
            else np.empty(part.n_bytes(first, end), np.uint8)
            for buffer, part in zip(rows, self._parts, strict=True)
        ]
        buffers = [header, own_ids.view(np.uint8).data, *(target.data for target in targets)]
        with opened(self._files, self._files.open(self._folder / use.segment.name)) as handle:
            n_bytes = self._files.handle_status(handle).n_bytes
            count = self._files.read(handle, buffers, 0)
        found = layout.decode_header(header[:count], Object.SEGMENT, use.segment.key, self._root)
        lengths = (use.segment.tokens * TOKEN_BYTES, *(target.nbytes for target in targets))
        if found.lengths != lengths or layout.decode_segment(found)[:2] != (first, end):
            raise CacheCorrupt("it is another segment than its anchor says")
        if (n_bytes, count) != (found.file_bytes, found.file_bytes):
            raise CacheCorrupt(f"it holds {n_bytes} bytes and should hold {found.file_bytes}")
        for buffer, digest in zip(buffers[1:], found.digests, strict=True):
            layout.check_digest(buffer, digest)
        if not np.array_equal(own_ids[: use.tokens], ids[first : use.end]):
            raise CacheCorrupt("its tokens are others than those asked for")
        if not is_whole:
            for buffer, part, target in zip(rows, self._parts, targets, strict=True):
                _rows_of(buffer, part, first, use.end)[:] = target[: part.n_bytes(first, use.end)]


def _rows_of(
    buffer: NDArray[np.uint8], part: layout.Part, first: int, last: int
) -> NDArray[np.uint8]:
    start = part.n_bytes(0, first)
    return buffer[start : start + part.n_bytes(first, last)]
