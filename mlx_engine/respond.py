"""From a request to the events of its answer: text, reasoning, tool calls, progress and the end.

Owns the course of one answer, and which answers are kept for later prompts. Knows the engine only
as something that continues token ids; how token ids become text is answer's part.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from typing import Literal, Protocol, Self

from mlx_engine import prompt as chat
from mlx_engine.answer import AnswerReader, ReasoningDelta, TextDelta
from mlx_engine.engram_table import EngramStats
from mlx_engine.errors import Cancelled
from mlx_engine.request import Request
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.tool_calls import CallEvent, ToolCall
from mlx_engine.turns import Shown, TurnRecord

__all__ = ["End", "Event", "Prefilled", "Progress", "Request", "Timings", "TokenEngine", "respond"]

FinishReason = Literal["stop", "tool_calls", "length", "cancelled"]


class TokenEngine(Protocol):
    """What answering needs of the engine."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def turns(self) -> TurnRecord:
        """The tokens of earlier answers."""
        ...

    def engram_stats(self) -> EngramStats:
        """Table rows asked for, found in memory and read since the engine was loaded."""
        ...

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        anchors: Sequence[int],
        max_tokens: int,
        temperature: float,
        top_p: float,
        min_p: float,
        seed: int | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> "Generator[int | Prefilled, None, Literal['stop', 'length']]":
        """Yield the tokens after `token_ids`, without the EOS; return why they end.

        anchors: lengths of the prompt's beginnings that later prompts may share, ascending.
        `on_progress` is told the prompt's tokens done and in all: first those known from an
        earlier call, then after each chunk; what it raises stops the work. An engine that can come
        back between chunks yields the same numbers as Prefilled instead, ahead of the tokens.
        Raises ContextTooLong when prompt and answer pass the context.
        """
        ...


@dataclass(frozen=True)
class Prefilled:
    """What an engine yields after each chunk of a prompt: its tokens done and in all."""

    done_tokens: int
    total_tokens: int


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

    finish_reason: "stop" at the end of the turn or a stop string, "tool_calls" where the turn
    ended with calls, "length" at max_tokens, with or without calls. completion_tokens counts
    reasoning and answer, reasoning_tokens the reasoning in it. engram counts the table rows of
    this answer, its prompt included. stop_string: the one that ended the answer.
    """

    text: str
    reasoning: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings
    engram: EngramStats
    finish_reason: FinishReason
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None
    reasoning_tokens: int = 0


Event = Progress | ReasoningDelta | TextDelta | CallEvent | End


def respond(
    engine: TokenEngine,
    request: Request,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[Event]:
    """Answer a request: yield its events as they come, the last one an End.

    Progress is yielded before and after the prefill, and between its chunks where the engine comes
    back there; where it does not, `on_progress` is told of every chunk. `cancelled` is asked after
    each chunk and token, and ends the answer with what was said. The answer's tokens are kept in
    the engine's record of turns. Closing the iterator closes the engine's. Raises what the engine's
    `generate` does.
    """
    prompt = request.encode(engine.tokenizer, engine.turns)
    prompt_tokens = len(prompt.token_ids)
    cached_tokens: int | None = None
    prefilled_tokens = 0
    sampled: list[int] = []
    prefill_s: float | None = None
    engram_before = engine.engram_stats()
    started_s = time.perf_counter()

    def progress(done: Prefilled) -> Progress:
        nonlocal cached_tokens, prefilled_tokens
        if cached_tokens is None:
            cached_tokens = done.done_tokens
        prefilled_tokens = done.done_tokens - cached_tokens
        elapsed_s = time.perf_counter() - started_s
        return Progress("prefill", done.done_tokens, done.total_tokens, elapsed_s)

    def report(done_tokens: int, total_tokens: int) -> None:
        told = progress(Prefilled(done_tokens, total_tokens))
        if cancelled():
            raise Cancelled("the answer was cancelled during the prefill")
        if on_progress is not None:
            on_progress(told)

    reader = AnswerReader(
        engine.tokenizer,
        starts_in_reasoning=prompt.starts_in_reasoning,
        stop=request.stop,
        is_raw=request.raw,
        keeps_leading_newlines=not prompt.turn_prefix,
        tools=request.tools if request.parses_tools else (),
        drops_calls=request.parses_tools and request.drops_calls,
        starts_in_call=request.starts_in_call,
        parallel_calls=request.parallel_calls,
    )
    tokens = engine.generate(
        prompt.token_ids,
        anchors=prompt.anchors,
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
            if isinstance(token_id, Prefilled):
                yield progress(token_id)
                continue
            sampled.append(token_id)
            if prefill_s is None:
                prefill_s = time.perf_counter() - started_s
                yield Progress("prefill", prompt_tokens, prompt_tokens, prefill_s)
            yield from reader.push(token_id)
            if reader.is_finished:
                finish_reason = "stop"
                break
    total_s = time.perf_counter() - started_s
    yield from reader.finish(is_cut=finish_reason != "stop")
    if finish_reason == "stop" and reader.calls:
        finish_reason = "tool_calls"
    if _is_turn(prompt, sampled, reader, finish_reason, engine.tokenizer):
        call_ids = [call.id for call in reader.calls]
        engine.turns.put(
            prompt.turn_prefix,
            Shown(reader.text, reader.reasoning, call_ids, request.signature),
            [*prompt.opening, *sampled],
            starts_in_reasoning=prompt.starts_in_reasoning,
        )
    yield End(
        text=reader.text,
        reasoning=reader.reasoning,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens or 0,
        completion_tokens=len(sampled),
        timings=Timings.measure(prefilled_tokens, len(sampled), prefill_s or total_s, total_s),
        engram=_since(engram_before, engine.engram_stats()),
        finish_reason=finish_reason,
        tool_calls=tuple(reader.calls),
        stop_string=reader.stop_string,
        reasoning_tokens=reader.reasoning_tokens,
    )


def _is_turn(
    prompt: chat.Prompt,
    sampled: Sequence[int],
    reader: AnswerReader,
    finish_reason: FinishReason,
    tokenizer: Tokenizer,
) -> bool:
    """Whether the tokens are what was shown, and can stand between a header and an end mark.

    They say more than that where a stop string ended the answer, or a call was closed for the
    model. Cut within the reasoning, they would leave it open in every later prompt, and a block of
    calls likewise. A later prompt with an image token is refused.
    """
    if not prompt.turn_prefix or not reader.shows_all or tokenizer.special.image in sampled:
        return False
    if finish_reason in ("stop", "tool_calls"):
        return True
    return bool(sampled) and not reader.is_reasoning and not reader.calls


def _since(before: EngramStats, now: EngramStats) -> EngramStats:
    return EngramStats(*(n - b for b, n in zip(astuple(before), astuple(now), strict=True)))
