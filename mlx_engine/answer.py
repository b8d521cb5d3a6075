"""The model's tokens told apart as they come: reasoning, answer, tool calls, and where it all ends.

Owns the reading of the vendor's format (where the reasoning ends, which newlines belong to it) and
stop strings. Token ids come first: text is never searched for what a token says. The markup of
calls is tool_calls's part.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlx_engine.tokenizer import SPELLINGS, TextDecoder, Tokenizer
from mlx_engine.tool_calls import (
    CallEvent,
    CallParser,
    TagLexer,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

__all__ = [
    "AnswerEvent",
    "AnswerReader",
    "ReasoningDelta",
    "StopStrings",
    "TextDelta",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was, by its bytes, and the most likely ones in its place."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True)
class ReasoningDelta:
    """The next part of the reasoning; `logprobs` of the tokens that it ends, if asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class TextDelta:
    """The next part of the answer; `logprobs` of the tokens that it ends, if asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


AnswerEvent = ReasoningDelta | TextDelta | CallEvent


class AnswerReader:
    """Tells reasoning, answer and calls apart while token ids come in, at a linear cost.

    `<think>` and `</think>` count as tokens only, never as text; reasoning that begins anew within
    the answer joins the other. Newlines at the start of either part, at the
    end of the reasoning and before calls belong to the format. Stop strings are looked for in the
    answer alone. Calls of `tools` are told from the text, also where the reasoning was not ended,
    and the answer ends with them; with `drops_calls` calls of any tool are left out. Without either
    a marker of tool calls is text; other special tokens never are. starts_in_call: the prompt has
    opened a call of this tool, or a block for ANY_TOOL. parallel_calls: there may be more than one.
    is_raw: newlines at the start are kept, and nothing is reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        starts_in_reasoning: bool,
        stop: Sequence[str] = (),
        is_raw: bool = False,
        keeps_leading_newlines: bool = False,
        tools: Collection[str] = (),
        drops_calls: bool = False,
        starts_in_call: str | None = None,
        parallel_calls: bool = True,
    ) -> None:
        special = tokenizer.special
        self.reasoning_tokens = 0
        self._think_start = None if is_raw else special.think_start
        self._think_end = special.think_end
        # Only prompts hold them: the model has run on into a turn that is not its own.
        self._foreign = {special.user: "user", special.system: "system", special.bos: "bos"}
        self._met_foreign = False
        self._decoder = TextDecoder(tokenizer)
        self._in_reasoning = starts_in_reasoning
        self._reasoning: list[str] = []
        self._held_newlines = 0
        self._text: list[str] = []
        self._drops_newlines = not (is_raw or keeps_leading_newlines)  # until something else comes
        self._stops = StopStrings(stop)
        self._dsml = special.dsml if tools or drops_calls else None
        self._drops_calls = drops_calls
        self._lexer = TagLexer()
        self._parser = CallParser(None if drops_calls else tools, is_parallel=parallel_calls)
        self._starts_in_call = starts_in_call
        # Of tokens whose text is held back; those of the format's own are dropped with it.
        self._logprobs: list[TokenLogprob] = []

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended before the model ended it."""
        return self._met_foreign or self._stops.found is not None or self._parser.is_done

    @property
    def shows_all(self) -> bool:
        """Whether what was given out says all that the tokens do."""
        is_dropped = self._drops_calls and bool(self._parser.calls)
        is_ended = self._met_foreign or self._stops.found is not None
        return self._parser.shows_all and not is_dropped and not is_ended

    @property
    def is_reasoning(self) -> bool:
        """Whether the reasoning has not ended."""
        return self._in_reasoning

    @property
    def reasoning(self) -> str:
        """The reasoning so far, without what is held back."""
        return "".join(self._reasoning)

    @property
    def text(self) -> str:
        """The answer so far, without what is held back."""
        return "".join(self._text)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that have ended."""
        return [] if self._drops_calls else self._parser.calls

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.found

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> Iterator[AnswerEvent]:
        """Yield what this token adds; a delta has the `logprob` of every token that it ends."""
        self.reasoning_tokens += self._in_reasoning
        if self._starts_in_call is not None:
            tool, self._starts_in_call = self._starts_in_call, None
            yield from self._take_all(self._parser.open(tool))
        if token_id in self._foreign:
            log.warning(
                "the model wrote %s, which only a prompt may hold, so its answer ends there",
                SPELLINGS[self._foreign[token_id]],
            )
            self._met_foreign = True
        elif token_id == self._think_end and self._in_reasoning:
            yield from self._end_part(is_cut=False)
            self._begin_text()
        elif token_id == self._think_start and self._may_reason():
            yield from self._end_part(is_cut=False)
            yield from self._begin_reasoning()
        elif token_id == self._dsml:
            yield from self._add(self._decoder.finish())
            self._logprobs += [logprob] if logprob else []
            for item in self._lexer.marker():
                yield from self._take_all(self._parser.push(item))
        else:
            self._logprobs += [logprob] if logprob else []
            yield from self._add(self._decoder.push(token_id))

    def finish(self, *, is_cut: bool = False) -> Iterator[AnswerEvent]:
        """Yield what was held back, as no more tokens come; is_cut: the model had not ended."""
        yield from self._end_part(is_cut=is_cut)
        if self._in_reasoning and not self._drops_newlines:
            yield from self._add_reasoning("\n" * self._held_newlines)
        elif not self._in_reasoning:
            yield from self._add_text(self._stops.push("\n" * self._held_newlines))
        yield from self._add_text(self._stops.finish())

    def _end_part(self, *, is_cut: bool) -> Iterator[AnswerEvent]:
        """Give out what waits for the end of a character, a tag or a block."""
        yield from self._add(self._decoder.finish())
        rest, is_tag = self._lexer.finish()
        yield from self._take_all(self._parser.finish(rest, is_tag=is_tag, is_cut=is_cut))

    def _begin_text(self) -> None:
        self._drops_newlines = not self._text and (self._in_reasoning or self._drops_newlines)
        self._in_reasoning = False
        self._held_newlines = 0
        self._logprobs.clear()

    def _may_reason(self) -> bool:
        return not self._in_reasoning and not self._parser.has_begun

    def _begin_reasoning(self) -> Iterator[AnswerEvent]:
        yield from self._add_text(self._stops.push("\n" * self._held_newlines))
        self._in_reasoning = self._drops_newlines = True
        self._held_newlines = 2 if self._reasoning else 0  # apart from the other

    def _add(self, piece: str) -> Iterator[AnswerEvent]:
        if not piece:
            return
        if self._dsml is None:
            yield from self._take(piece)
            return
        for item in self._lexer.text(piece):
            yield from self._take_all(self._parser.push(item))

    def _take_all(self, items: Iterable[str | CallEvent]) -> Iterator[AnswerEvent]:
        for item in items:
            if isinstance(item, str):
                yield from self._take(item)
                continue
            if isinstance(item, ToolCallStart):
                self._begin_text()
                yield from self._add_text(self._stops.finish())
            if not self._drops_calls:
                yield item

    def _take(self, piece: str) -> Iterator[AnswerEvent]:
        if self._drops_newlines and piece:
            piece = piece.lstrip("\n")
            if not piece:
                self._logprobs.clear()
        if not piece:
            return
        self._drops_newlines = False
        if self._in_reasoning:
            yield from self._add_reasoning(self._without_last_newlines(piece))
        elif self._dsml is None:
            yield from self._add_text(self._stops.push(piece))
        else:
            yield from self._add_text(self._stops.push(self._without_last_newlines(piece)))

    def _without_last_newlines(self, piece: str) -> str:
        """Hold back newlines until something else follows them."""
        body = piece.rstrip("\n")
        held = self._held_newlines
        self._held_newlines = len(piece) - len(body) + (0 if body else held)
        return "\n" * held + body if body else ""

    def _add_reasoning(self, piece: str) -> Iterator[ReasoningDelta]:
        if piece:
            self._reasoning.append(piece)
            yield ReasoningDelta(piece, self._ended())

    def _add_text(self, piece: str) -> Iterator[TextDelta]:
        if piece:
            self._text.append(piece)
            yield TextDelta(piece, self._ended())

    def _ended(self) -> tuple[TokenLogprob, ...]:
        ended = tuple(self._logprobs)
        self._logprobs.clear()
        return ended


