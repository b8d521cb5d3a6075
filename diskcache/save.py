"""What a caller hands over for one anchor: which rows are wanted, then the rows, then the tail.

Runs on the thread that computes, so it only keeps references and counts bytes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_engine.diskcache.files import Buffer
from mlx_engine.diskcache.layout import Parts, TokenIds


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of the tokens [first, last), one buffer a part."""

    first: int
    last: int
    parts: tuple["memoryview[int]", ...]

    def cut(self, parts: Parts, first: int, last: int) -> list["memoryview[int]"]:
        """Those of [first, last) of them."""
        cuts: list[memoryview[int]] = []
        for part, buffer in zip(parts, self.parts, strict=True):
            start = part.n_bytes(self.first, first)
            cuts.append(buffer[start : start + part.n_bytes(first, last)])
        return cuts


class RecentKeys:
    """The keys of positions in the prompt that was asked for last: the next mostly begins alike.

    Not safe among threads.
    """

    def __init__(self) -> None:
        self._ids: TokenIds = np.zeros(0, "<u4")
        self._keys: dict[int, bytes] = {}

    @property
    def ids(self) -> TokenIds:
        """The prompt that was asked for last, up to where it was longest."""
        return self._ids

    def of(self, ids: TokenIds) -> dict[int, bytes]:
        """Those that are known of `ids`, for new ones to be added; it may hold later ones too."""
        n = min(ids.size, self._ids.size)
        different = self._ids[:n] != ids[:n]
        shared = int(different.argmax()) if different.any() else n
        if shared < ids.size:
            self._ids = ids.copy()
            self._keys = {at: key for at, key in self._keys.items() if at <= shared}
        return self._keys


class Pin:
    """Keeps the stored prefixes of a prompt from eviction until it is let go or forgotten."""

    def __init__(self, ids: TokenIds, last: int) -> None:
        self.ids = ids
        self.last = last
        self.is_held = True
        # The keys of positions, as they were worked out.
        self.keys: dict[int, bytes] = {}

    def release(self) -> None:
        """Let the prefixes go; a second time does nothing."""
        self.is_held = False

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Save:
    """One anchor on its way to the disk.

    The caller exports `ranges` in order, never needing more than one at a time, then the tail.
    What it hands over must not change afterwards. A save that is not finished writes nothing.
    """

    def __init__(
        self,
        ids: TokenIds,
        position: int,
        ranges: list[tuple[int, int]],
        parts: Parts,
        room_bytes: Callable[[], int],
        submit: Callable[["Save"], None],
        pin: Pin,
    ) -> None:
        self.ids = ids
        self.position = position
        self.ranges = ranges
        self.pin = pin
        self.rows_given: list[Rows] = []
        self.tail: Buffer = b""
        self.saved_s = 0.0
        self.n_bytes = 0
        self.is_dropped = False
        self._parts = parts
        self._room_bytes = room_bytes
        self._submit = submit

    def rows(
        self, first: int, last: int, parts: Sequence[Buffer] | Sequence[NDArray[np.uint8]]
    ) -> None:
        """Hand over the next of `ranges`; ValueError if it is another or has another size."""
        expected = self.ranges[len(self.rows_given)] if not self._is_complete() else None
        if (first, last) != expected:
            raise ValueError(f"rows of [{first}, {last}) given where {expected} is next")
        views = tuple(np.frombuffer(part, np.uint8).data for part in parts)
        sizes = [part.n_bytes(first, last) for part in self._parts]
        if [len(view) for view in views] != sizes:
            raise ValueError(f"rows of [{first}, {last}) do not have {sizes} bytes")
        if self._take(sum(sizes)):
            self.rows_given.append(Rows(first, last, views))
        else:
            # Keeps the count of ranges without keeping their bytes.
            self.rows_given.append(Rows(first, last, ()))

    def finish(self, tail: Buffer, saved_s: float) -> None:
        """Hand over the tail, and queue it all; the anchor counts once it is on the disk.

        `saved_s` is how many seconds it took to get here from the longest anchor stored before.
        """
        if not self._is_complete():
            raise ValueError("rows are missing")
        self.saved_s = saved_s if 0 < saved_s < math.inf else 0.0
        if self._take(len(tail)):
            self.tail = tail
        self._submit(self)

    def drop(self) -> None:
        """Let everything go: nothing is written."""
        self._forget()
        self.pin.release()

    def _is_complete(self) -> bool:
        return len(self.rows_given) == len(self.ranges)

    def _take(self, n_bytes: int) -> bool:
        if not self.is_dropped and self.n_bytes + n_bytes > self._room_bytes():
            self._forget()
        if not self.is_dropped:
            self.n_bytes += n_bytes
        return not self.is_dropped

    def _forget(self) -> None:
        self.is_dropped = True
        self.n_bytes = 0
        self.rows_given = [Rows(rows.first, rows.last, ()) for rows in self.rows_given]
