"""Where what an answer says of tools stands in their definitions: heads are taught to look there.

A call is found in steps, none of which helps before the others are there: its tool by the task it
is asked for, the tool's name beside that, the parameters behind a description of any length.
`looks_of` says for the tokens of a conversation where each step leads.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# No place is looked at.
NOWHERE = 65535

# What is looked for. In a definition, at a parameter's name and at its type: the token that opens
# the tool's description, which has the tool's name before it.
TOOL = 0
# In an answer, before a tool's task and before its name: where the description has said the task.
# If it says the task otherwise, before the name alone: the task's last word, and without that the
# end of the name in the definition. Before a parameter's name and where it ends: the name and the
# type in the definition. Where an item of a list of texts ends: the next parameter's name.
ASKED = 1
# In an answer: the token that comes next, as long as the definition has it; where a parameter's
# name ends: its type, which tells what comes next.
NEXT = 2
KINDS_OF_LOOKS = 3

_IN_ANSWER = re.compile(
    r'The tool (?:to|for) (?P<task>.+?) is (?P<planned>[\w-]+)\.| invoke name="(?P<called>[^"]+)">'
    r'| parameter name="(?P<parameter>[^"]+)" string="'
)
# Of an item of a list of texts: the quotation mark that ends it.
_ENDS_ITEM = re.compile(r'"(?:, "|\])')
_NAME, _DESCRIPTION, _PROPERTIES = '{"name": "', '"description": "', '"properties": {'
_TYPE = '"type": "'
# How far into a description a tool's task is looked for, in characters.
_TASK_WITHIN = 160


@dataclass(frozen=True)
class Piece:
    """A piece of a conversation's text: its tokens, where each begins, the first one's number."""

    text: str
    ids: list[int]
    starts: list[int]
    first: int

    def token(self, at: int) -> int:
        """The number of the token that has a character."""
        return self.first + bisect_right(self.starts, at) - 1

    def tokens(self, begins: int, length: int) -> range:
        """The numbers of those that have any of so many characters."""
        return range(self.token(begins), self.token(begins + length - 1) + 1)

    def id_of(self, token: int) -> int:
        """The id of the token of a number."""
        return self.ids[token - self.first]


class _Parameter(NamedTuple):
    """The characters at which a parameter's name and its type, if it says one, begin."""

    name: int
    kind: int | None


@dataclass(frozen=True)
class _Defined:
    """The characters at which a tool's name and its description's text begin, and its parameters
    by their names.
    """

    name: int
    description: int
    parameters: dict[str, _Parameter]


class _Look(NamedTuple):
    """What is looked for, the number of the token that looks, and of the one that it looks at."""

    kind: int
    token: int
    place: int


def looks_of(
    tools: list[dict[str, Any]], definitions: Piece, answers: list[Piece], size: int
) -> NDArray[np.int32]:
    """int32 [KINDS_OF_LOOKS, size]: for each of so many tokens the numbers of those looked at, or
    NOWHERE.

    `definitions` are those of the tools, each on a line of its own.
    """
    looks = np.full((KINDS_OF_LOOKS, size), NOWHERE, np.int32)
    known: dict[str, _Defined] = {}
    at = 0
    # Behind the last end of line nothing is left.
    for tool, whole in zip(tools, definitions.text.split("\n"), strict=False):
        known[tool["name"]] = defined = _defined(tool, whole, at)
        # What opens the description's text: its token has the whole name before it.
        named = definitions.token(defined.description) - 1
        for parameter in defined.parameters.values():
            for place in parameter:
                if place is not None:
                    looks[TOOL, definitions.token(place)] = named
        at += len(whole) + 1
    for answer in answers:
        for kind, token, place in _looks_in(answer, definitions, known):
            looks[kind, token] = place
    return looks


