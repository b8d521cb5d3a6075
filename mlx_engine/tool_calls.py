"""The model's tool calls: markup to events, at any cut of the tokens.

Owns the grammar of the DSML markup and what happens where it breaks. A tag is one only if it holds
the marker's token: text that spells the marker stays text. What is text beside the calls is
answer's part.
"""

import json
import logging
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from mlx_engine.tokenizer import SPELLINGS

log = logging.getLogger(__name__)

# No tool can have this name.
ANY_TOOL = "*"


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins; what follows up to its end belongs to it."""

    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """The next part of the call's arguments, a JSON object when all are put together."""

    json: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The call's arguments are complete."""


CallEvent = ToolCallStart | ToolCallDelta | ToolCallEnd


@dataclass(frozen=True)
class ToolCall:
    """A whole call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


def new_call_id() -> str:
    """An id that no other call has, in a form that every protocol takes."""
    return f"call_{secrets.token_hex(12)}"


_Kind = Literal["calls", "invoke", "parameter"]

# What the model was taught, the V4 series' names, and others that it has been seen to write.
_KINDS: dict[str, _Kind] = {
    "calls": "calls",
    "tool_calls": "calls",
    "toolcalls": "calls",
    "function_calls": "calls",
    "invoke": "invoke",
    "parameter": "parameter",
}
_NAME = "|".join(sorted(_KINDS, key=len, reverse=True))
_BEGINNING = "|".join(sorted({n[:i] for n in _KINDS for i in range(len(n))}, key=len, reverse=True))
_ATTRIBUTE = r'[ \n]+[a-z]+="[^"<]*"'
_TAG = re.compile(rf" ?({_NAME})((?:{_ATTRIBUTE})*)[ \n]*(/?)>")
_TAG_BEGINNING = re.compile(
    rf' ?(?:{_BEGINNING}|(?:{_NAME})(?:{_ATTRIBUTE})*(?:[ \n]*/?|[ \n]+[a-z]+(?:=(?:"[^"<]*)?)?))'
)
_ATTRIBUTE_VALUE = re.compile(r'([a-z]+)="([^"<]*)"')
_TAG_CHARACTERS = 1000


@dataclass(frozen=True)
class Tag:
    """A tag of the markup; is_empty: it closes itself. `source` is how it was written."""

    kind: _Kind
    is_closing: bool
    is_empty: bool
    attributes: dict[str, str]
    source: str

    def is_opening(self, kind: _Kind) -> bool:
        """Whether this begins an element of the kind."""
        return self.kind == kind and not self.is_closing

    def closes(self, kind: _Kind) -> bool:
        """Whether this ends an element of the kind."""
        return self.kind == kind and self.is_closing


class TagLexer:
    """Tells tags from text; holds back what may be the beginning of a tag, and no more."""

    def __init__(self) -> None:
        self._held = ""  # "<" or "</"; in a tag these and the marker
        self._body: str | None = None  # of a tag, after the marker

    def text(self, piece: str) -> Iterator[str | Tag]:
        """Take the next part of the text."""
        if self._body is None:
            yield from self._plain(self._held + piece)
            return
        self._body += piece
        match = _TAG.match(self._body)
        if match and match.end() <= _TAG_CHARACTERS:
            rest = self._body[match.end() :]
            yield self._tag(match)
            yield from self._plain(rest)
        elif len(self._body) > _TAG_CHARACTERS or not _TAG_BEGINNING.fullmatch(self._body):
            yield from self._no_tag()

    def marker(self) -> Iterator[str | Tag]:
        """Take the marker's token."""
        if self._body is not None:
            yield from self._no_tag()
        if self._held:
            self._held += SPELLINGS["dsml"]
            self._body = ""
        else:
            yield SPELLINGS["dsml"]

    def finish(self) -> tuple[str, bool]:
        """Return what was held back, and whether it begins a tag."""
        held, is_tag = self._held + (self._body or ""), self._body is not None
        self._held, self._body = "", None
        return held, is_tag

    def _plain(self, text: str) -> Iterator[str]:
        self._held = "</" if text.endswith("</") else "<" if text.endswith("<") else ""
        free = text.removesuffix(self._held)
        if free:
            yield free

    def _no_tag(self) -> Iterator[str]:
        text, _ = self.finish()
        yield from self._plain(text)

    def _tag(self, match: re.Match[str]) -> Tag:
        head, _ = self.finish()
        head = head[: len(head) - len(match.string)]
        return Tag(
            kind=_KINDS[match[1]],
            is_closing=head.startswith("</"),
            is_empty=bool(match[3]),
            attributes=dict(_ATTRIBUTE_VALUE.findall(match[2])),
            source=head + match[0],
        )


