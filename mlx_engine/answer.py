"""The model's tokens told apart as they come: reasoning, answer, and where the answer ends.

Owns the reading of the vendor's format (where the reasoning ends, which newlines belong to it)
and stop strings. Token ids come first: text is never searched for what a token says.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_engine.tokenizer import SPELLINGS, TextDecoder, Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReasoningDelta:
    """The next part of the reasoning."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """The next part of the answer."""

    text: str


class AnswerReader:
    """Tells reasoning from answer while token ids come in, at a cost linear in their number.

    `</think>` counts as a token only, never as text. Newlines at the start of either part and at
    the end of the reasoning belong to the format. Stop strings are looked for in the answer alone.
    A marker of tool calls is text here; other special tokens are not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        starts_in_reasoning: bool,
        stop: Sequence[str] = (),
        keeps_leading_newlines: bool = False,
    ) -> None:
        special = tokenizer.special
        self.is_finished = False
        self._think_end = special.think_end
        # Only prompts hold them: the model has run on into a turn that is not its own.
        self._foreign = {special.user: "user", special.system: "system", special.bos: "bos"}
        self._decoder = TextDecoder(tokenizer)
        self._in_reasoning = starts_in_reasoning
        self._reasoning: list[str] = []
        self._held_newlines = 0
        self._text: list[str] = []
        self._at_start_of_text = not keeps_leading_newlines
        self._stops = StopStrings(stop)

    @property
    def reasoning(self) -> str:
        """The reasoning so far, without what is held back."""
        return "".join(self._reasoning)

    @property
    def text(self) -> str:
        """The answer so far, without what is held back."""
        return "".join(self._text)

    def push(self, token_id: int) -> Iterator[ReasoningDelta | TextDelta]:
        """Yield what this token adds; sets `is_finished` where the answer ends."""
        if token_id in self._foreign:
            log.warning(
                "the model wrote %s, which only a prompt may hold, so its answer ends there",
                SPELLINGS[self._foreign[token_id]],
            )
            self.is_finished = True
        elif token_id == self._think_end and self._in_reasoning:
            yield from self._take(self._decoder.finish())
            self._in_reasoning = False
        else:
            yield from self._take(self._decoder.push(token_id))

    def finish(self) -> Iterator[ReasoningDelta | TextDelta]:
        """Yield what was held back, as no more tokens come."""
        yield from self._take(self._decoder.finish())
        if self._in_reasoning:
            yield from self._add_reasoning("\n" * self._held_newlines)
        yield from self._add_text(self._stops.finish())

    def _take(self, piece: str) -> Iterator[ReasoningDelta | TextDelta]:
        if self._in_reasoning:
            if not self._reasoning:
                piece = piece.lstrip("\n")
            body = piece.rstrip("\n")
            if body:
                yield from self._add_reasoning("\n" * self._held_newlines + body)
                self._held_newlines = 0
            self._held_newlines += len(piece) - len(body)
            return
        if self._at_start_of_text:
            piece = piece.lstrip("\n")
        if piece:
            self._at_start_of_text = False
            yield from self._add_text(self._stops.push(piece))
            if self._stops.is_found:
                self.is_finished = True

    def _add_reasoning(self, piece: str) -> Iterator[ReasoningDelta]:
        if piece:
            self._reasoning.append(piece)
            yield ReasoningDelta(piece)

    def _add_text(self, piece: str) -> Iterator[TextDelta]:
        if piece:
            self._text.append(piece)
            yield TextDelta(piece)


class StopStrings:
    """Ends a text before the first stop string that is complete, however the text is cut.

    Where two end at the same character the first of the list counts, as in the vendor's parser.
    Each character costs one step of the Knuth-Morris-Pratt automaton for each string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.is_found = False
        self._strings = [(string, _borders(string)) for string in strings]
        self._matched = [0] * len(strings)
        self._held = ""

    def push(self, piece: str) -> str:
        """Return the text that can be given out: all but a possible beginning of a stop string."""
        if self.is_found:
            return ""
        text = self._held + piece
        if not self._strings:
            return text
        for end, character in enumerate(piece, len(self._held) + 1):
            found = self._step(character)
            if found:
                self.is_found = True
                self._held = ""
                return text[: end - found]
        n_free = len(text) - max(self._matched)
        self._held = text[n_free:]
        return text[:n_free]

    def finish(self) -> str:
        """Return what was held back: it became no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """Go one character on; return the length of the string that it completes, or 0."""
        for i, (string, borders) in enumerate(self._strings):
            n = self._matched[i]
            while n and string[n] != character:
                n = borders[n - 1]
            self._matched[i] = n = n + (string[n] == character)
            if n == len(string):
                return n
        return 0


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