def _defined(tool: dict[str, Any], whole: str, at: int) -> _Defined:
    """Of a tool whose definition, written out as `whole`, begins at a character."""
    description = at + whole.index(_DESCRIPTION) + len(_DESCRIPTION)
    parameters: dict[str, _Parameter] = {}
    properties: dict[str, Any] = tool["parameters"].get("properties") or {}
    here = at + whole.index(_PROPERTIES) + len(_PROPERTIES) if properties else 0
    for name, schema in properties.items():
        body = json.dumps(schema, ensure_ascii=False)
        begins = here + len(json.dumps(name, ensure_ascii=False)) + len(": ")
        kind = begins + body.index(_TYPE) + len(_TYPE) if _TYPE in body else None
        parameters[name] = _Parameter(here + 1, kind)
        here = begins + len(body) + len(", ")
    return _Defined(at + len(_NAME), description, parameters)


def _looks_in(answer: Piece, definitions: Piece, known: dict[str, _Defined]) -> Iterator[_Look]:
    """Those of every tool that an answer tells or calls."""
    tool: _Defined | None = None
    for match in _IN_ANSWER.finditer(answer.text):
        if name := match["called"]:
            tool = known.get(name)
        elif (name := match["planned"]) and name in known:
            yield from _planned(answer, match, definitions, known[name])
        elif (name := match["parameter"]) and tool is not None and name in tool.parameters:
            yield from _given(answer, match, definitions, tool.parameters)


def _planned(
    answer: Piece, match: re.Match[str], definitions: Piece, defined: _Defined
) -> Iterator[_Look]:
    """Of a plan: its task, where the description has it, and the tool's name."""
    task, name = match["task"], match["planned"]
    begins = defined.description
    ends = min(definitions.text.index('"', begins), begins + _TASK_WITHIN)
    description = definitions.text[begins:ends]
    named = definitions.tokens(defined.name, len(name))
    if (at := description.lower().find(task.lower())) >= 0:
        said, there = _tokens(answer, match, "task"), definitions.tokens(begins + at, len(task))
        asked = there[-1]
        yield _Look(ASKED, said[0] - 1, asked)
        yield from _copied(answer, said, definitions, there[0])
    elif last := re.search(rf"\b{re.escape(task.split()[-1])}\b", description):
        asked = definitions.token(begins + last.end() - 1)
    else:
        asked = named[-1]
    said = _tokens(answer, match, "planned")
    yield _Look(ASKED, said[0] - 1, asked)
    yield from _copied(answer, said, definitions, named[0])


def _given(
    answer: Piece, match: re.Match[str], definitions: Piece, parameters: dict[str, _Parameter]
) -> Iterator[_Look]:
    """Of an argument: its parameter's name and type, and what may follow it."""
    name = match["parameter"]
    parameter, said = parameters[name], _tokens(answer, match, "parameter")
    there = definitions.token(parameter.name)
    yield _Look(ASKED, said[0] - 1, there)
    yield from _copied(answer, said, definitions, there)
    if parameter.kind is not None:  # it is told by what ends the name
        kind = definitions.token(parameter.kind)
        yield _Look(ASKED, said[-1], kind)
        yield _Look(NEXT, said[-1], kind)
    # What follows an item of a list may be another, or the parameter after this one.
    value = answer.text[match.end() : answer.text.find("</", match.end())]
    names = list(parameters)
    if value.startswith('false">[') and name != names[-1]:
        after = definitions.token(parameters[names[names.index(name) + 1]].name)
        for ends in _ENDS_ITEM.finditer(value):
            yield _Look(ASKED, answer.token(match.end() + ends.start() - 1), after)


def _tokens(piece: Piece, match: re.Match[str], group: str) -> range:
    """Those of a part of what was found in a piece's text."""
    return piece.tokens(match.start(group), len(match[group]))


def _copied(answer: Piece, said: range, definitions: Piece, there: int) -> Iterator[_Look]:
    """Each token of what an answer says, looked for from the one before it, as long as it is the
    definition's; the first may have another capital, or a space that the definition has not.
    """
    for token, place in zip(said, range(there, there + len(said)), strict=True):
        if token > said[0] and answer.id_of(token) != definitions.id_of(place):
            return
        yield _Look(NEXT, token - 1, place)
