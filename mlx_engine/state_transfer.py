"""A session's state as bytes and back: rows by ranges of tokens, and what they leave out, the tail.

Owns the layout of both. Rows are plain: each part's packed rows one after the other, so that
ranges put together are a longer range. Neither files nor the choice of what to keep are here.
"""

import io
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.config import ModelConfig
from mlx_engine.devices import Devices
from mlx_engine.diskcache.layout import Part
from mlx_engine.errors import CacheCorrupt
from mlx_engine.formats import CacheFormats
from mlx_engine.memory import FIRST_ROWS, SPARE_ROWS
from mlx_engine.state import Checkpoint, GrowingRows, SavedWindow, SessionState

Bytes = NDArray[np.uint8]

_SENT_TOKENS = 16_384

# Position; then of each window its end and how many of its rows count.
_POSITION = struct.Struct("<Q")
_RING = struct.Struct("<QI")


def parts(config: ModelConfig, formats: CacheFormats | None = None) -> tuple[Part, ...]:
    """The parts of every kv source: compressed rows, index codes, index scales."""
    state = SessionState(config, formats)
    return tuple(
        Part(ratio, rows.buffer.shape[1] * rows.buffer.itemsize) for ratio, rows in _growing(state)
    )


def tail_bytes(config: ModelConfig, formats: CacheFormats | None = None) -> int:
    """Bytes of a tail at a position that leaves no group half full."""
    windows = SessionState(config, formats).windows
    return _POSITION.size + sum(_RING.size + window.rows.nbytes for window in windows)