class CallParser:
    """Turns text and tags into the events of calls, and gives back the text that is none.

    A call starts once its tag is whole and names a declared tool; until then a block that breaks
    is given back as text. A string's value streams, any other is held until it is closed, and one
    that is no JSON is a string. Of a parameter that comes twice the first counts. Where the markup
    of a call breaks, what is missing is closed and the calls end. With `is_parallel` false they end
    with the first. calls: those that have ended.
    shows_all: whether the calls say what the markup does.
    """

    def __init__(self, tools: Collection[str] | None, *, is_parallel: bool = True) -> None:
        """Take the declared tools' names; None for any name."""
        self.calls: list[ToolCall] = []
        self.shows_all = True
        self._tools = tools
        self._is_parallel = is_parallel
        self._state: Literal["text", "opening", "block", "call", "string", "json", "done"] = "text"
        self._held: list[str] = []  # an opening, or a value
        self._id = self._name = ""
        self._arguments: list[str] = []
        self._keys: set[str] = set()
        self._key: str | None = None  # None for a parameter that came before

    @property
    def is_done(self) -> bool:
        """Whether the calls have ended, and with them the answer."""
        return self._state == "done"

    @property
    def has_begun(self) -> bool:
        """Whether a call has."""
        return self._state not in ("text", "opening")

    def open(self, tool: str) -> Iterator[CallEvent]:
        """Begin within a block that the prompt has opened, in a call of `tool` or before it."""
        self._state = "opening"
        if tool != ANY_TOOL:
            yield from self._start(tool)

    def push(self, item: str | Tag) -> Iterator[str | CallEvent]:
        """Take the next piece of text or tag; yield events, and text that belongs to no call."""
        match self._state:
            case "text" | "opening":
                yield from self._outside(item)
            case "block":
                yield from self._between_calls(item)
            case "call":
                yield from self._between_parameters(item)
            case "string" | "json":
                yield from self._value(item)
            case "done":
                if not isinstance(item, str) or not item.isspace():
                    self.shows_all = False

    def finish(self, rest: str, *, is_tag: bool, is_cut: bool) -> Iterator[str | CallEvent]:
        """No more comes: close what is open.

        rest: what the lexer held back, and whether it begins a tag. Of a cut answer the beginning
        of a block is left out, and so is a value that was to be JSON and is not closed.
        """
        if self._state in ("call", "string", "json"):
            self.shows_all = False
            if self._state == "string":
                yield from self._add(("" if is_tag else _escaped(rest)) + '"')
            yield from self._end()
        elif self._state == "opening" or (self._state == "text" and is_tag):
            if is_cut:
                self.shows_all = False
            else:
                yield from self._give_back()
                yield rest
        elif self._state == "text":
            yield rest

    def _outside(self, item: str | Tag) -> Iterator[str | CallEvent]:
        is_opening = self._state == "opening"
        if isinstance(item, Tag) and item.is_opening("invoke") and self._is_declared(item):
            self._held = []
            yield from self._start(item.attributes["name"])
            if item.is_empty:
                yield from self._end()
        elif is_opening and isinstance(item, str) and item.isspace():
            self._held.append(item)
        elif is_opening:
            log.warning("the model began calls, but of no tool that it was given: they are text")
            yield from self._give_back()
            yield from self.push(item)
        elif isinstance(item, str):
            yield item
        elif item.is_opening("calls"):
            self._state = "opening"
            self._held = [item.source]
        else:
            yield item.source

    def _between_calls(self, item: str | Tag) -> Iterator[CallEvent]:
        if isinstance(item, str) and item.isspace():
            return
        if isinstance(item, Tag) and item.is_opening("invoke") and self._is_declared(item):
            yield from self._start(item.attributes["name"])
            if item.is_empty:
                yield from self._end()
        elif isinstance(item, Tag) and item.closes("calls"):
            self._state = "done"
        else:
            self._break_off("after a call")

    def _between_parameters(self, item: str | Tag) -> Iterator[str | CallEvent]:
        if isinstance(item, str) and item.isspace():
            return
        if isinstance(item, Tag) and item.closes("invoke"):
            yield from self._end()
        elif (
            isinstance(item, Tag)
            and item.is_opening("parameter")
            and (name := item.attributes.get("name"))
        ):
            yield from self._start_value(name, item)
        elif isinstance(item, Tag) and (item.closes("calls") or item.is_opening("invoke")):
            self.shows_all = False
            yield from self._end()
            yield from self.push(item)
        else:
            yield from self._end()
            self._break_off("between parameters")

    def _value(self, item: str | Tag) -> Iterator[str | CallEvent]:
        if isinstance(item, Tag) and item.closes("parameter"):
            yield from self._end_value()
        elif isinstance(item, Tag) and not item.is_opening("calls"):
            self.shows_all = False  # the end of the value is missing
            yield from self._end_value()
            yield from self.push(item)
        else:
            text = item if isinstance(item, str) else item.source
            if self._state == "json":
                self._held.append(text)
            else:
                yield from self._add(_escaped(text))

    def _give_back(self) -> Iterator[str]:
        self._state = "text"
        yield from self._held
        self._held = []

    def _is_declared(self, tag: Tag) -> bool:
        name = tag.attributes.get("name")
        return name is not None and (self._tools is None or name in self._tools)

    def _start(self, name: str) -> Iterator[CallEvent]:
        self._state = "call"
        self._id, self._name = new_call_id(), name
        self._arguments, self._keys = [], set()
        yield ToolCallStart(self._id, name)

    def _end(self) -> Iterator[CallEvent]:
        self._key = ""  # the brace is no part of a parameter that does not count
        yield from self._add("}" if self._arguments else "{}")
        yield ToolCallEnd()
        self.calls.append(ToolCall(self._id, self._name, "".join(self._arguments)))
        self._state = "block" if self._is_parallel else "done"
        self.shows_all &= self._is_parallel  # the end of the block is left out

    def _start_value(self, name: str, tag: Tag) -> Iterator[CallEvent]:
        if name in self._keys:
            log.warning("the model gave a parameter of %s twice: the first counts", self._name)
            self.shows_all = False
        self._key = None if name in self._keys else name
        self._keys.add(name)
        if tag.attributes.get("string") == "true":
            self._state = "string"
            yield from self._add(f'{self._before_value()}"')
        else:
            self._state = "json"
            self._held = []
        if tag.is_empty:
            yield from self._end_value()

    def _end_value(self) -> Iterator[CallEvent]:
        if self._state == "string":
            yield from self._add('"')
        else:
            text = "".join(self._held)
            value = text.strip() if _is_json(text) else f'"{_escaped(text)}"'
            yield from self._add(self._before_value() + value)
        self._state = "call"

    def _before_value(self) -> str:
        return f'{", " if self._arguments else "{"}"{_escaped(self._key or "")}": '

    def _add(self, fragment: str) -> Iterator[ToolCallDelta]:
        if self._key is not None and fragment:
            self._arguments.append(fragment)
            yield ToolCallDelta(fragment)

    def _break_off(self, where: str) -> None:
        log.warning("the markup of the model's calls breaks %s, so its answer ends there", where)
        self.shows_all = False
        self._state = "done"


def _escaped(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_json(text: str) -> bool:
    """Whether a text is one JSON value that every reader takes, its numbers left as they are."""
    try:
        value = json.loads(text, parse_constant=_no_json)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # a lone surrogate too, and thousands of digits
        return False
    return True


def _no_json(constant: str) -> None:
    raise ValueError(constant)
