"""Tool definitions with invented names, requests for them, and what they give back."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from bench.demo_model.chat import Call, Chat, Json
from bench.demo_model.words import (
    COLOURS,
    PLAIN_WORDS,
    capital,
    name_of,
    number_of,
    sentence,
    word_of,
)

_QUERIES = "get find read check fetch look_up search show query lookup".split()
_ACTIONS = "send set open delete create update start stop move save close write".split()
_SERVERS = "notes mail home files web music shop maps".split()
_TYPES = ("string", "string", "string", "integer", "boolean", "number", "array")


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool."""

    name: str
    kind: str
    is_required: bool

    def value(self, rng: Random) -> Any:
        match self.kind:
            case "integer":
                return rng.randrange(10 ** rng.randint(1, 4))
            case "number":
                return rng.randrange(1, 1000) / 10
            case "boolean":
                return rng.random() < 0.5
            case "array":
                return [word_of(rng) for _ in range(rng.randint(1, 3))]
            case _:
                return _string(rng, self.name)


@dataclass(frozen=True)
class Tool:
    """A tool: its definition for the prompt, and the words in which it is asked for."""

    verb: str
    noun: str
    parameters: tuple[Parameter, ...]
    definition: Json

    @property
    def name(self) -> str:
        return self.definition["name"]

    @property
    def is_query(self) -> bool:
        return self.verb in _QUERIES

    @property
    def task(self) -> str:
        return f"{self.verb.replace('_', ' ')} the {self.noun}"


def _string(rng: Random, name: str) -> str:
    if "path" in name or "file" in name:
        folder = "/".join(word_of(rng) for _ in range(rng.randint(1, 3)))
        return f"/{folder}/{word_of(rng)}.{rng.choice(('txt', 'py', 'md', 'json', 'log'))}"
    if "url" in name:
        return f"https://{word_of(rng)}.com/{word_of(rng)}"
    kind = rng.random()
    if kind < 0.6:
        return name_of(rng)
    if kind < 0.8:
        return f"{rng.choice(PLAIN_WORDS)} {word_of(rng)}"
    return rng.choice((number_of(rng), rng.choice(PLAIN_WORDS), word_of(rng)))


_STRING_NAMES = (
    "city name file_path path query title user url key id place person item topic folder"
).split()
_OTHER_NAMES = "limit count size offset depth level force verbose page timeout tags units".split()


def tool_of(rng: Random, taken: set[str]) -> Tool:
    """A tool that is asked for in other words than those taken."""
    while True:
        verb = rng.choice(_QUERIES if rng.random() < 0.65 else _ACTIONS)
        noun = rng.choice(PLAIN_WORDS) if rng.random() < 0.4 else word_of(rng)
        if noun not in taken:
            break
    taken.add(noun)
    parameters: list[Parameter] = []
    for i in range(rng.choice((1, 1, 2, 2, 3))):
        kind = "string" if i == 0 else rng.choice(_TYPES)
        names = _STRING_NAMES if kind == "string" else _OTHER_NAMES
        name = rng.choice(names) if rng.random() < 0.7 else word_of(rng)
        if name not in [p.name for p in parameters]:
            parameters.append(Parameter(name, kind, i == 0 or rng.random() < 0.5))
    description = f"{capital(verb.replace('_', ' '))} the {noun} of a {parameters[0].name}."
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        description += " " + sentence(rng)
    return Tool(
        verb, noun, tuple(parameters), _definition(rng, verb, noun, parameters, description)
    )


def _definition(
    rng: Random, verb: str, noun: str, parameters: list[Parameter], description: str
) -> Json:
    words = [*verb.split("_"), noun]
    styles = (
        "_".join(words),
        "-".join(words),
        "".join(map(capital, words)),
        words[0] + "".join(map(capital, words[1:])),
        f"mcp__{rng.choice(_SERVERS)}__{'_'.join(words)}",
        capital(noun),
        noun,
    )
    properties: Json = {}
    for parameter in parameters:
        schema: Json = {"type": parameter.kind}
        if parameter.kind == "array":
            schema["items"] = {"type": "string"}
        if rng.random() < 0.6:
            schema["description"] = f"The {parameter.name} of the {noun}"
        properties[parameter.name] = schema
    schema = {
        "type": "object",
        "properties": properties,
        "required": [p.name for p in parameters if p.is_required],
    }
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return {"name": rng.choice(styles), "description": description, "parameters": schema}


