"""Sessions that count what they compute, for the tests of several timelines."""

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_engine.progress import Prefilled, Waiting
from mlx_engine.session import Session
from mlx_engine.sessions import Sessions
from tests.engine.support import Subject, build, tiny_config
from tests.engine.timelines import CountingModel, MemoryCache, best, followed

IDS = np.random.default_rng(3).integers(3, 250, 400).tolist()
OTHER = np.random.default_rng(4).integers(3, 250, 400).tolist()
CHUNK_TOKENS = 16
ROOMY = 10**9


def done_tokens(step: Prefilled | Waiting) -> int:
    """How far a prompt has come that need not wait."""
    assert isinstance(step, Prefilled)
    return step.done_tokens


def subject() -> Subject:
    return build(tiny_config(), 0)


class Made:
    """Sessions over a model that counts, with a clock that goes on a second with each look."""

    def __init__(self, cache: MemoryCache | None = None, **options: Any) -> None:
        self.model = CountingModel(subject())
        self.now_s = 0.0
        options = {"budget_bytes": ROOMY, "least_save_tokens": 1} | options
        self.sessions = Sessions(
            self.model,
            subject().reader,
            chunk_tokens=CHUNK_TOKENS,
            cache=cache,
            clock=self._clock,
            **options,
        )

    def _clock(self) -> float:
        self.now_s += 1
        return self.now_s

    def sync(self, ids: list[int], *anchors: int) -> tuple[Session, mx.array, int]:
        """The session, its logits, and how many tokens were computed; what is told is true."""
        self.model.encoded.clear()
        told: list[int] = []
        session, logits = followed(
            self.sessions.read(ids, anchors), lambda step: told.append(done_tokens(step))
        )
        self.sessions.leave(session)
        assert told[0] == len(ids) - self.model.tokens and told[-1] == len(ids)
        assert session.position == len(ids)
        return session, logits, self.model.tokens

    def answer(self, ids: list[int], n: int, *anchors: int) -> tuple[list[int], int]:
        """A whole turn of n tokens: them, and how many tokens of the prompt were computed."""
        session, logits, computed = self.sync(ids, *anchors)
        tokens: list[int] = []
        for _ in range(n):
            tokens.append(best(logits))
            logits = self.sessions.step(session, tokens[-1])
        self.sessions.end_turn(session)
        self.save()
        return tokens, computed

    def save(self) -> None:
        """Nobody asks for a while."""
        while self.sessions.save_piece():
            pass

    def is_known(self, ids: list[int]) -> bool:
        """Whether a prompt takes no more than an exact retry of it."""
        return self.sync(ids)[2] <= 2
