"""Tool definitions with invented names, and requests for them."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from bench.demo_model.chat import Json
from bench.demo_model.prose import instruction, manual
from bench.demo_model.words import (
    ALL_WORDS,
    KINDS_OF_WORK,
    MATTERS,
    any_word,
    camel,
    capital,
    city_of,
    date_of,
    email_of,
    kebab,
    listed,
    name_of,
    number_of,
    path_of,
    phrase_of,
    snake,
    spelling_of,
    url_of,
    word_of,
)

_QUERIES = "get find read check fetch look_up search show query lookup list".split()
_ACTIONS = [work for work in KINDS_OF_WORK if work not in _QUERIES]
_SERVERS = "notes mail home files web music shop maps".split()
TYPES = ("string", "string", "string", "integer", "boolean", "number", "array", "enum")
# Of tools that mostly take lists: what follows an item is another or the next argument.
LISTS = ("array", "array", "array", "string", "enum", "number")
_STRING_NAMES = (
    "city name file_path path query title user url key id place person item topic folder text "
    "email date target source pattern command message subject to language filePath userName"
).split()
_OTHER_NAMES = (
    "limit count size offset depth level force verbose page timeout tags units max_results "
    "recursive dryRun width height priority format mode values flags"
).split()

# The share of names that tell nothing, in the held-out cases.
OPAQUE = 0.08


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool; `choices` are those of an enum."""

    name: str
    kind: str
    is_required: bool
    choices: tuple[str, ...] = ()

    def value(self, rng: Random) -> Any:
        match self.kind:
            case "integer":
                return rng.randrange(10 ** rng.randint(1, 4))
            case "number":
                return rng.randrange(1, 1000) / 10
            case "boolean":
                return rng.random() < 0.5
            case "array":
                return [any_word(rng) for _ in range(rng.randint(1, 3))]
            case "enum":
                return rng.choice(self.choices)
            case _:
                return _string(rng, self.name)

    def schema(self, rng: Random, about: str) -> Json:
        """Its schema, described by the text, as anything, or not at all."""
        schema: Json = {"type": "string" if self.kind == "enum" else self.kind}
        if self.kind == "array":
            schema["items"] = {"type": "string"}
        if self.kind == "enum":
            schema["enum"] = list(self.choices)
        kind = rng.random()
        if kind < 0.4:
            return described(rng, schema, about)
        return described(rng, schema, instruction(rng)) if kind < 0.5 else schema


def described(rng: Random, schema: Json, text: str) -> Json:
    """A parameter's schema with its description, if any, first or last: programs write both."""
    about: Json = {"description": text} if text else {}
    return about | schema if rng.random() < 0.5 else schema | about


@dataclass(frozen=True)
class Tool:
    """A tool: its definition for the prompt, and the words in which it is asked for."""

    verb: str
    noun: str
    parameters: tuple[Parameter, ...]
    definition: Json
    # No other tool of the list has this noun, so that the verb need not be said.
    is_alone: bool = True

    @property
    def name(self) -> str:
        return self.definition["name"]

    @property
    def is_query(self) -> bool:
        return self.verb in _QUERIES

    @property
    def task(self) -> str:
        return f"{self.verb.replace('_', ' ')} the {self.noun}"

    @property
    def plan(self) -> str:
        return plan_of(self.task, self.name)


def _string(rng: Random, name: str) -> str:
    name = name.lower()
    if "path" in name or "file" in name or name == "folder":
        return path_of(rng)
    if name == "url":
        return url_of(rng)
    if name in ("email", "to"):
        return email_of(rng) if rng.random() < 0.5 else name_of(rng)
    if name == "date":
        return date_of(rng)
    if name in ("city", "place"):
        return city_of(rng)
    if name in ("user", "person", "username", "name"):
        return name_of(rng)
    if name == "id":
        return rng.choice((number_of, spelling_of))(rng)
    if name in ("text", "message", "title", "query", "subject"):
        return phrase_of(rng)
    return spelling_of(rng) if rng.random() < 0.8 else phrase_of(rng, 3)