def export_rows(state: SessionState, first: int, last: int) -> tuple[Bytes, ...]:
    """Copy the rows of the tokens from `first` up to `last`: one buffer a part.

    Those of the groups that end in the range, so that ranges side by side leave none out. Waits for
    what computes the state; nothing of it is kept, so that the next step works in place.
    """
    slices = [rows.buffer[first // ratio : last // ratio] for ratio, rows in _growing(state)]
    mx.eval(slices)
    return tuple(np.array(each).reshape(-1).view(np.uint8) for each in slices)


def export_tail(checkpoint: Checkpoint) -> bytes:
    """Everything of a checkpoint, as `Import.finish` reads it; copied once."""
    pieces: list[bytes | memoryview[int]] = [_POSITION.pack(checkpoint.position)]
    for saved in checkpoint.windows:
        pieces += [_RING.pack(saved.end, saved.count), _seen(saved.rows)]
    for kv, gate in checkpoint.pending.values():
        pieces += [_seen(kv), _seen(gate)]
    return b"".join(pieces)


def send_state(state: SessionState, tail: bytes, devices: Devices) -> None:
    """Give rank 0's state, whose tail this is, to the ranks that call `receive_state`."""
    for first, last in _ranges(state.position):
        for rows in export_rows(state, first, last):
            mx.eval(devices.from_first(mx.array(rows)))
    mx.eval(devices.from_first(mx.array(np.frombuffer(tail, np.uint8))))


def receive_state(
    config: ModelConfig, position: int, tail_bytes: int, devices: Devices
) -> SessionState:
    """The state that rank 0 sends at a position, with a tail of so many bytes."""
    arriving = Import(config, position)
    layout = parts(config)
    for first, last in _ranges(position):
        for part, rows in zip(layout, arriving.rows, strict=True):
            place = rows[part.n_bytes(0, first) : part.n_bytes(0, last)]
            place[:] = np.array(devices.from_first(mx.zeros(place.size, mx.uint8)))
    tail = devices.from_first(mx.zeros(tail_bytes, mx.uint8))
    return arriving.finish(position, np.array(tail, np.uint8).tobytes())


def _ranges(position: int) -> Iterator[tuple[int, int]]:
    """The tokens before a position, some at a time, so that no copy is as long as the state."""
    for first in range(0, position, _SENT_TOKENS):
        yield first, min(first + _SENT_TOKENS, position)


class Import:
    """A state on its way in: memory for the rows of all tokens before a position, then the rest.

    `rows` is that memory, a buffer of bytes a part, for a reader to fill from the front. Where the
    processor sees the device's memory it is the state's own, so that no row is copied.
    """

    def __init__(
        self, config: ModelConfig, position: int, formats: CacheFormats | None = None
    ) -> None:
        self._state = SessionState(config, formats)
        self._position = position
        self._memory: list[NDArray[Any]] = []
        rows: list[Bytes] = []
        for ratio, empty in _growing(self._state):
            count = position // ratio
            dtype = cast("np.dtype[Any]", np.array(empty.buffer).dtype)
            shape = count + max(FIRST_ROWS, min(count, SPARE_ROWS)), empty.buffer.shape[1]
            memory: NDArray[Any]
            if mx.cuda.is_available():
                memory = np.empty(shape, dtype)
            else:
                empty.buffer = _unwritten(shape, dtype)
                memory = cast(NDArray[Any], np.array(empty.buffer, copy=False))
            self._memory.append(memory)
            rows.append(memory[:count].reshape(-1).view(np.uint8))
        self.rows: tuple[Bytes, ...] = tuple(rows)

    def finish(self, position: int, tail: bytes) -> SessionState:
        """The state at a position whose rows are in place, that asked for or one before it; once.

        Raises CacheCorrupt when the tail is not one of this model at this position.
        """
        assert position <= self._position
        state = self._state
        checkpoint = _read_tail(state, position, tail)
        for (ratio, rows), memory in zip(_growing(state), self._memory, strict=True):
            # A step may see rows that are not there yet and weigh them with 0, which is no remedy
            # for what is no number.
            memory[position // ratio :] = 0
            if mx.cuda.is_available():
                rows.buffer = mx.array(memory)
            rows.length = position // ratio
        # A view that is kept would outlive the buffer.
        del self._state, self._memory, self.rows
        state.rewind(checkpoint)
        mx.eval(list(state.arrays()))
        return state


class _BlankFile(io.RawIOBase):
    """A file of one array, of whose content nothing comes when it is read."""

    def __init__(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        header = io.BytesIO()
        about = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, about)
        self._header, self._at = header.getvalue(), 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset if whence == io.SEEK_SET else self._at + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        known = self._header[self._at : self._at + len(buffer)]
        buffer[: len(known)] = known
        self._at += len(buffer)
        return len(buffer)


def _unwritten(shape: tuple[int, int], dtype: np.dtype[Any]) -> mx.array:
    """An array with memory that nobody has written to.

    MLX makes none by itself (`mx.empty` fills it), but what it loads has its memory before its
    bytes. A gigabyte of zeros takes as long as the read of what goes there.
    """
    return cast(mx.array, mx.load(cast(BinaryIO, _BlankFile(shape, dtype)), format="npy"))


def _seen(array: mx.array) -> "memoryview[int]":
    """The bytes of an array, where they lie if they lie in order."""
    return np.array(array, copy=False).reshape(-1).view(np.uint8).data


def _growing(state: SessionState) -> Iterator[tuple[int, GrowingRows]]:
    """Every buffer that grows with the context, and its tokens per row, in the order of parts."""
    for source, rows in state.compressed.items():
        keys = state.index_keys[source]
        for each in (rows, keys.codes, keys.scales):
            yield state.ratios[source], each


def _read_tail(state: SessionState, position: int, tail: bytes) -> Checkpoint:
    """The checkpoint that `export_tail` wrote, for a state of this shape."""
    head_dim = state.config.head_dim
    sizes = [_RING.size + window.rows.nbytes for window in state.windows]
    pending_rows = {source: position % state.ratios[source] for source in state.pending}
    pending_bytes = sum(2 * 4 * n * head_dim for n in pending_rows.values())
    expected = _POSITION.size + sum(sizes) + pending_bytes
    if len(tail) != expected or _POSITION.unpack_from(tail)[0] != position:
        raise CacheCorrupt(f"the tail of a saved state at {position} is none: {len(tail)} bytes")
    at = _POSITION.size
    windows: list[SavedWindow] = []
    for window, size in zip(state.windows, sizes, strict=True):
        end, count = _RING.unpack_from(tail, at)
        capacity, words = window.rows.shape
        if end != position or not min(position, capacity - 1) <= count <= min(position, capacity):
            raise CacheCorrupt(f"a window of a saved state at {position} has {count} rows at {end}")
        rows = np.frombuffer(tail, np.uint32, capacity * words, at + _RING.size)
        windows.append(SavedWindow(mx.array(rows.reshape(capacity, words)), end, count))
        at += size
    pending: dict[int, tuple[mx.array, mx.array]] = {}
    for source, n in pending_rows.items():
        values = np.frombuffer(tail, np.float32, 2 * n * head_dim, at).reshape(2, n, head_dim)
        pending[source] = mx.array(values[0]), mx.array(values[1])
        at += values.nbytes
    checkpoint = Checkpoint(position, tuple(windows), pending)
    mx.eval([saved.rows for saved in windows], list(pending.values()))
    return checkpoint
