"""A session's state as bytes and back: rows by ranges of tokens, and what they leave out, the tail.

Owns the layout of both. Rows are plain: each part's packed rows one after the other, so that
ranges put together are a longer range. Neither files nor the choice of what to keep are here.
"""

import struct
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.config import ModelConfig
from mlx_engine.diskcache.layout import Part
from mlx_engine.errors import CacheCorrupt
from mlx_engine.formats import CacheFormats
from mlx_engine.memory import FIRST_ROWS, SPARE_ROWS
from mlx_engine.state import Checkpoint, GrowingRows, SavedWindow, SessionState

Bytes = NDArray[np.uint8]

# Position; then of each window its end and how many of its rows count.
_POSITION = struct.Struct("<Q")
_RING = struct.Struct("<QI")


def parts(config: ModelConfig, formats: CacheFormats | None = None) -> tuple[Part, ...]:
    """The parts of every kv source: compressed rows, index codes, index scales."""
    state = SessionState(config, formats)
    return tuple(
        Part(ratio, rows.buffer.shape[1] * rows.buffer.itemsize) for ratio, rows in _growing(state)
    )


def export_rows(state: SessionState, first: int, last: int) -> tuple[Bytes, ...]:
    """Copy the rows of the tokens from `first` up to `last`: one buffer a part.

    Those of the groups that end in the range, so that ranges side by side leave none out. Waits for
    what computes the state; nothing of it is kept, so that the next step works in place.
    """
    slices = [rows.buffer[first // ratio : last // ratio] for ratio, rows in _growing(state)]
    mx.eval(slices)
    return tuple(np.array(each).reshape(-1).view(np.uint8) for each in slices)


def export_tail(checkpoint: Checkpoint) -> bytes:
    """Everything of a checkpoint, as `import_state` reads it; copied once."""
    pieces: list[bytes | memoryview[int]] = [_POSITION.pack(checkpoint.position)]
    for saved in checkpoint.windows:
        pieces += [_RING.pack(saved.end, saved.count), _seen(saved.rows)]
    for kv, gate in checkpoint.pending.values():
        pieces += [_seen(kv), _seen(gate)]
    return b"".join(pieces)


def import_state(
    config: ModelConfig,
    position: int,
    rows: Sequence[Bytes],
    tail: bytes,
    formats: CacheFormats | None = None,
) -> SessionState:
    """The state at `position` from the rows of all tokens before it, a buffer a part, and a tail.

    Raises CacheCorrupt when the sizes or the position are not this model's.
    """
    state = SessionState(config, formats)
    growing = list(_growing(state))
    if len(rows) != len(growing):
        raise CacheCorrupt(f"a saved state has {len(rows)} parts of rows, not {len(growing)}")
    restored = _read_tail(state, position, tail)
    for (ratio, empty), data in zip(growing, rows, strict=True):
        _fill(empty, data, position // ratio)
    state.rewind(restored)
    mx.eval(list(state.arrays()))
    return state


def _seen(array: mx.array) -> "memoryview[int]":
    """The bytes of an array, where they lie if they lie in order."""
    return np.array(array, copy=False).reshape(-1).view(np.uint8).data


def _growing(state: SessionState) -> Iterator[tuple[int, GrowingRows]]:
    """Every buffer that grows with the context, and its tokens per row, in the order of parts."""
    for source, rows in state.compressed.items():
        keys = state.index_keys[source]
        for each in (rows, keys.codes, keys.scales):
            yield state.ratios[source], each


def _fill(rows: GrowingRows, data: Bytes, count: int) -> None:
    """Put `count` rows of bytes into an empty buffer, with room for more behind them."""
    width, itemsize = rows.buffer.shape[1], rows.buffer.itemsize
    if data.nbytes != count * width * itemsize:
        raise CacheCorrupt(
            f"a part of a saved state has {data.nbytes} bytes, not {count * width * itemsize}"
        )
    dtype = np.uint32 if itemsize == 4 else np.uint8
    values = data.view(dtype).reshape(count, width)
    spare = max(FIRST_ROWS, min(count, SPARE_ROWS))
    rows.buffer = mx.zeros((count + spare, width), dtype=rows.buffer.dtype)
    mx.eval(rows.buffer)
    if mx.cuda.is_available():
        rows.buffer[:count] = mx.array(values)
    else:
        # Where the processor sees the device's memory, one copy is enough.
        np.array(rows.buffer, copy=False)[:count] = values
    rows.length = count


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
