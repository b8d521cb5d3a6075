"""Random sequences of all that can happen to sessions, beside a model that always recomputes."""

import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.saving import Cache
from mlx_engine.session import Session
from mlx_engine.sessions import Sessions
from mlx_engine.state import SessionState
from mlx_engine.state_transfer import parts
from tests.engine.counted import done_tokens
from tests.engine.support import Subject, build, tiny_config
from tests.engine.timelines import (
    CountingModel,
    MemoryCache,
    Stopped,
    best,
    followed,
    stop_after,
)
from tests.unit.arrays import host
from tests.unrounded import UNROUNDED

# Without the cache's roundings every way to compute a state agrees closely.
TOLERANCE = 5e-5
CHUNK_TOKENS = 16
MAX_TOKENS = 80


@lru_cache
def subject() -> Subject:
    return build(tiny_config(), 0)


@lru_cache(maxsize=256)
def recomputed(ids: tuple[int, ...]) -> NDArray[np.float32]:
    """The logits after every token, at full depth and in one piece."""
    state = SessionState(subject().config, UNROUNDED)
    rows = subject().engram_rows(ids, 0, len(ids))
    return host(subject().model.forward(ids, state, rows))


@dataclass(frozen=True)
class Prompt:
    """An earlier prompt, cut somewhere, with new tokens after it; then an answer.

    earlier: counted from the last. restart: of all sessions before it; "clean" ones are closed,
    "lost" ones leave what the cache has. breaks_after: chunks before it is cancelled, or layers
    before one fails; None for a whole turn.
    """

    restart: Literal["", "clean", "lost"]
    earlier: int
    cut: float
    new: int
    seed: int
    anchor: float
    answer: int
    breaks_after: int | None
    is_failure: bool


PROMPTS = st.builds(
    Prompt,
    restart=st.sampled_from(["", "", "", "", "clean", "lost"]),
    earlier=st.sampled_from([1, 1, 1, 2, 3, 6]),
    cut=st.sampled_from([0.0, 0.3, 0.7, 0.85, 0.9, 0.95, 1.0]),
    new=st.integers(1, 30),
    seed=st.integers(0, 3),
    anchor=st.floats(0, 1),
    answer=st.integers(0, 6),
    breaks_after=st.none() | st.integers(0, 30),
    is_failure=st.booleans(),
)


