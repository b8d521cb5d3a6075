"""Saving: one session's checkpoints on their way to a disk cache, and a state on its way back.

What goes there goes a piece at a time: one range of rows or one tail, small enough to be handed
over between two decode steps. What is stored, and when it reaches the disk, is the cache's part.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlx_engine.config import ModelConfig
from mlx_engine.errors import CacheCorrupt
from mlx_engine.formats import CacheFormats
from mlx_engine.session import Session
from mlx_engine.state import Checkpoint, SessionState
from mlx_engine.state_transfer import Import, export_rows, export_tail
from mlx_engine.token_ids import TokenIds

log = logging.getLogger(__name__)

# An anchor closer to the one before takes more to write than it saves.
LEAST_TOKENS = 128


class Save(Protocol):
    """An anchor being handed to a cache: its ranges in order, then the tail."""

    @property
    def ranges(self) -> Sequence[tuple[int, int]]: ...

    def rows(self, first: int, last: int, parts: Sequence[NDArray[np.uint8]]) -> None: ...

    def finish(self, tail: bytes, saved_s: float) -> None: ...


class Restored(Protocol):
    """What a cache has put in place: the rows before a position; and the tail there."""

    @property
    def position(self) -> int: ...

    @property
    def tail(self) -> bytes: ...


class Cache(Protocol):
    """What sessions need of a disk cache, whose faults are misses and never raised."""

    def lookup(self, token_ids: TokenIds) -> int: ...

    def restore(
        self, token_ids: TokenIds, position: int, into: Sequence[NDArray[np.uint8]]
    ) -> Restored | None: ...

    def reject(self, token_ids: TokenIds, position: int) -> None: ...

    def begin(self, token_ids: TokenIds, position: int) -> Save | None: ...

    def protect(self, token_ids: TokenIds) -> AbstractContextManager[object]: ...


def restore(
    cache: Cache,
    token_ids: TokenIds,
    position: int,
    config: ModelConfig,
    formats: CacheFormats | None = None,
) -> SessionState | None:
    """The state that a cache has at a position that `lookup` found, or one before it.

    None if nothing comes of it. What the cache has in order, and is of no use here all the same, it
    is told to give up.
    """
    try:
        state = Import(config, position, formats)
        restored = cache.restore(token_ids, position, state.rows)
        if restored is None:
            return None
        try:
            return state.finish(restored.position, restored.tail)
        except CacheCorrupt as error:
            log.warning("a state from the disk cache cannot be used: %s", error)
            cache.reject(token_ids, restored.position)
    except (MemoryError, RuntimeError) as error:
        log.warning("a state from the disk cache finds no room: %s", error)
    return None


@dataclass(frozen=True)
class _Offer:
    """A checkpoint that waits, of a state that has its rows, and the tokens before it."""

    state: SessionState
    checkpoint: Checkpoint
    token_ids: TokenIds
    tokens_per_s: float


@dataclass(frozen=True)
class _Pending:
    state: SessionState
    checkpoint: Checkpoint
    save: Save
    ranges: deque[tuple[int, int]]
    saved_s: float


class Saving:
    """Hands the checkpoints of a session to a cache, one after the other; without one does nothing.

    Whoever takes the session elsewhere calls `finish` before. `on_saved` is called for each.
    """

    def __init__(
        self,
        session: Session,
        cache: Cache | None,
        least_tokens: int,
        on_saved: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._cache = cache
        self._least_tokens = least_tokens
        self._offered: Checkpoint | None = None
        self._offers: deque[_Offer] = deque()
        self._pending: _Pending | None = None
        self._on_saved = on_saved

    @property
    def is_pending(self) -> bool:
        """Whether something may be left to hand over."""
        return self._pending is not None or bool(self._offers)

    def offer(self, tokens_per_s: float) -> None:
        """Let the session's newest checkpoint follow what is under way."""
        checkpoints = self._session.checkpoints
        if self._cache is None or not checkpoints or checkpoints[-1] is self._offered:
            return
        self._offered = checkpoint = checkpoints[-1]
        state = self._session.state
        # A stored anchor leaves no group half full.
        is_between = any(checkpoint.position % ratio for ratio in state.ratios.values())
        if not is_between and checkpoint.position % 2 == 0:
            ids = self._session.token_ids[: checkpoint.position]
            self._offers.append(_Offer(state, checkpoint, ids, tokens_per_s))

    def advance(self) -> None:
        """Hand over one piece, if there is any."""
        while self._pending is None and self._offers:
            self._pending = self._begin(self._offers.popleft())
        pending = self._pending
        if pending is None:
            return
        if self._session.state is not pending.state:
            # The rows went with a device that failed.
            self._pending = None
            return
        try:
            if pending.ranges:
                first, last = pending.ranges.popleft()
                pending.save.rows(first, last, export_rows(pending.state, first, last))
                return
            pending.save.finish(export_tail(pending.checkpoint), pending.saved_s)
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        self._on_saved()

    def finish(self) -> None:
        """Hand over all that is left."""
        while self.is_pending:
            self.advance()

    def _begin(self, offer: _Offer) -> _Pending | None:
        assert self._cache is not None
        ids, position = offer.token_ids, offer.checkpoint.position
        new_tokens = position - self._cache.lookup(ids)
        if new_tokens < self._least_tokens:
            return None
        save = self._cache.begin(ids, position)
        if save is None:
            return None
        saved_s = new_tokens / offer.tokens_per_s
        return _Pending(offer.state, offer.checkpoint, save, deque(save.ranges), saved_s)
