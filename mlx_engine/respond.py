"""From a request to the events of its answer: text, reasoning, progress and the end.

Owns the request with its checks, and the course of one answer. Knows the engine only as something
that continues token ids; how token ids become text is answer's part.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, field
from typing import Literal, Protocol, Self

from deepseek_recipe import Conversation

from mlx_engine import prompt as chat
from mlx_engine.answer import AnswerReader, ReasoningDelta, TextDelta
from mlx_engine.engram_table import EngramStats
from mlx_engine.errors import BadRequest, Cancelled
from mlx_engine.sampling import Sampling
from mlx_engine.tokenizer import Tokenizer, check_unicode

FinishReason = Literal["stop", "length", "cancelled"]


class TokenEngine(Protocol):
    """What answering needs of the engine."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def context_tokens(self) -> int: ...

    def engram_stats(self) -> EngramStats:
        """Table rows asked for, found in memory and read since the engine was loaded."""
        ...

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        min_p: float,
        seed: int | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> Generator[int, None, Literal["stop", "length"]]:
        """Yield the tokens after `token_ids`, without the EOS; return why they end.

        `on_progress` is told the prompt's tokens done and in all: first those known from an
        earlier call, then after each chunk; what it raises stops the work. Raises ContextTooLong
        when prompt and answer pass the context.
        """
        ...


@dataclass(frozen=True)
class Request:
    """What to answer, and how.

    prompt: one user message, or a conversation; with `raw` the text to continue, without chat
    format. system: put before the conversation. effort: how long to reason first. max_tokens: of
    reasoning and answer together, None for the vendor's default within the context. stop: the
    answer ends before the first of these. Raises BadRequest for what cannot be answered.
    """

    prompt: str | Sequence[chat.Message]
    system: str | None = None
    effort: chat.Effort = "high"
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    raw: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str):
            check_unicode(self.prompt)
            if not self.prompt.strip():
                raise BadRequest("the prompt is empty: give some text to answer")
        if self.raw and (self.system is not None or not isinstance(self.prompt, str)):
            raise BadRequest(
                "raw continues one text without chat format: leave out system and messages"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadRequest(f"max_tokens is {self.max_tokens}, it must be at least 1")
        if isinstance(self.stop, str):
            raise BadRequest("stop is one string, it must be a list of strings")
        if not all(self.stop):
            raise BadRequest("a stop string is empty, it must have at least one character")
        self._conversation()  # has checks of its own

    def encode(self, tokenizer: Tokenizer) -> chat.Prompt:
        """The prompt as token ids."""
        if self.raw and isinstance(self.prompt, str):
            return chat.encode_raw(self.prompt, tokenizer)
        return chat.encode(self._conversation(), tokenizer)

    def answer_tokens(self, prompt_tokens: int, context_tokens: int) -> int:
        """How many tokens the answer may have: `max_tokens`, or the vendor's default."""
        if self.max_tokens is not None:
            return self.max_tokens
        effort = "off" if self.raw else self.effort
        return chat.default_max_tokens(effort, prompt_tokens, context_tokens)

    def _conversation(self) -> Conversation:
        messages = [] if self.system is None else [chat.Message("system", self.system)]
        if isinstance(self.prompt, str):
            messages.append(chat.Message("user", self.prompt))
        else:
            messages += self.prompt
        return chat.conversation(messages, self.effort)


@dataclass(frozen=True)
class Progress:
    """How far a stage of the work has come."""

    stage: Literal["prefill"]
    done_tokens: int
    total_tokens: int
    elapsed_s: float


@dataclass(frozen=True)
class Timings:
    """Wall-clock times: `prefill_s` up to the first token, `decode_s` from there to the end."""

    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float

    @classmethod
    def measure(
        cls, computed_tokens: int, completion_tokens: int, prefill_s: float, total_s: float
    ) -> Self:
        """Take the rates from the prompt's tokens that were computed and the answer's."""
        decode_s = total_s - prefill_s
        decoded_tokens = max(completion_tokens - 1, 0)  # the first comes with the prefill
        return cls(
            prefill_s=prefill_s,
            decode_s=decode_s,
            prefill_tokens_per_s=computed_tokens / prefill_s if prefill_s else 0.0,
            decode_tokens_per_s=decoded_tokens / decode_s if decode_s else 0.0,
        )


@dataclass(frozen=True)
class End:
    """The last event: the whole answer and its account.

    finish_reason: "stop" at the end of the turn or a stop string, "length" at max_tokens.
    completion_tokens counts reasoning and answer. engram counts the table rows of this answer, its
    prompt included.
    """

    text: str
    reasoning: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings
    engram: EngramStats
    finish_reason: FinishReason


Event = Progress | ReasoningDelta | TextDelta | End


def respond(
    engine: TokenEngine,
    request: Request,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[Event]:
    """Answer a request: yield its events as they come, the last one an End.

    Progress is yielded before and after the prefill; `on_progress` is told of every chunk while
    the prefill runs, inside which an iterator has nothing to yield to. `cancelled` is asked after
    each chunk and token, and ends the answer with what was said. Closing the iterator closes the
    engine's. Raises what the engine's `generate` does.
    """
    prompt = request.encode(engine.tokenizer)
    prompt_tokens = len(prompt.token_ids)
    cached_tokens: int | None = None
    prefilled_tokens = 0
    completion_tokens = 0
    prefill_s: float | None = None
    engram_before = engine.engram_stats()
    started_s = time.perf_counter()

    def report(done_tokens: int, total_tokens: int) -> None:
        nonlocal cached_tokens, prefilled_tokens
        if cached_tokens is None:
            cached_tokens = done_tokens
        prefilled_tokens = done_tokens - cached_tokens
        if cancelled():
            raise Cancelled("the answer was cancelled during the prefill")
        if on_progress is not None:
            elapsed_s = time.perf_counter() - started_s
            on_progress(Progress("prefill", done_tokens, total_tokens, elapsed_s))

    reader = AnswerReader(
        engine.tokenizer,
        starts_in_reasoning=prompt.starts_in_reasoning,
        stop=request.stop,
        keeps_leading_newlines=request.raw,
    )
    tokens = engine.generate(
        prompt.token_ids,
        max_tokens=request.answer_tokens(prompt_tokens, engine.context_tokens),
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        min_p=request.sampling.min_p,
        seed=request.sampling.seed,
        on_progress=report,
    )
    finish_reason: FinishReason = "cancelled"
    with closing(tokens):
        yield Progress("prefill", 0, prompt_tokens, 0.0)
        while not cancelled():
            try:
                token_id = next(tokens)
            except StopIteration as end:
                finish_reason = end.value
                break
            except Cancelled:
                break
            completion_tokens += 1
            if prefill_s is None:
                prefill_s = time.perf_counter() - started_s
                yield Progress("prefill", prompt_tokens, prompt_tokens, prefill_s)
            yield from reader.push(token_id)
            if reader.is_finished:
                finish_reason = "stop"
                break
    total_s = time.perf_counter() - started_s
    yield from reader.finish()
    yield End(
        text=reader.text,
        reasoning=reader.reasoning,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens or 0,
        completion_tokens=completion_tokens,
        timings=Timings.measure(prefilled_tokens, completion_tokens, prefill_s or total_s, total_s),
        engram=_since(engram_before, engine.engram_stats()),
        finish_reason=finish_reason,
    )


def _since(before: EngramStats, now: EngramStats) -> EngramStats:
    return EngramStats(*(n - b for b, n in zip(astuple(before), astuple(now), strict=True)))
