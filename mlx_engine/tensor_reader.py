"""The data of a checkpoint's tensors, read into the arrays that the model computes with.

A few threads read while the caller lays out the next arrays. Of what several devices share only
this one's part is kept. Which tensors there are is checkpoint's part, whose share is what
inventory's.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, cast

import mlx.core as mx
import numpy as np

from mlx_engine.devices import ONE, Devices
from mlx_engine.errors import ModelFileError
from mlx_engine.inventory import TensorSpec, is_nan
from mlx_engine.shards import TensorLocation
from mlx_engine.weights import Fp4, Fp8

Progress: TypeAlias = Callable[[int, int], None]

# Large enough for an SSD's full rate, small enough that progress and Ctrl-C stay smooth.
_CHUNK_BYTES = 8 * 2**20
_READERS = 8
_MAX_PENDING_READS = 4 * _READERS


class TensorReader:
    """Fills arrays from the files with a few threads, while the caller lays out the next ones.

    `specs` are the tensors that may be asked for. The arrays are handed out before their data has
    arrived: nobody may evaluate them before `finish`, which raises what a read raised. Only the
    caller's thread touches MLX.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        locations: Mapping[str, TensorLocation],
        on_progress: Progress | None,
        devices: Devices = ONE,
    ) -> None:
        self._locations = locations
        self._devices = devices
        # Along which axis the tensors are shared out that are.
        self._axes = {spec.name: spec.axis for spec in specs if devices.count > 1}
        self._total_bytes = sum(spec.read_bytes(devices.count) for spec in specs)
        self._on_progress = on_progress
        self._done_bytes = 0
        self._files: dict[Path, int] = {}
        self._pending: deque[Future[int]] = deque()
        self._arrays: list[mx.array] = []
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="ds41-read")

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)

    def tensor(self, name: str) -> mx.array:
        """A BF16 or F32 tensor in its own type and shape."""
        shape = self._shape(name)
        if self._locations[name].dtype == "F32":
            return self._fill([name], shape, mx.float32)
        # Python's buffers have no bf16, so it is filled as words and viewed when they are there.
        array = self._fill([name], shape, mx.uint16).view(mx.bfloat16)
        self._arrays.append(array)
        return array

    def fp8(self, name: str, groups: int | None = None) -> Fp8:
        """A dense weight with its tile scales, its rows split into groups where it has them."""
        arrays: list[mx.array] = []
        for part in ("weight", "scale"):
            N, K = self._shape(f"{name}.{part}")
            split = (N,)
            if groups is not None:
                mine = groups // self._devices.count
                split = (mine, N // mine)
            is_codes = part == "weight"
            shape = (*split, K // 4 if is_codes else K)
            dtype = mx.uint32 if is_codes else mx.uint8
            arrays.append(self._fill([f"{name}.{part}"], shape, dtype))
        return Fp8(*arrays)

    def experts(self, prefix: str, n_experts: int, matrix: str) -> Fp4:
        """One matrix of all experts of a layer, stacked."""
        arrays: list[mx.array] = []
        for part in ("weight", "scale"):
            names = [f"{prefix}.{expert}.{matrix}.{part}" for expert in range(n_experts)]
            N, K_bytes = self._shape(names[0])
            is_codes = part == "weight"
            shape = (n_experts, N, K_bytes // 4 if is_codes else K_bytes)
            arrays.append(self._fill(names, shape, mx.uint32 if is_codes else mx.uint8))
        return Fp4(*arrays)

    def finish(self) -> None:
        """Wait until every array handed out holds its data."""
        while self._pending:
            self._wait_for_oldest()
        mx.eval(self._arrays)  # pyright: ignore[reportUnknownMemberType]

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of this device's share of a tensor."""
        shape, axis = [*self._locations[name].shape], self._axes.get(name)
        if axis is not None:
            own = self._devices.share(shape[axis])
            shape[axis] = own.stop - own.start
        return tuple(shape)

    def _fill(self, names: list[str], shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """An array of this shape into which the tensors are being read, one after the other."""
        array = mx.zeros(shape, dtype)
        mx.eval(array)  # pyright: ignore[reportUnknownMemberType]
        # Reading into the array's own memory spares a second copy of up to 2 GB.
        buffer = memoryview(cast("Any", array)).cast("B")
        share_bytes = buffer.nbytes // len(names)
        for start, name in zip(range(0, buffer.nbytes, share_bytes), names, strict=True):
            self._read_later(name, buffer[start : start + share_bytes])
        return array

    def _read_later(self, name: str, buffer: memoryview) -> None:
        """Let a tensor's share be read into `buffer`, in pieces."""
        at = self._locations[name]
        if at.path not in self._files:
            try:
                self._files[at.path] = os.open(at.path, os.O_RDONLY)
            except OSError as error:
                raise ModelFileError(
                    f"{at.path} cannot be opened: {error.strerror}; check the disk"
                ) from None
        read = partial(_read_chunk, self._files[at.path], name, at)
        if self._axes.get(name) == 1:
            self._read_columns_later(read, at, buffer)
            return
        first = at.offset
        if self._axes.get(name) == 0:
            first += self._devices.share(at.n_bytes).start
        else:
            assert buffer.nbytes == at.n_bytes
        for start in range(0, buffer.nbytes, _CHUNK_BYTES):
            self._submit(read, first + start, buffer[start : start + _CHUNK_BYTES])

    def _read_columns_later(
        self, read: Callable[[int, memoryview], int], at: TensorLocation, buffer: memoryview
    ) -> None:
        """Let rows be read whole, and of each the bytes of this device be kept."""
        row_bytes = at.n_bytes // at.shape[0]
        columns = self._devices.share(row_bytes)
        own = np.frombuffer(buffer, np.uint8).reshape(at.shape[0], -1)

        def read_rows(offset: int, own: Any) -> int:
            rows = np.empty((own.shape[0], row_bytes), np.uint8)
            done = read(offset, rows.data.cast("B"))
            own[:] = rows[:, columns]
            return done

        step = max(1, _CHUNK_BYTES // row_bytes)
        for first in range(0, at.shape[0], step):
            self._submit(read_rows, at.offset + first * row_bytes, own[first : first + step])

    def _submit(self, read: Callable[[int, Any], int], offset: int, into: Any) -> None:
        if len(self._pending) == _MAX_PENDING_READS:
            self._wait_for_oldest()
        self._pending.append(self._pool.submit(read, offset, into))

    def _wait_for_oldest(self) -> None:
        self._done_bytes += self._pending.popleft().result()
        if self._on_progress is not None:
            self._on_progress(self._done_bytes, self._total_bytes)


def _read_chunk(file: int, name: str, at: TensorLocation, offset: int, buffer: memoryview) -> int:
    """Fill `buffer` with a tensor's bytes from `offset` of the file on; return their number."""
    done = 0
    while done < buffer.nbytes:
        try:
            n_bytes = os.preadv(file, [buffer[done:]], offset + done)
        except OSError as error:
            raise ModelFileError(
                f"{at.path} cannot be read at byte {offset + done:,}: {error.strerror}; "
                "check the disk"
            ) from None
        if n_bytes == 0:
            raise ModelFileError(
                f"{at.path} ends at byte {offset + done:,}, within {name}; fetch it again"
            )
        done += n_bytes
    if at.dtype.startswith("F8") and is_nan(np.frombuffer(buffer, np.uint8), at.dtype).any():
        raise ModelFileError(f"{name} in {at.path} has a code that is no number; fetch it again")
    return done
