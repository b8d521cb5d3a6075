"""Memory that the host writes and a GPU reads where it lies, for what each step brings along.

MLX keeps arrays of the host in managed memory, whose pages move to whoever touches them: a kernel
that reads a few KB stands still until they have come, and with the host's next write they go back,
and small arrays of the GPU's that lie beside them go too. These pages stay with the host.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# What the driver moves at most at once: nothing else lies in whole ones.
_BLOCK = 2 << 20
# Of the driver's cuMemAdvise.
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5
_HOST = -1


class HostSlot:
    """A place whose content the host replaces: `array` is uint8 [n_bytes].

    `reader` is what a GPU computes from the content; the next write waits for it, once.
    """

    def __init__(self, array: mx.array, memory: NDArray[np.uint8]) -> None:
        self.array = array
        self.reader: mx.array | None = None
        self._memory = memory

    def write(self, parts: Sequence[NDArray[np.uint8]]) -> None:
        """Put parts here, each where kernels may load 16 bytes."""
        reader, self.reader = self.reader, None
        if reader is not None:
            mx.eval(reader)
        first = 0
        for part in parts:
            self._memory[first : first + part.size] = part.ravel()
            first += padded(part.size)


def host_slots(n_bytes: int, count: int) -> list[HostSlot]:
    """`count` slots of at least `n_bytes` each."""
    size = padded(n_bytes)
    blocks = -(-count * size // _BLOCK)
    array = mx.array(np.zeros((blocks + 1) * _BLOCK, np.uint8))
    memory = cast(NDArray[np.uint8], np.array(array, copy=False))
    first = -memory.ctypes.data % _BLOCK
    if mx.cuda.is_available():
        _keep_with_host(memory[first : first + blocks * _BLOCK])
    spans = [slice(at, at + size) for at in range(first, first + count * size, size)]
    slots = [HostSlot(array[span], memory[span]) for span in spans]
    mx.eval([slot.array for slot in slots])
    return slots


def padded(n_bytes: int) -> int:
    """As far as the next place where kernels may load 16 bytes."""
    return -(-n_bytes // 16) * 16


def _keep_with_host(memory: NDArray[np.uint8]) -> None:
    # Where the driver refuses, pages move, which costs time alone.
    advise: Any = ctypes.CDLL("libcuda.so.1").cuMemAdvise
    advise.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    for advice, device in ((_PREFERRED_LOCATION, _HOST), (_ACCESSED_BY, 0)):
        advise(memory.ctypes.data, memory.nbytes, advice, device)
