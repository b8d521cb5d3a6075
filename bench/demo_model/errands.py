"""Tools of everyday life: what they are called and take, and how they are asked for."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, cast

from bench.demo_model.chat import Call, Chat, Json
from bench.demo_model.prose import instruction
from bench.demo_model.results import Outcome, exchange
from bench.demo_model.tools import Parameter
from bench.demo_model.words import any_word, capital, listed, mixed, number_of

# How an order is given; {C} is the order with a capital. The first so many go on behind it.
_BEHIND = 8
_ORDERS = (
    "{} please", "{C}, please.", "{C}!", "Can you {}?", "can you {}?", "Could you {}?",
    "Would you {}?", "could you please {}?",
    "{}", "{}", "{}", "{}", "{C}.", "{C}.", "{C}", "Please {}.", "please {}", "can you {}",
    "I'd like you to {}.", "I need you to {}", "hey, {}", "Now {}.", "ok {}",
)  # fmt: skip
_LEADS = (
    "Use this to {}.",
    "Use this tool when the user wants to {}.",
    "Call this if somebody asks you to {}.",
    "Lets you {}.",
    "A tool to {}.",
    "Can be used to {}.",
)
_DONE = ("ok", "success", "done", "created", "accepted", "completed")


@dataclass(frozen=True)
class Errand:
    """What is asked for, the values of the tool's parameters, and the outcome.

    A value is None where the request leaves an optional parameter out.
    """

    request: str
    values: tuple[Any, ...]
    outcome: Outcome


@dataclass(frozen=True)
class Argument:
    """A parameter under any of its names; an optional one may be missing in a definition."""

    names: tuple[str, ...]
    kind: str = "string"
    choices: tuple[str, ...] = ()
    is_required: bool = True
    about: str = ""

    def schema(self, rng: Random, noun: str) -> Json:
        """Its schema, described in words of the noun, if any, or of its own."""
        if not noun:
            return {"type": self.kind}
        name = self.names[0].replace("_", " ")
        schema = Parameter(name, self.kind, self.is_required, self.choices).schema(rng, noun)
        if self.about and "description" in schema and rng.random() < 0.7:
            schema["description"] = self.about
        return schema


@dataclass(frozen=True)
class Everyday:
    """A tool under any of its names, with what its parameters may be called.

    The first description tells the task alone. `noun` is what its parameters belong to, where
    they are described; `joint` stands between two requests at once.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Argument, ...]
    errand: Callable[[Random], Errand]
    noun: str = ""
    joint: str = " "


# A parameter, and how its values are drawn.
Slot = tuple[Argument, Callable[[Random], Any]]


@dataclass(frozen=True)
class Wordings:
    """Errands from forms, in which a parameter stands in braces under its first name.

    A request that begins in lower case is an order, which is given in many ways. `found` are the
    values that only the result tells.
    """

    slots: tuple[Slot, ...]
    requests: tuple[str, ...]
    results: tuple[str, ...]
    answer: str
    found: dict[str, Callable[[Random], Any]] = field(default_factory=dict[str, Any])

    def __call__(self, rng: Random) -> Errand:
        form = rng.choice(self.requests)
        values = {
            argument.names[0]: value(rng)
            for argument, value in self.slots
            if f"{{{argument.names[0]}}}" in form
        }
        found = {name: value(rng) for name, value in self.found.items()}
        said = {name: _said(value) for name, value in (values | found).items()}
        # "on Monday", but "next Monday".
        for name, value in said.items():
            if value.startswith(("today", "this ", "next ")):
                form = form.replace(f"on {{{name}}}", f"{{{name}}}")
        request = _as_people_write(rng, form).format_map(said)
        result = rng.choice(self.results).format_map(said)
        if rng.random() < 0.45:
            result = _record(rng, values, found)
        every = tuple(values.get(argument.names[0]) for argument, _ in self.slots)
        return Errand(request, every, (result, self.answer.format_map(said)))


def _said(value: Any) -> str:
    if isinstance(value, list):
        return listed(cast("list[str]", value))
    return value if isinstance(value, str) else json.dumps(value)


def _as_people_write(rng: Random, form: str) -> str:
    """The form of a request with or without capitals, signs and manners."""
    # Behind a colon all is the value: manners would be taken for a part of it.
    is_open = re.search(r": {\w+}$", form) is not None
    if form[0].islower():
        order = rng.choice(_ORDERS[_BEHIND:] if is_open else _ORDERS)
        return order.replace("{C}", capital(form)).replace("{}", form)
    if rng.random() < 0.4:
        form = form.rstrip(".?!")
        if form[:2] not in ("I ", "I'"):
            form = form[0].lower() + form[1:]
    if is_open or form[-1] in ".?!" or rng.random() > 0.15:
        return form
    return f"{form} please"


def _record(rng: Random, values: Json, found: Json) -> str:
    """What was found, or that all went well, as JSON beside some of what was given."""
    told = found or {rng.choice(("status", "result")): rng.choice(_DONE)}
    if not found and rng.random() < 0.3:
        told = {rng.choice(("ok", "success")): True}
    given = {name: value for name, value in values.items() if rng.random() < 0.5}
    entries = given | told if rng.random() < 0.5 else told | given
    if rng.random() < 0.25:
        entries["id"] = rng.choice((mixed, number_of))(rng)
    indent = 2 if rng.random() < 0.2 else None
    return json.dumps(entries, ensure_ascii=False, indent=indent)


