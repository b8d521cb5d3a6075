"""A scripted agent's conversation, and which of its tokens the model computes again.

A head of system and tools, then requests that carry tool results and questions, all on top of what
the model said before; among them side requests, exact retries, an edit in the middle of an earlier
turn, and a restart. What counts as new is said here, what is enough by whoever asks.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_engine.diskcache.cache import CacheStats, DiskCache, Part
from mlx_engine.engram import EngramReader, EngramRows
from mlx_engine.formats import CacheFormats
from mlx_engine.live import Stats
from mlx_engine.model import Boundary, Model
from mlx_engine.session import shared_tokens
from mlx_engine.sessions import Sessions
from mlx_engine.state import SessionState
from mlx_engine.state_transfer import parts
from mlx_engine.token_ids import TokenIds, as_token_ids

REQUESTS = 40
SIDE_REQUESTS = (5, 33)
RETRIES = (12, 24)
QUESTIONS = (9, 16, 30)
RESTART = 21
EDIT = 28

_USER, _ASSISTANT, _TOOL, _END = 3, 4, 5, 1
_WORDS = (10, 200)


class WatchedModel(Model):
    """Keeps the positions of a sequence that any of its layers computed."""

    computed: set[int]

    @classmethod
    def of(cls, model: Model) -> "WatchedModel":
        """The same model, watched."""
        watched = cls(model.config, model.weights, model.dtype)
        watched.computed = set()
        return watched

    def encode(
        self, token_ids: Sequence[int], state: SessionState, engram_rows: EngramRows | None
    ) -> Boundary:
        first = state.position
        boundary = super().encode(token_ids, state, engram_rows)
        self.computed.update(range(first, state.position))
        return boundary

    def decode(
        self, boundary: Boundary, state: SessionState, *, is_narrow: bool = False
    ) -> tuple[mx.array, mx.array]:
        self.computed.update(range(state.position - boundary.x.shape[0], state.position))
        return super().decode(boundary, state, is_narrow=is_narrow)


@dataclass(frozen=True)
class Sizes:
    """Tokens of the parts of a conversation; those of a result vary from a quarter to this."""

    head: int
    question: int
    result: int
    answer: int
    side: int


@dataclass(frozen=True)
class Request:
    """A prompt and where a later one may part from it."""

    kind: str
    prompt: TokenIds
    anchors: tuple[int, ...]
    is_restarted: bool = False


@dataclass(frozen=True)
class Cost:
    """What the prompt of one request took.

    new: the tokens past the longest prefix that it has in common with any earlier prompt and its
    answer. computed: those that any layer computed. again: those of them that had been computed
    for an earlier request, behind the same tokens.
    """

    number: int
    kind: str
    prompt: int
    new: int
    computed: int
    again: int
    seconds: float


def script(sizes: Sizes, seed: int = 0) -> Generator[Request, TokenIds, None]:
    """The requests; each is answered with what the model said."""
    rng = np.random.default_rng(seed)

    def words(count: int) -> list[int]:
        return rng.integers(*_WORDS, count).tolist()

    def request(kind: str, pieces: Sequence[Sequence[int]], is_restarted: bool = False) -> Request:
        ends = np.cumsum([len(piece) for piece in pieces])
        prompt = [token for piece in pieces for token in piece]
        return Request(kind, as_token_ids(prompt), tuple(ends[:-1].tolist()), is_restarted)

    question = [_USER, *words(sizes.question)]
    pieces: list[list[int]] = [[0, *words(sizes.head)], question]
    results: list[int] = []
    for number in range(1, REQUESTS + 1):
        if number in SIDE_REQUESTS:
            side = [[0, *words(sizes.side)], question, [_ASSISTANT]]
            yield request("side request", side)
            continue
        kind = "question" if number in QUESTIONS else "tool result"
        if number == 1:
            kind = "start"
        elif number in RETRIES:
            kind = "exact retry"
            pieces.pop()
        elif kind == "question":
            pieces.append([_USER, *words(sizes.question)])
        else:
            results.append(len(pieces))
            pieces.append([_TOOL, *words(int(rng.integers(sizes.result // 4, sizes.result)))])
        if number == EDIT:
            kind = "edit"
            edited = pieces[results[-4]]
            edited[len(edited) // 2 :] = words(len(edited) // 3)
        answer = yield request(kind, [*pieces, [_ASSISTANT]], number == RESTART)
        pieces.append([_ASSISTANT, *answer.tolist(), _END])


class Log:
    """What was said and computed before."""

    def __init__(self) -> None:
        self._said: list[TokenIds] = []
        self._computed: list[TokenIds] = []

    def known(self, prompt: TokenIds) -> int:
        """Tokens that a prompt shares with an earlier one and its answer."""
        return max((shared_tokens(each, prompt) for each in self._said), default=0)

    def passed(self, prompt: TokenIds) -> int:
        """Tokens of a prompt that have been computed before."""
        return max((shared_tokens(each, prompt) for each in self._computed), default=0)

    def add(self, said: TokenIds, n_computed: int) -> None:
        """Take in a prompt with its answer, and how much of that was computed."""
        self._said.append(said)
        self._computed.append(said[:n_computed])


@dataclass(frozen=True)
class Outcome:
    """The costs, and the counts of the sessions and the caches, one for each start."""

    costs: list[Cost]
    sessions: list[Stats]
    caches: list[CacheStats]

    @property
    def new(self) -> int:
        """The new tokens of all requests after the first."""
        return sum(cost.new for cost in self.costs[1:])

    @property
    def computed(self) -> int:
        """The tokens that those requests computed."""
        return sum(cost.computed for cost in self.costs[1:])

    def retries(self) -> list[int]:
        """The tokens that each exact retry computed."""
        return [cost.computed for cost in self.costs if cost.kind == "exact retry"]


def converse(
    model: Model,
    engram: EngramReader | None,
    folder: Path,
    sizes: Sizes,
    *,
    budget_bytes: int,
    formats: CacheFormats | None = None,
    on_cost: Callable[[Cost], None] = lambda cost: None,
    **options: Any,
) -> Outcome:
    """Hold the conversation over a disk cache in `folder`; `options` go to Sessions."""
    watched = WatchedModel.of(model)
    shape = tuple(Part(each.ratio, each.row_bytes) for each in parts(model.config, formats))
    log, outcome = Log(), Outcome([], [], [])

    def start() -> tuple[Sessions, DiskCache]:
        cache = DiskCache.open(folder, fingerprint=b"conversation", parts=shape, free_floor_bytes=0)
        sessions = Sessions(
            watched, engram, budget_bytes=budget_bytes, formats=formats, cache=cache, **options
        )
        return sessions, cache

    def stop(sessions: Sessions, cache: DiskCache) -> None:
        sessions.close()
        assert cache.flush(60)
        outcome.sessions.append(sessions.stats())
        outcome.caches.append(cache.stats())
        cache.close()

    sessions, cache = start()
    requests = script(sizes)
    request = next(requests)
    for number in range(1, REQUESTS + 1):
        if request.is_restarted:
            stop(sessions, cache)
            sessions, cache = start()
        watched.computed.clear()
        started_s = time.perf_counter()
        session, logits = sessions.sync(request.prompt, request.anchors)
        answer = [cast(int, mx.argmax(logits).item())]
        seconds = time.perf_counter() - started_s
        prompt, passed = request.prompt, log.passed(request.prompt)
        cost = Cost(
            number,
            request.kind + (" after a restart" if request.is_restarted else ""),
            prompt.size,
            prompt.size - log.known(prompt),
            len(watched.computed),
            sum(position < passed for position in watched.computed),
            seconds,
        )
        while len(answer) < sizes.answer:
            answer.append(cast(int, mx.argmax(sessions.step(session, answer[-1])).item()))
        sessions.end_turn(session)
        # As the worker does until the next request comes.
        while sessions.save_piece():
            pass
        outcome.costs.append(cost)
        on_cost(cost)
        # The last token of an answer is sampled and not computed.
        log.add(np.concatenate([prompt, as_token_ids(answer)]), prompt.size + len(answer) - 1)
        if number < REQUESTS:
            request = requests.send(as_token_ids(answer))
    stop(sessions, cache)
    return outcome
