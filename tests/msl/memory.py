"""Arrays in a file that the child process maps: where each lies, and back.

Every buffer begins on a page of its own and is followed by a gap, so that an access past its end
never falls into another.
"""

import ctypes
import mmap
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.msl.source import shape_parameters

PAGE_BYTES = mmap.PAGESIZE
GAP_BYTES = 1 << 16


@dataclass(frozen=True)
class Buffer:
    """One argument of the kernel; `first` is where its pointer points, in bytes from the start."""

    name: str
    content: NDArray[np.uint8]
    first: int = 0
    writable: bool = False
    initialised: bool = True


def contents(array: mx.array) -> NDArray[Any]:
    """The array as numpy sees it, with the strides that MLX has; bfloat16 as its bits."""
    if array.dtype == mx.bfloat16:
        bits = array.view(mx.uint16) if array.ndim else array.reshape(1).view(mx.uint16).reshape(())
        return contents(bits)
    return cast(NDArray[Any], np.asarray(array))


def as_float64(array: mx.array) -> NDArray[np.float64]:
    return contents(array.astype(mx.float32)).astype(np.float64)


def input_buffers(
    source: str, name: str, array: mx.array, *, row_contiguous: bool
) -> Iterator[Buffer]:
    """The input and what the body asks to know of its shape."""
    view = contents(array)
    if row_contiguous and not view.flags.c_contiguous:
        view = view.copy()
    if view.flags.c_contiguous:
        yield Buffer(name, view.reshape(-1).view(np.uint8))
    else:
        low, high = np.lib.array_utils.byte_bounds(view)
        span = np.frombuffer(ctypes.string_at(low, high - low), np.uint8)
        yield Buffer(name, span, view.ctypes.data - low)
    values = {
        "shape": np.array(view.shape, np.int32),
        "strides": np.array(view.strides, np.int64) // view.itemsize,
        "ndim": np.array([view.ndim], np.int32),
    }
    for suffix, _, _ in shape_parameters(source, name, array):
        yield Buffer(f"{name}_{suffix}", values[suffix].view(np.uint8))


def output_buffer(
    name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None
) -> Buffer:
    """An output before the kernel runs; without `init_value` it is all ones, NaN in every float."""
    if init_value is None:
        content = np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8)
    else:
        filled = contents(mx.full(tuple(shape), init_value, dtype=dtype))
        content = np.ascontiguousarray(filled).reshape(-1).view(np.uint8)
    return Buffer(name, content, writable=True, initialised=init_value is not None)


def to_array(content: NDArray[np.uint8], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    return mx.array(content).view(dtype).reshape(tuple(shape))


class SharedFile:
    """An unnamed file with the buffers' contents and the lines of the job that describe them."""

    def __init__(self, buffers: Sequence[Buffer], fd: int) -> None:
        self.fd = fd
        self.offsets: list[int] = []
        end = PAGE_BYTES
        for buffer in buffers:
            self.offsets.append(end)
            pages = -(-buffer.content.size // PAGE_BYTES)
            end += pages * PAGE_BYTES + GAP_BYTES
        os.ftruncate(fd, end)
        self.map = mmap.mmap(fd, end)
        self.lines = [f"data {fd} {end}"]
        for buffer, offset in zip(buffers, self.offsets, strict=True):
            size = buffer.content.size
            self.map[offset : offset + size] = buffer.content.tobytes()
            flags = f"{buffer.first} {buffer.writable:d} {buffer.initialised:d}"
            self.lines.append(f"buffer {offset} {size} {flags} {buffer.name}")

    def read(self, index: int, size: int) -> NDArray[np.uint8]:
        offset = self.offsets[index]
        return np.frombuffer(self.map[offset : offset + size], np.uint8)


@contextmanager
def shared_file(buffers: Sequence[Buffer]) -> Generator[SharedFile]:
    fd = os.memfd_create("metal-kernel")
    try:
        shared = SharedFile(buffers, fd)
        try:
            yield shared
        finally:
            shared.map.close()
    finally:
        os.close(fd)