class StopStrings:
    """Ends a text before the first stop string that is complete, however the text is cut.

    Where two end at the same character the first of the list counts, as in the vendor's parser.
    Each character costs one step of the Knuth-Morris-Pratt automaton for each string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.found: str | None = None
        self._strings = [(string, _borders(string)) for string in strings]
        self._matched = [0] * len(strings)
        self._held = ""

    @property
    def is_found(self) -> bool:
        """Whether the text has ended."""
        return self.found is not None

    def push(self, piece: str) -> str:
        """Return the text that can be given out: all but a possible beginning of a stop string."""
        if self.is_found:
            return ""
        text = self._held + piece
        if not self._strings:
            return text
        for end, character in enumerate(piece, len(self._held) + 1):
            found = self._step(character)
            if found is not None:
                self.found = found
                self._held = ""
                return text[: end - len(found)]
        n_free = len(text) - max(self._matched)
        self._held = text[n_free:]
        return text[:n_free]

    def finish(self) -> str:
        """Return what was held back: it became no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Go one character on; return the string that it completes."""
        for i, (string, borders) in enumerate(self._strings):
            n = self._matched[i]
            while n and string[n] != character:
                n = borders[n - 1]
            self._matched[i] = n = n + (string[n] == character)
            if n == len(string):
                return string
        return None


def _borders(string: str) -> list[int]:
    """For every prefix, the length of its longest proper prefix that is also its end."""
    borders = [0] * len(string)
    n = 0
    for i in range(1, len(string)):
        while n and string[i] != string[n]:
            n = borders[n - 1]
        n += string[i] == string[n]
        borders[i] = n
    return borders