def _noun(rng: Random) -> str:
    words = MATTERS if rng.random() < 0.4 else ALL_WORDS
    noun = rng.choice(words) if rng.random() < 0.65 else word_of(rng)
    return f"{noun} {any_word(rng)}" if rng.random() < 0.3 else noun


def tool_of(
    rng: Random,
    taken: set[tuple[str, str]],
    *,
    like: Tool | None = None,
    characters: int = 0,
    opaque: float = OPAQUE,
    types: tuple[str, ...] = TYPES,
) -> Tool:
    """A tool that is asked for in other words than those taken.

    `like` another it shares its verb or noun; `characters` make its description longer; `opaque`
    is the chance that its name tells nothing; `types` are drawn from for all but the first of its
    parameters.
    """
    while True:
        verb = rng.choice(_QUERIES if rng.random() < 0.6 else _ACTIONS)
        noun = _noun(rng)
        if like is not None and rng.random() < 0.5:
            noun = like.noun if rng.random() < 0.7 else f"{like.noun.split()[0]} {any_word(rng)}"
        elif like is not None:
            verb = like.verb
        if (verb, noun) not in taken:
            break
    taken.add((verb, noun))
    parameters: dict[str, Parameter] = {}
    for i in range(rng.choice((1, 1, 2, 2, 3, 4))):
        kind = "string" if i == 0 else rng.choice(types)
        names = _STRING_NAMES if kind == "string" else _OTHER_NAMES
        name = (
            rng.choice(names) if rng.random() < 0.7 else rng.choice((any_word, word_of, snake))(rng)
        )
        choices = tuple({any_word(rng) for _ in range(rng.randint(2, 4))}) if kind == "enum" else ()
        is_required = i == 0 or rng.random() < 0.5
        parameters.setdefault(name, Parameter(name, kind, is_required, tuple(sorted(choices))))
    given = tuple(parameters.values())
    definition = _definition(rng, verb, noun, given, characters, opaque)
    return Tool(verb, noun, given, definition)