class World:
    """Sessions over a cache, and all prompts so far with their answers."""

    def __init__(
        self, budget_bytes: int, folder: Path | None = None, space_bytes: int = 10**9
    ) -> None:
        self.model = CountingModel(subject())
        self.folder = folder
        self.space_bytes = space_bytes
        self.disk_evictions = 0
        self.cache: Cache = MemoryCache()
        self.budget_bytes = budget_bytes
        self.known: list[tuple[int, ...]] = []
        self.last: Session | None = None
        self.start()

    def start(self) -> None:
        if self.folder is not None:
            shape = parts(subject().config, UNROUNDED)
            self.cache = DiskCache.open(
                self.folder,
                fingerprint=b"sequences",
                parts=shape,
                space_bytes=self.space_bytes,
                free_floor_bytes=0,
            )
        self.sessions = Sessions(
            self.model,
            subject().reader,
            budget_bytes=self.budget_bytes,
            chunk_tokens=CHUNK_TOKENS,
            formats=UNROUNDED,
            cache=self.cache,
            least_save_tokens=8,
            clock=lambda: 0.0,
        )

    def do(self, op: Prompt) -> None:
        if op.restart:
            self.stop(op.restart == "clean")
            self.start()
        base = self.known[-op.earlier % len(self.known)] if self.known else ()
        new = np.random.default_rng(op.seed).integers(3, 250, op.new).tolist()
        ids = (*base[: int(op.cut * len(base))], *new)[:MAX_TOKENS]
        answer = self.turn(ids, op)
        self.known.append((*ids, *answer))

    def check_checkpoints(self) -> None:
        """A session goes on from any of its checkpoints as it did."""
        if self.last is not None:
            ids = tuple(self.last.token_ids.tolist())
            for checkpoint in self.last.checkpoints:
                at = checkpoint.position
                if at < len(ids):
                    logits = self.last.fork(checkpoint).sync(ids[: at + 1])
                    expected = recomputed(ids)[at]
                    np.testing.assert_allclose(host(logits), expected, atol=TOLERANCE)

    def stop(self, is_clean: bool) -> None:
        if is_clean:
            self.sessions.close()
        if isinstance(self.cache, DiskCache):
            # Otherwise what is queued is lost, and what is being written is not.
            self.cache.close(60 if is_clean else 0)
            self.disk_evictions += self.cache.stats().evicted

    def turn(self, ids: tuple[int, ...], op: Prompt) -> list[int]:
        anchors = [int(op.anchor * len(ids))]
        if op.breaks_after is not None and self.breaks(ids, anchors, op):
            return []
        told: list[int] = []
        self.model.encoded.clear()
        session, logits = followed(
            self.sessions.read(ids, anchors), lambda step: told.append(done_tokens(step))
        )
        assert told[0] + self.model.tokens == len(ids)
        self.agrees(session, ids, logits)
        answer: list[int] = []
        for i in range(op.answer):
            answer.append(best(logits))
            logits = self.sessions.step(session, answer[-1])
            if i + 1 == op.answer:
                self.agrees(session, (*ids, *answer), logits)
        self.sessions.leave(session)
        # Who only leaves an answer does not say so.
        if op.seed:
            self.sessions.end_turn(session)
            self.fits(session)
        self.last = session
        return answer

    def breaks(self, ids: tuple[int, ...], anchors: list[int], op: Prompt) -> bool:
        assert op.breaks_after is not None
        try:
            if op.is_failure:
                self.model.layers_left = op.breaks_after
                session, _ = followed(self.sessions.read(ids, anchors), lambda _: None)
            else:
                steps = self.sessions.read(ids, anchors)
                session, _ = followed(steps, stop_after(op.breaks_after % 6))
            self.sessions.leave(session)
        except (Stopped, RuntimeError):
            return op.seed % 2 == 0
        finally:
            self.model.layers_left = None
        return False

    def agrees(self, session: Session, ids: tuple[int, ...], logits: mx.array) -> None:
        assert session.token_ids.tolist() == list(ids)
        np.testing.assert_allclose(host(logits), recomputed(ids)[-1], atol=TOLERANCE)

    def fits(self, session: Session) -> None:
        """Within the budget, or no more than the one session that is at work."""
        stats = self.sessions.stats()
        held_bytes = self.sessions.n_bytes - stats.leaving_bytes
        assert held_bytes <= self.budget_bytes or stats.sessions == 1
        positions = [each.position for each in session.checkpoints]
        assert positions == sorted(set(positions)) and all(at % 2 == 0 for at in positions)


@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(
    st.lists(PROMPTS, min_size=6, max_size=12),
    st.sampled_from([400_000, 1_200_000, 10**9]),
)
def test_every_answer_is_the_recomputed_one(ops: list[Prompt], budget: int) -> None:
    world = World(budget)
    for op in ops:
        world.do(op)
    world.check_checkpoints()


def test_every_answer_over_a_disk_is_the_recomputed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that sequences as short as these cross many edges of blocks.
    for name, module in [*sys.modules.items()]:
        if name.startswith("mlx_engine.diskcache.") and hasattr(module, "BLOCK_TOKENS"):
            monkeypatch.setattr(module, "BLOCK_TOKENS", 16)
    evictions = 0

    @settings(deadline=None, max_examples=10, derandomize=True, database=None)
    @given(
        st.lists(PROMPTS, min_size=6, max_size=10),
        st.sampled_from([400_000, 10**9]),
        st.sampled_from([250_000, 10**9]),
    )
    def answers(ops: list[Prompt], budget: int, space_bytes: int) -> None:
        nonlocal evictions
        with TemporaryDirectory() as folder:
            world = World(budget, Path(folder) / "cache", space_bytes)
            for op in ops:
                world.do(op)
            world.stop(is_clean=True)
            evictions += world.disk_evictions

    answers()
    assert evictions, "no folder was ever full: lower its limit"
