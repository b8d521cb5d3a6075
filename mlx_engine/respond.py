"""From a request to the events of its answer: text, reasoning, tool calls, progress and the end.

Owns the course of one answer, and which answers are kept for later prompts. Knows the engine only
as something that continues token ids; how token ids become text is answer's part.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from mlx_engine import prompt as chat
from mlx_engine.answer import AnswerReader, ReasoningDelta, TextDelta, TokenLogprob
from mlx_engine.engram_table import EngramStats
from mlx_engine.errors import Cancelled
from mlx_engine.progress import Prefilled, Waiting
from mlx_engine.request import Request
from mlx_engine.sampling import ScoredToken
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.tool_calls import CallEvent, ToolCall
from mlx_engine.turns import Shown, TurnRecord

__all__ = [
    "End",
    "Event",
    "Prefilled",
    "Progress",
    "Request",
    "Steps",
    "Timings",
    "TokenEngine",
    "respond",
]

log = logging.getLogger(__name__)

# Prompts that have less in common are not of one conversation.
_TOLD_TOKENS = 256

# Of an answer: ahead of the tokens how far the prompt has come; at the end why they end.
Steps = Generator[int | ScoredToken | Prefilled | Waiting, None, Literal["stop", "length"]]

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
        top_k: int,
        logprobs: int | None,
    ) -> Steps:
        """Yield the tokens after `token_ids`, without the EOS; return why they end.

        anchors: lengths of the prompt's beginnings that later prompts may share, ascending. Ahead
        of the tokens Prefilled is yielded, first with the tokens that are known from an earlier
        call, then after each chunk, and Waiting where it is for another call to go on. With
        `logprobs` tokens are scored, with so many of the most likely. Raises ContextTooLong when
        prompt and answer pass the context.
        """
        ...


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Progress:
    """How far a stage of the work has come.

    stage: "waiting" while another answer reads what both prompts begin with, or holds the memory;
    "decode" after each token, with those of the answer and the most that it may have.
    is_due: whether there may be more by now; asking before costs time for nothing.
    waited_s: of elapsed_s, what the engine did not work for this answer.
    """

    stage: Literal["prefill", "waiting", "decode"]
    done_tokens: int
    total_tokens: int
    elapsed_s: float
    is_due: Callable[[], bool] = field(default=_always, compare=False, repr=False)
    waited_s: float = 0.0


@dataclass(frozen=True)
class Timings:
    """The time for an answer: up to the first token, and from there to the end.

    An engine counts its work for this answer alone; whoever asks a server, all that passes.
    """

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
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[Event]:
    """Answer a request: yield its events as they come, the last one an End.

    Progress is yielded before and after the prefill, between its chunks, after each token, and
    while another answer must go on first. `cancelled` is asked while the prompt is encoded and
    after each chunk and token, and ends the answer with what was said. The answer's tokens are kept
    in the engine's record of turns. Closing the iterator closes the engine's. Raises what the
    engine's `generate` does.
    """
    bounds = chat.Bounds(engine.context_tokens, cancelled)
    try:
        prompt = request.encode(engine.tokenizer, engine.turns, bounds)
    except Cancelled:
        yield End("", "", 0, 0, 0, Timings(0, 0, 0, 0), EngramStats(), "cancelled")
        return
    prompt_tokens = len(prompt.token_ids)
    cached_tokens: int | None = None
    prefilled_tokens = 0
    sampled: list[int] = []
    prefill_s: float | None = None
    engram_before = engine.engram_stats()
    times = _Times()

    def progress(step: Prefilled | Waiting) -> Progress:
        nonlocal cached_tokens, prefilled_tokens
        if isinstance(step, Waiting):
            return times.progress("waiting", 0, prompt_tokens, step.is_due)
        if cached_tokens is None:
            cached_tokens = step.done_tokens
            _tell_parting(prompt, step)
        prefilled_tokens = step.done_tokens - cached_tokens
        return times.progress("prefill", step.done_tokens, step.total_tokens)

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
    max_tokens = request.answer_tokens(prompt_tokens, engine.context_tokens)
    tokens = engine.generate(
        prompt.token_ids,
        anchors=prompt.anchors,
        max_tokens=max_tokens,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        min_p=request.sampling.min_p,
        seed=request.sampling.seed,
        top_k=request.sampling.top_k,
        logprobs=request.logprobs,
    )
    finish_reason: FinishReason = "cancelled"
    with closing(tokens):
        yield Progress("prefill", 0, prompt_tokens, 0.0)
        while not cancelled():
            try:
                step = times.next(tokens)
            except StopIteration as end:
                finish_reason = end.value
                break
            if isinstance(step, Prefilled | Waiting):
                yield progress(step)
                continue
            token_id, logprob = _scored(step, engine.tokenizer)
            sampled.append(token_id)
            if prefill_s is None:
                prefill_s = times.spent_s
                yield times.progress("prefill", prompt_tokens, prompt_tokens)
            yield from reader.push(token_id, logprob)
            # Text may be held back for long, and whoever goes on with answers has others too.
            yield times.progress("decode", len(sampled), max_tokens)
            if reader.is_finished:
                finish_reason = "stop"
                break
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
        timings=Timings.measure(
            prefilled_tokens, len(sampled), prefill_s or times.spent_s, times.spent_s
        ),
        engram=engine.engram_stats() - engram_before,
        finish_reason=finish_reason,
        tool_calls=tuple(reader.calls),
        stop_string=reader.stop_string,
        reasoning_tokens=reader.reasoning_tokens,
    )


class _Times:
    """Seconds since now, and those of them in which the engine worked for an answer."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self.spent_s = 0.0

    @property
    def waited_s(self) -> float:
        return time.perf_counter() - self._started_s - self.spent_s

    def next(self, steps: Steps) -> int | ScoredToken | Prefilled | Waiting:
        """The next step, for which the engine works."""
        before_s = time.perf_counter()
        try:
            return next(steps)
        finally:
            self.spent_s += time.perf_counter() - before_s

    def progress(
        self,
        stage: Literal["prefill", "waiting", "decode"],
        done_tokens: int,
        total_tokens: int,
        is_due: Callable[[], bool] = _always,
    ) -> Progress:
        waited_s = self.waited_s
        elapsed_s = waited_s + self.spent_s
        return Progress(stage, done_tokens, total_tokens, elapsed_s, is_due, waited_s)


def _tell_parting(prompt: chat.Prompt, first: Prefilled) -> None:
    """Log where a prompt goes another way than an earlier one: why its rest is read anew."""
    at = first.parted_at or 0
    if at < _TOLD_TOKENS:
        return
    number = bisect_right(prompt.turns, at, key=lambda turn: turn[0])
    log.info(
        "a prompt of %d tokens parts from an earlier one at token %d, turn %d (%s): %d are known",
        first.total_tokens,
        at,
        number,
        prompt.turns[number - 1][1] if number else "text",
        first.done_tokens,
    )


def _scored(step: int | ScoredToken, tokenizer: Tokenizer) -> tuple[int, TokenLogprob | None]:
    if isinstance(step, int):
        return step, None
    top = tuple((tokenizer.spelling(token_id), logprob) for token_id, logprob in step.top)
    return step.token_id, TokenLogprob(tokenizer.spelling(step.token_id), step.logprob, top)


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