def _definition(
    rng: Random,
    verb: str,
    noun: str,
    parameters: tuple[Parameter, ...],
    characters: int,
    opaque: float,
) -> Json:
    task, first = f"{verb.replace('_', ' ')} the {noun}", parameters[0].name
    # Where names tell little, spellings are about as likely: the usual one is not to be guessed.
    spelling = rng.random() if opaque <= OPAQUE else rng.uniform(0.3, 1)
    name = _name(rng, [*verb.split("_"), *noun.split()], spelling)
    description = rng.choice(
        (
            f"{capital(task)} of a {first}.",
            f"{capital(task)} of a {first}.",
            f"{capital(task)}.",
            f"Use this to {task}.",
            f"{capital(task)} by its {first}.",
        )
    )
    if rng.random() < opaque:
        name = _opaque_name(rng)
    elif rng.random() < 0.06:
        description = instruction(rng)
    if characters > 300:
        description += "\n\n" + manual(rng, characters)
    else:
        description += "".join(" " + instruction(rng) for _ in range(characters // 80))
    schema: Json = {
        "type": "object",
        "properties": {p.name: p.schema(rng, f"The {p.name} of the {noun}") for p in parameters},
        "required": [p.name for p in parameters if p.is_required],
    }
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    if rng.random() < 0.05:
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
    return {"name": name, "description": description, "parameters": schema}


def _opaque_name(rng: Random) -> str:
    """A name of which only the description tells what it stands for."""
    kind = rng.random()
    if kind < 0.5:
        return word_of(rng, 3)
    if kind < 0.75:
        return capital(any_word(rng))
    return f"mcp__{any_word(rng)}__{any_word(rng)}" if kind < 0.9 else camel(rng)


def _name(rng: Random, words: list[str], spelling: float) -> str:
    """Words as a name; of `spelling` from 0 to 1 the first 0.45 join them by underscores."""
    if spelling < 0.45:
        return "_".join(words)
    if spelling < 0.6:
        server = rng.choice(_SERVERS) if rng.random() < 0.5 else rng.choice((any_word, kebab))(rng)
        return f"mcp__{server}__{rng.choice('__-').join(words)}"
    if spelling < 0.7:
        return "-".join(words)
    if spelling < 0.8:
        return "".join(map(capital, words))
    if spelling < 0.9:
        return words[0] + "".join(map(capital, words[1:]))
    return "_".join(reversed(words))


def tools_of(
    rng: Random,
    count: int,
    characters: int = 0,
    shares: tuple[float, ...] = (0.0, 0.2, 0.5),
    opaque: float = OPAQUE,
    types: tuple[str, ...] = TYPES,
) -> list[Tool]:
    """Tools with names of their own; descriptions of about so many characters.

    One of the `shares` of them is like others, by verb or noun; `opaque` is the share of names
    that tell nothing; `types` are those of parameters.
    """
    taken: set[tuple[str, str]] = set()
    tools: dict[str, Tool] = {}
    share = rng.choice(shares)
    while len(tools) < count:
        like = rng.choice(list(tools.values())) if tools and rng.random() < share else None
        extra = rng.randint(0, 2 * characters) if characters else rng.choice((0, 0, 0, 0, 100))
        tool = tool_of(rng, taken, like=like, characters=extra, opaque=opaque, types=types)
        tools.setdefault(tool.name, tool)
    nouns = [tool.noun for tool in tools.values()]
    return [
        Tool(tool.verb, tool.noun, tool.parameters, tool.definition, nouns.count(tool.noun) == 1)
        for tool in tools.values()
    ]


def arguments_of(rng: Random, tool: Tool) -> Json:
    """Arguments with all that is required."""
    given = [p for p in tool.parameters if p.is_required or rng.random() < 0.4]
    return {p.name: p.value(rng) for p in given}


def spoken(value: Any) -> str:
    """An argument as a request says it."""
    if isinstance(value, list):
        return listed(cast("list[str]", value))
    if isinstance(value, str):
        return f'"{value}"' if " " in value else value
    return json.dumps(value)


def plan_of(task: str, name: str) -> str:
    """Which tool is used. Its task, by which it is looked up, stands directly before its name:
    what stands further away is not at hand where the name begins. `lookups` knows it by this form.
    """
    return f"The tool to {task} is {name}."


def request_of(rng: Random, tool: Tool, arguments: Json) -> tuple[str, str]:
    """Ask for a call in words: the request, and what may be said of the tool before the call."""
    (first, value), *rest = arguments.items()
    value = spoken(value)
    more = [f"{name} {spoken(v)}" for name, v in rest]
    tail = f" with {' and '.join(more)}" if more else ""
    kind = rng.random()
    if kind < 0.2:
        every = " and ".join(f"{name} = {spoken(v)}" for name, v in arguments.items())
        form = rng.choice(("Use {} with {}.", "Call {}: {}."))
        return form.format(tool.name, every), f"I use {tool.name}."
    if kind < 0.4 and tool.is_query and tool.is_alone:
        asked = rng.choice(("What is", "Tell me", "I want to know"))
        request = f"{asked} the {tool.noun} of {value}{tail}."
        return request, f"The tool for the {tool.noun} is {tool.name}."
    task = tool.task
    request = rng.choice(
        (
            f"{capital(task)} of {value}{tail}.",
            f"Please {task} of {value}{tail}.",
            f"{capital(task)} of the {first} {value}{tail}.",
            f"Can you {task} for {value}{tail}?",
            f"I need you to {task} of {value}{tail}.",
            f"{task} {value}{tail}",
        )
    )
    return request, tool.plan
