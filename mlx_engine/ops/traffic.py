"""The bytes that a launch moves, as the formula beside each kernel says them from shapes alone.

The formulas are in the `*_bytes` modules; each term is an array and how often the launch's geometry
has its threads load it. No formula is fitted: tests compare them with what an emulator counts.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes of a launch's arrays: different ones, which memory must move, and all that its threads
    load and store, a byte for each thread that reads it, which may come from a cache.

    Shapes are arguments and no arrays. Numbers, which every thread reads, are arrays.
    """

    unique_bytes: int = 0
    total_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.unique_bytes + other.unique_bytes, self.total_bytes + other.total_bytes)


NOTHING = Traffic()


def moved(n_bytes: int, times: int = 1) -> Traffic:
    """Of an array of so many bytes, each of which is loaded or stored so many times."""
    return Traffic(n_bytes, n_bytes * times)


def number(threads: int) -> Traffic:
    """Of a 32-bit number that so many threads read."""
    return moved(4, threads)


def added(*parts: Traffic) -> Traffic:
    """All of several parts."""
    return sum(parts, NOTHING)