def service(
    names: str,
    noun: str,
    descriptions: tuple[str, ...],
    slots: tuple[Slot, ...],
    requests: str,
    results: tuple[str, ...],
    answer: str,
    **found: Callable[[Random], Any],
) -> Everyday:
    """A tool whose names are parted by spaces and whose requests stand on lines of their own."""
    lines = tuple(line.strip() for line in requests.strip().splitlines())
    errand = Wordings(slots, lines, results, answer, found)
    parameters = tuple(argument for argument, _ in slots)
    return Everyday(tuple(names.split()), descriptions, parameters, errand, noun, "\n")


def text(names: str, value: Callable[[Random], str], about: str = "") -> Slot:
    return Argument(tuple(names.split()), about=about), value


def whole(names: str, least: int, most: int, about: str = "") -> Slot:
    argument = Argument(tuple(names.split()), "integer", about=about)
    return argument, lambda rng: rng.randint(least, most)


def number(names: str, value: Callable[[Random], float], about: str = "") -> Slot:
    return Argument(tuple(names.split()), "number", about=about), value


def flag(names: str, about: str = "") -> Slot:
    argument = Argument(tuple(names.split()), "boolean", about=about)
    return argument, lambda rng: rng.random() < 0.5


def several(names: str, value: Callable[[Random], str], about: str = "") -> Slot:
    argument = Argument(tuple(names.split()), "array", about=about)
    return argument, lambda rng: list(dict.fromkeys(value(rng) for _ in range(rng.randint(1, 4))))


def one_of(names: str, choices: str, about: str = "") -> Slot:
    every = tuple(choices.split())
    argument = Argument(tuple(names.split()), "enum", every, about=about)
    return argument, lambda rng: rng.choice(every)


def may(slot: Slot) -> Slot:
    """The parameter, as an optional one."""
    return replace(slot[0], is_required=False), slot[1]


@dataclass(frozen=True)
class Named:
    """An everyday tool under one name, its parameters under one name each, or left out.

    `task` is what it is for, in the words of its definition.
    """

    kind: Everyday
    definition: Json
    names: tuple[str | None, ...]
    task: str

    def turn(self, rng: Random, chat: Chat) -> None:
        """One errand, sometimes two at once."""
        errands = [self._errand(rng) for _ in range(rng.choice((1, 1, 1, 1, 2)))]
        name = self.definition["name"]
        calls = [Call(name, self._arguments(errand)) for errand in errands]
        request = self.kind.joint.join(errand.request for errand in errands)
        plan = f"The tool to {self.task} is {name}."
        needed = list(dict.fromkeys(key for call in calls for key in call.arguments))
        reasoning = f"{plan} It needs {listed(needed or ['nothing'])}."
        outcomes = [errand.outcome for errand in errands]
        exchange(rng, chat, request, calls, outcomes, reasoning, said=plan)

    def _errand(self, rng: Random) -> Errand:
        """An errand that needs no parameter which the definition lacks."""
        while True:
            errand = self.kind.errand(rng)
            pairs = zip(self.names, errand.values, strict=True)
            if all(name or value is None for name, value in pairs):
                return errand

    def _arguments(self, errand: Errand) -> Json:
        pairs = zip(self.names, errand.values, strict=True)
        return {name: value for name, value in pairs if name and value is not None}


def definition_of(rng: Random, kind: Everyday) -> Named:
    """The tool as one program defines it."""
    properties: Json = {}
    names: list[str | None] = []
    required: list[str] = []
    for argument in kind.parameters:
        if not argument.is_required and rng.random() < 0.3:
            names.append(None)
            continue
        name = rng.choice(argument.names)
        names.append(name)
        properties[name] = argument.schema(rng, kind.noun)
        if argument.is_required:
            required.append(name)
    if rng.random() < 0.3:
        properties[any_word(rng) + "_"] = {"type": rng.choice(("string", "integer", "boolean"))}
    description, task = _description(rng, kind)
    if rng.random() < 0.2:
        description += " " + instruction(rng)
    schema = {"type": "object", "properties": properties, "required": required}
    definition = {
        "name": rng.choice(kind.names),
        "description": description,
        "parameters": schema,
    }
    return Named(kind, definition, tuple(names), task)


def _description(rng: Random, kind: Everyday) -> tuple[str, str]:
    """A description, and the task as it stands there where it does."""
    short = kind.descriptions[0]
    if len(kind.descriptions) == 1:
        return short, _task(short)
    description, how = rng.choice(kind.descriptions), rng.random()
    if how < 0.2:
        return rng.choice(_LEADS).format(_task(short)), _task(short)
    if description.startswith("Use this"):
        # Mostly behind what it is for.
        return f"{short} {description}" if how < 0.8 else description, _task(short)
    return _third_person(description) if how < 0.4 else description, _task(description)


def _task(description: str) -> str:
    first = description.split(". ")[0].removesuffix(".")
    return first[0].lower() + first[1:]


def _third_person(description: str) -> str:
    """The description with `Sets` for `Set`."""
    verb, rest = description.split(" ", 1)
    if rest.startswith(("or ", "and ")):  # a second verb
        return description
    if verb.endswith(("ch", "sh", "ss", "x", "o")):
        verb += "es"
    elif verb.endswith("y") and verb[-2] not in "aeou":
        verb = verb[:-1] + "ies"
    else:
        verb = {"Have": "Ha"}.get(verb, verb) + "s"
    return f"{verb} {rest}"