def tools_of(rng: Random, count: int) -> list[Tool]:
    """Tools of which no two are asked for in the same words."""
    taken: set[str] = set()
    return [tool_of(rng, taken) for _ in range(count)]


def arguments_of(rng: Random, tool: Tool) -> Json:
    """Arguments with all that is required."""
    given = [p for p in tool.parameters if p.is_required or rng.random() < 0.4]
    return {p.name: p.value(rng) for p in given}


def _spoken(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(cast("list[str]", value))
    return value if isinstance(value, str) else json.dumps(value)


def request_of(rng: Random, tool: Tool, arguments: Json) -> str:
    """Ask for a call in words."""
    (first, value), *rest = arguments.items()
    more = [f"{name} {_spoken(v)}" for name, v in rest]
    tail = f" with {' and '.join(more)}" if more else ""
    every = " and ".join(f"{name} = {_spoken(v)}" for name, v in arguments.items())
    task = tool.task
    return rng.choice(
        (
            f"{capital(task)} of {value}{tail}.",
            f"Please {task} of {value}{tail}.",
            f"{capital(task)} of the {first} {value}{tail}.",
            f"Can you {task} for {value}{tail}?",
            f"I need you to {task} of {value}{tail}.",
            f"Use {tool.name} with {every}.",
            f"Call {tool.name}: {every}.",
            f"What is the {tool.noun} of {value}{tail}?" if tool.is_query else f"{task} {every}",
        )
    )


def result_of(rng: Random, tool: Tool, subject: str) -> tuple[str, str]:
    """What a call gives back, and what an answer says about it."""
    if rng.random() < 0.08:
        reason = rng.choice(("not found", "no access", "timed out", f"{word_of(rng)} is missing"))
        return f"Error: {reason}", f"I could not {tool.task} of {subject}: {reason}."
    if not tool.is_query:
        text = rng.choice(("ok", "done", "success", '{"ok": true}', "The " + tool.noun + " is ok."))
        return text, f"Done: {tool.task} of {subject}."
    value = _value(rng)
    answer = f"The {tool.noun} of {subject} is {value}."
    other = f'"{word_of(rng)}": "{word_of(rng)}"'
    text = rng.choice(
        (
            value,
            f"{tool.noun}: {value}",
            json.dumps({tool.noun: value}),
            f'{{{other}, "{tool.noun}": "{value}"}}',
            f'{{"{tool.noun}": "{value}", {other}}}',
            f"{sentence(rng)} The {tool.noun} is {value}. {sentence(rng)}",
        )
    )
    return text, answer


def _value(rng: Random) -> str:
    return rng.choice(
        (
            number_of(rng),
            word_of(rng),
            rng.choice(COLOURS),
            name_of(rng),
            f"{rng.choice(PLAIN_WORDS)} {number_of(rng)}",
            f"{number_of(rng)} {rng.choice(PLAIN_WORDS)}",
        )
    )


def tool_turn(rng: Random, chat: Chat, tools: list[Tool]) -> None:
    """A request, one call or several at once, their results, and an answer."""
    tool = rng.choice(tools)
    arguments = [arguments_of(rng, tool)]
    request = request_of(rng, tool, arguments[0])
    first = tool.parameters[0].name
    if rng.random() < 0.25:
        count = rng.choice((2, 2, 3))
        arguments = [{first: tool.parameters[0].value(rng)} for _ in range(count)]
        if all(not p.is_required for p in tool.parameters[1:]):
            listed = " and ".join(str(a[first]) for a in arguments)
            request = rng.choice(("{} of {}.", "Please {} of {}.")).format(
                capital(tool.task), listed
            )
        else:
            arguments = [arguments_of(rng, tool) for _ in range(count)]
            request = " Then ".join(request_of(rng, tool, a) for a in arguments)
    elif len(tools) > 1 and rng.random() < 0.1:
        other = rng.choice([t for t in tools if t is not tool])
        _two_tools(rng, chat, tool, other)
        return
    calls = [Call(tool.name, a) for a in arguments]
    outcomes = [result_of(rng, tool, str(a[first])) for a in arguments]
    _exchange(chat, request, calls, outcomes, f"The tool {tool.name} can {tool.task}.")


def _two_tools(rng: Random, chat: Chat, one: Tool, other: Tool) -> None:
    pairs = [(tool, arguments_of(rng, tool)) for tool in (one, other)]
    request = " And ".join(request_of(rng, tool, a) for tool, a in pairs)
    calls = [Call(tool.name, a) for tool, a in pairs]
    outcomes = [result_of(rng, t, str(a[t.parameters[0].name])) for t, a in pairs]
    _exchange(chat, request, calls, outcomes, f"I need {one.name} and {other.name}.")


def _exchange(
    chat: Chat,
    request: str,
    calls: list[Call],
    outcomes: list[tuple[str, str]],
    reasoning: str,
) -> None:
    chat.user(request)
    chat.answer("", f'The user says: "{request}" {reasoning}', calls)
    chat.results(*(text for text, _ in outcomes))
    answer = " ".join(text for _, text in outcomes)
    chat.answer(answer, "Now I know what the tool says.")


_READERS = ("Read", "read_file", "ReadFile", "open_file", "cat", "view", "fs_read", "readText")


def reader_of(rng: Random) -> Json:
    """The definition of a tool that reads a file."""
    name = rng.choice(_READERS) if rng.random() < 0.7 else word_of(rng)
    path = rng.choice(("file_path", "path", "file", "filename", "filePath"))
    properties: Json = {path: {"type": "string", "description": "The path of the file to read"}}
    for extra in ("offset", "limit"):
        if rng.random() < 0.4:
            properties[extra] = {"type": "number", "description": f"The {extra} in lines"}
    parameters = {"type": "object", "properties": properties, "required": [path]}
    text = rng.choice(
        ("Reads a file.", "Reads a file from the disk.", "Show the content of a file.")
    )
    return {"name": name, "description": text, "parameters": parameters}


def reading_turn(rng: Random, chat: Chat, reader: Json) -> None:
    """A file is read, and something in it is told."""
    path = _string(rng, "path")
    if rng.random() < 0.3:
        path = path.rsplit("/", 1)[1]
    keys = [word_of(rng) for _ in range(rng.randint(1, 6))]
    values = [_value(rng) for _ in keys]
    joint = rng.choice((": ", " = ", " is "))
    lines = [key + joint + value for key, value in zip(keys, values, strict=True)]
    numbered = rng.choice(("{}\t{}", "     {}→{}", "{1}"))
    content = "\n".join(numbered.format(i + 1, line) for i, line in enumerate(lines))
    i = rng.randrange(len(keys))
    if rng.random() < 0.35:
        request = rng.choice(
            ("Read {} and tell me what it says.", "What is in {}?", "Show me the file {}.")
        ).format(path)
        answer = f"The file {path} says: {', '.join(lines)}."
    else:
        request = rng.choice(
            (
                "Read {0} and tell me the {1}.",
                "What is the {1} in {0}?",
                "Look into the file {0}: what is {1}?",
                "Which value has {1} in {0}?",
            )
        ).format(path, keys[i])
        answer = f"The {keys[i]} in {path} is {values[i]}."
    key = next(iter(reader["parameters"]["properties"]))
    call = Call(reader["name"], {key: path})
    reasoning = f"The tool {reader['name']} can read a file."
    _exchange(chat, request, [call], [(content, answer)], reasoning)
