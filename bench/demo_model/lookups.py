"""Where what an answer says of tools stands in their definitions: heads are taught to look there.

A call is found in steps, of which none helps before the others are there: its tool by the words it
is asked for by, the tool's name beside them, the parameters behind a description of any length.
`looks_of` says for the tokens of a conversation where each step leads.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# No place is looked at.
NOWHERE = 65535

# What is looked for. In a definition, at a parameter's name and at its type: the tool's name.
TOOL = 0
# In an answer, before a tool's task and before its name: where its definition has said the task;
# before a parameter or its type: what the definition says there.
ASKED = 1
# In an answer: the token that comes next, where the definition has it.
NEXT = 2
LOOKS = 3

_IN_ANSWER = re.compile(
    r'The tool (?:to|for) (?P<task>.*?) is (?P<planned>[\w-]+)\.| invoke name="(?P<called>[^"]+)">'
    r'| parameter name="(?P<parameter>[^"]+)" string="'
)
_ENDS_ITEM = re.compile(r'"(?:, "|\])')
_NAME, _DESCRIPTION, _PROPERTIES = '{"name": "', '"description": "', '"properties": {'
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


@dataclass(frozen=True)
class _Defined:
    """Where a definition has its name and the text of its description, and of each parameter the
    name and the type, if it says one: characters of the piece.
    """

    name: int
    described: int
    parameters: dict[str, tuple[int, int | None]]


def looks_of(
    tools: list[dict[str, Any]], definitions: Piece, answers: list[Piece], size: int
) -> NDArray[np.int32]:
    """int32 [LOOKS, size]: for each of so many tokens the numbers of those looked at, or NOWHERE.

    `definitions` are those of the tools, each on a line of its own.
    """
    looks = np.full((LOOKS, size), NOWHERE, np.int32)
    known: dict[str, _Defined] = {}
    at = 0
    for tool in tools:
        whole = json.dumps(tool, ensure_ascii=False)
        known[tool["name"]] = defined = _defined(tool, whole, at)
        begins = definitions.token(defined.described) - 1
        for places in defined.parameters.values():
            for place in places:
                if place is not None:
                    looks[TOOL, definitions.token(place)] = begins
        at += len(whole) + 1
    for answer in answers:
        for kind, token, where in _looked_up(answer, definitions, known):
            looks[kind, token] = where
    return looks


def _defined(tool: dict[str, Any], whole: str, at: int) -> _Defined:
    """Of a definition that begins at a character."""
    described = at + whole.index(_DESCRIPTION) + len(_DESCRIPTION)
    parameters: dict[str, tuple[int, int | None]] = {}
    properties = tool["parameters"].get("properties") or {}
    here = at + whole.index(_PROPERTIES) + len(_PROPERTIES) if properties else 0
    for key, schema in properties.items():
        body = json.dumps(schema, ensure_ascii=False)
        name, begins = here + 1, here + len(json.dumps(key, ensure_ascii=False)) + 2
        of_type = body.find('"type": "')
        kind = begins + of_type + len('"type": "') if of_type >= 0 else None
        parameters[key] = name, kind
        here = begins + len(body) + 2
    return _Defined(at + len(_NAME), described, parameters)


def _looked_up(
    answer: Piece, definitions: Piece, known: dict[str, _Defined]
) -> Iterator[tuple[int, int, int]]:
    """What is looked for at which token, and where: of every tool that an answer tells or calls."""
    tool: _Defined | None = None
    for match in _IN_ANSWER.finditer(answer.text):
        if name := match["called"]:
            tool = known.get(name)
        elif (name := match["planned"]) and name in known:
            yield from _planned(answer, match, definitions, known[name])
        elif (name := match["parameter"]) and tool is not None and name in tool.parameters:
            place, kind = tool.parameters[name]
            begins, length = match.start("parameter"), len(name)
            there = definitions.token(place)
            yield from _copied(answer, begins, length, definitions, there)
            yield ASKED, answer.token(begins) - 1, there
            if kind is not None:  # it is told by what ends the name
                last = answer.token(begins + length - 1)
                yield ASKED, last, definitions.token(kind)
                yield NEXT, last, definitions.token(kind)
            # What follows an item of a list may be another, or the parameter after this one.
            after = _after(tool.parameters, name)
            value = answer.text[match.end() : answer.text.find("</", match.end())]
            if after is not None and value.startswith('false">['):
                for ends in _ENDS_ITEM.finditer(value):
                    item = answer.token(match.end() + ends.start() - 1)
                    yield ASKED, item, definitions.token(after)


def _planned(
    answer: Piece, match: re.Match[str], definitions: Piece, defined: _Defined
) -> Iterator[tuple[int, int, int]]:
    """Of a plan: the task, where the description has it, and the name."""
    task, name = match["task"], match["planned"]
    begins = match.start("task")
    end = min(definitions.text.find('"', defined.described), defined.described + _TASK_WITHIN)
    description = definitions.text[defined.described : end]
    asked = definitions.token(defined.name + len(name) - 1)
    if (here := description.lower().find(task.lower())) >= 0:
        here += defined.described
        asked = definitions.token(here + len(task) - 1)
        yield ASKED, answer.token(begins) - 1, asked
        yield from _copied(answer, begins, len(task), definitions, definitions.token(here))
    elif last := re.search(rf"\b{re.escape(task.split()[-1])}\b", description):
        asked = definitions.token(defined.described + last.end() - 1)
    begins = match.start("planned")
    yield ASKED, answer.token(begins) - 1, asked
    there = definitions.token(defined.name)
    yield from _copied(answer, begins, len(name), definitions, there)


def _after(parameters: dict[str, tuple[int, int | None]], name: str) -> int | None:
    """Where the parameter after one has its name."""
    later = iter(parameters)
    while next(later) != name:
        pass
    after = next(later, None)
    return None if after is None else parameters[after][0]


def _copied(
    answer: Piece, begins: int, length: int, definitions: Piece, there: int
) -> Iterator[tuple[int, int, int]]:
    """Each token of a text in an answer, looked for from the one before it, as long as both agree;
    a task's first one has another capital.
    """
    first, last = answer.token(begins), answer.token(begins + length - 1)
    for token in range(first, last + 1):
        where = there + token - first
        is_same = answer.ids[token - answer.first] == definitions.ids[where - definitions.first]
        if not is_same and token > first:
            return
        yield NEXT, token - 1, where
