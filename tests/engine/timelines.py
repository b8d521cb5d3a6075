"""What the tests of sessions share: a model that counts, states compared, a cache in memory."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.engram import EngramRows
from mlx_engine.model import Boundary, Model
from mlx_engine.respond import Steps
from mlx_engine.saving import Restored, Save
from mlx_engine.session import Session
from mlx_engine.state import SessionState
from mlx_engine.token_ids import TokenIds
from tests.engine.support import Subject
from tests.unit.arrays import host


class CountingModel(Model):
    """Keeps which tokens of a sequence pass the layers; fails in the middle of a call on demand."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject.config, subject.model.weights, mx.float32)
        self.encoded: list[tuple[int, int]] = []
        # Layers that still pass before one fails; None for all.
        self.layers_left: int | None = None

    @property
    def tokens(self) -> int:
        """The tokens that passed the lower layers."""
        return sum(last - first for first, last in self.encoded)

    def encode(
        self, token_ids: Sequence[int], state: SessionState, engram_rows: EngramRows | None
    ) -> Boundary:
        first = state.position
        boundary = super().encode(token_ids, state, engram_rows)
        self.encoded.append((first, state.position))
        return boundary

    def block(self, *args: Any, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.layers_left is not None:
            if self.layers_left == 0:
                raise RuntimeError("the device is gone")
            self.layers_left -= 1
        return super().block(*args, **options)


def seen(state: SessionState) -> dict[str, Any]:
    """All of a state that what follows depends on, as values."""
    found: dict[str, Any] = {"position": state.position}
    for layer, window in enumerate(state.windows):
        capacity = window.rows.shape[0]
        # One row fewer than a full ring has is all that the next query sees.
        positions = np.arange(max(0, window.end - min(window.count, capacity - 1)), window.end)
        ring = np.array(window.rows, np.uint32)
        found[f"window {layer}"] = (window.end, ring[positions % capacity].tobytes())
    for source, rows in state.compressed.items():
        keys = state.index_keys[source]
        for name, each in (("rows", rows), ("codes", keys.codes), ("scales", keys.scales)):
            found[f"{name} {source}"] = (each.length, np.array(each.view()).tobytes())
    for source, group in state.pending.items():
        found[f"pending {source}"] = (
            np.array(group.kv).tobytes(),
            np.array(group.gate).tobytes(),
        )
    return found


Step = TypeVar("Step")
Result = TypeVar("Result")


def followed(reading: Generator[Step, None, Result], report: Callable[[Step], object]) -> Result:
    """What a reading comes to, each step being told; what `report` raises breaks it off."""
    with closing(reading):
        while True:
            try:
                step = next(reading)
            except StopIteration as end:
                return end.value
            report(step)


def stop_after(steps: int) -> Callable[[object], None]:
    """Told of the steps of a reading, it breaks off the one after so many."""
    left = steps

    def report(_: object) -> None:
        nonlocal left
        if left == 0:
            raise Stopped
        left -= 1

    return report


class Stopped(Exception):
    """A reading was broken off."""


def tokens_of(steps: Iterable[object]) -> list[int]:
    """The tokens among the steps of an answer."""
    return [step for step in steps if isinstance(step, int)]


def next_token(steps: Steps) -> int:
    """The next token of an answer, its prompt being read before."""
    return next(step for step in steps if isinstance(step, int))


def best(logits: mx.array) -> int:
    """The likeliest token."""
    return cast(int, mx.argmax(logits).item())


def greedy(session: Session, logits: mx.array, n: int) -> tuple[list[int], list[Any]]:
    """The next tokens of a session, and the logits after each."""
    tokens: list[int] = []
    found: list[Any] = []
    for _ in range(n):
        tokens.append(best(logits))
        logits = session.step(tokens[-1])
        found.append(host(logits))
    return tokens, found


def parts_from(ours: NDArray[np.float32], theirs: NDArray[np.float32], most: float) -> bool:
    """Whether two runs' next tokens differ; their logits are at most `most` apart.

    So a token can differ only where two are as good as equal, which is printed.
    """
    apart = float(np.abs(ours - theirs).max())
    assert apart <= most, f"the logits are {apart:.2e} apart, more than {most:.2e}"
    own, other = int(ours.argmax()), int(theirs.argmax())
    if own == other:
        return False
    leads = ours[own] - ours[other], theirs[other] - theirs[own]
    print(
        f"a near-tie: {own} is {leads[0]:.2e} ahead of {other} in one run, and {leads[1]:.2e} "
        f"behind it in the other, whose logits are {apart:.2e} apart"
    )
    assert max(leads) <= 2 * most
    return True


@dataclass
class _Save:
    cache: "MemoryCache"
    ids: TokenIds
    ranges: list[tuple[int, int]]
    handed: int = 0

    def rows(self, first: int, last: int, parts: Sequence[NDArray[np.uint8]]) -> None:
        assert (first, last) == self.ranges[self.handed]
        self.handed += 1
        self.cache.calls += 1
        self.cache.rows[first, self.ids[:last].tobytes()] = tuple(part.copy() for part in parts)

    def finish(self, tail: bytes, saved_s: float) -> None:
        assert self.handed == len(self.ranges) and saved_s > 0
        self.cache.calls += 1
        self.cache.tails[self.ids.tobytes()] = tail


@dataclass(frozen=True)
class _Restored:
    position: int
    tail: bytes


@dataclass
class MemoryCache:
    """A disk cache without a disk; ranges end at multiples of `block_tokens`, and at the anchor."""

    block_tokens: int = 16
    rows: dict[tuple[int, bytes], tuple[NDArray[np.uint8], ...]] = field(
        default_factory=dict[tuple[int, bytes], tuple[NDArray[np.uint8], ...]]
    )
    tails: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    calls: int = 0
    protected: list[int] = field(default_factory=list[int])
    rejected: list[int] = field(default_factory=list[int])

    def _ranges(self, position: int) -> list[tuple[int, int]]:
        ends = [*range(self.block_tokens, position, self.block_tokens), position]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def lookup(self, token_ids: TokenIds) -> int:
        at = [len(key) // 4 for key in self.tails]
        fits = [n for n in at if n <= token_ids.size and token_ids[:n].tobytes() in self.tails]
        return max(fits, default=0)

    def restore(
        self, token_ids: TokenIds, position: int, into: Sequence[NDArray[np.uint8]]
    ) -> Restored | None:
        ids = token_ids[:position]
        if ids.tobytes() not in self.tails:
            return None
        ranges = [self.rows[first, ids[:last].tobytes()] for first, last in self._ranges(position)]
        for buffer, part in zip(into, zip(*ranges, strict=True), strict=True):
            buffer[:] = np.concatenate(part)
        return _Restored(position, self.tails[ids.tobytes()])

    def reject(self, token_ids: TokenIds, position: int) -> None:
        self.rejected.append(position)
        del self.tails[token_ids[:position].tobytes()]

    def begin(self, token_ids: TokenIds, position: int) -> Save | None:
        assert token_ids.size == position and position % 2 == 0
        if token_ids.tobytes() in self.tails:
            return None
        missing = [
            (first, last)
            for first, last in self._ranges(position)
            if (first, token_ids[:last].tobytes()) not in self.rows
        ]
        return _Save(self, token_ids.copy(), missing)

    @contextmanager
    def protect(self, token_ids: TokenIds) -> Generator[None]:
        self.protected.append(token_ids.size)
        yield
