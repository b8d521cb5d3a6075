"""Tools that people try: what they are called and take, and how they are asked for."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, cast

from bench.demo_model.chat import Call, Chat, Json
from bench.demo_model.particulars import is_own_day, statement_of
from bench.demo_model.prose import instruction
from bench.demo_model.results import Outcome, exchange
from bench.demo_model.tools import Parameter, plan_of
from bench.demo_model.words import any_word, capital, city_of, listed, mixed, number_of

# How an order is given; {C} is the order with a capital. Behind an open one nothing may stand.
_OPEN_ORDERS = (
    "{}", "{}", "{}", "{}", "{C}", "{C}", "{C}", "Please {}", "please {}", "can you {}",
    "I'd like you to {}", "I need you to {}", "hey, {}", "Now {}", "ok {}",
)  # fmt: skip
_CLOSED_ORDERS = (
    "{} please", "{C}, please.", "{C}!", "Can you {}?", "can you {}?", "Could you {}?",
    "Would you {}?", "could you please {}?",
    "{}", "{}", "{}", "{}", "{C}.", "{C}.", "{C}", "Please {}.", "please {}", "can you {}",
    "I'd like you to {}.", "I need you to {}", "hey, {}", "Now {}.", "ok {}",
)  # fmt: skip
# What follows is a clause.
_CLAUSE = re.compile(r"\b(?:that|because) {(\w+)}")
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
    """A parameter under any of its names; an optional one may be missing in a definition.

    `about` describes it where its first name and its tool's noun do not. A free one may be any
    words: what stands behind its value could be a part of it.
    """

    names: tuple[str, ...]
    kind: str = "string"
    choices: tuple[str, ...] = ()
    is_required: bool = True
    about: str = ""
    is_free: bool = False

    def schema(self, rng: Random, noun: str) -> Json:
        """Its schema, described in words of its own or of the noun; not at all without a noun."""
        if not noun:
            return {"type": self.kind}
        name = self.names[0].replace("_", " ")
        parameter = Parameter(name, self.kind, self.is_required, self.choices)
        return parameter.schema(rng, self.about or f"The {name} of the {noun}")


@dataclass(frozen=True)
class ToolKind:
    """A tool under any of its names, with what its parameters may be called.

    The first description tells the task alone. `noun` is what its parameters belong to, where
    they are described. `joint` stands between two requests at once: an end of line where the
    first may end with a value, which what follows on its line would become a part of.
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
    values that only the result tells; each may depend on the values that were given.
    """

    slots: tuple[Slot, ...]
    requests: tuple[str, ...]
    results: tuple[str, ...]
    answer: str
    found: dict[str, Callable[[Random, Json], Any]]

    def __call__(self, rng: Random) -> Errand:
        form = rng.choice(self.requests)
        clauses = _CLAUSE.findall(form)
        values = {
            argument.names[0]: (statement_of if argument.names[0] in clauses else value)(rng)
            for argument, value in self.slots
            if f"{{{argument.names[0]}}}" in form
        }
        found = {name: value(rng, values) for name, value in self.found.items()}
        said = {name: _said(value) for name, value in (values | found).items()}
        request = _filled(self._as_people_write(rng, form), said)
        result = _filled(rng.choice(self.results), said)
        if rng.random() < 0.45:
            result = _record(rng, values, found)
        every = tuple(values.get(argument.names[0]) for argument, _ in self.slots)
        return Errand(request, every, (result, _filled(self.answer, said)))

    def is_open(self, form: str) -> bool:
        """Whether a form ends in a value that what stands behind it could be a part of."""
        last = re.search(r"(: )?{(\w+)}$", form)
        if last is None:
            return False
        (argument,) = (each for each, _ in self.slots if each.names[0] == last[2])
        return last[1] is not None or argument.is_free

    def _as_people_write(self, rng: Random, form: str) -> str:
        """The form of a request with or without capitals, signs and manners."""
        if form[0].islower():
            order = rng.choice(_OPEN_ORDERS if self.is_open(form) else _CLOSED_ORDERS)
            return order.replace("{C}", capital(form)).replace("{}", form)
        if rng.random() < 0.4:
            form = form.rstrip(".?!")
            if form[:2] not in ("I ", "I'") and not form[1].isupper():
                form = form[0].lower() + form[1:]
        is_whole = self.is_open(form) or form[-1] in ".?!" or "please" in form.lower()
        return form if is_whole or rng.random() > 0.15 else f"{form} please"


def _said(value: Any) -> str:
    if isinstance(value, list):
        return listed(cast("list[str]", value))
    return value if isinstance(value, str) else json.dumps(value)


def _filled(form: str, said: dict[str, str]) -> str:
    """The form with its values: "on Monday", but "next Monday"."""
    for name, value in said.items():
        if is_own_day(value):
            form = form.replace(f"on {{{name}}}", value).replace(f"On {{{name}}}", capital(value))
    return form.format_map(said)


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
    of_values: dict[str, Callable[[Random, Json], Any]] | None = None,
    **found: Callable[[Random], Any],
) -> ToolKind:
    """A tool whose names are parted by spaces and whose requests stand on lines of their own.

    What is found depends on what was given where it is one of `of_values`.
    """
    lines = tuple(line.strip() for line in requests.strip().splitlines())
    every = {name: _whatever_was_given(value) for name, value in found.items()} | (of_values or {})
    errand = Wordings(slots, lines, results, answer, every)
    parameters = tuple(argument for argument, _ in slots)
    return ToolKind(tuple(names.split()), descriptions, parameters, errand, noun, "\n")


def _whatever_was_given(value: Callable[[Random], Any]) -> Callable[[Random, Json], Any]:
    return lambda rng, _: value(rng)


def text(names: str, value: Callable[[Random], str], about: str = "") -> Slot:
    """A text whose end is seen: a name, a place, a day, what something goes by."""
    return Argument(tuple(names.split()), about=about), value


def free_text(names: str, value: Callable[[Random], str], about: str = "") -> Slot:
    """A text of any words, to which more of them could belong."""
    return Argument(tuple(names.split()), about=about, is_free=True), value


def whole(names: str, least: int, most: int, about: str = "") -> Slot:
    """A whole number from the least to the most."""
    argument = Argument(tuple(names.split()), "integer", about=about)
    return argument, lambda rng: rng.randint(least, most)


def number(names: str, value: Callable[[Random], float], about: str = "") -> Slot:
    """A number that need not be whole."""
    return Argument(tuple(names.split()), "number", about=about), value


def flag(names: str, about: str = "") -> Slot:
    """What is true or false."""
    argument = Argument(tuple(names.split()), "boolean", about=about)
    return argument, lambda rng: rng.random() < 0.5


def several(names: str, value: Callable[[Random], str], about: str = "") -> Slot:
    """A list of one to four texts, each another one."""
    argument = Argument(tuple(names.split()), "array", about=about, is_free=True)
    return argument, lambda rng: list(dict.fromkeys(value(rng) for _ in range(rng.randint(1, 4))))


def one_of(names: str, choices: str, about: str = "") -> Slot:
    """One of the choices, which spaces part."""
    every = tuple(choices.split())
    argument = Argument(tuple(names.split()), "enum", every, about=about)
    return argument, lambda rng: rng.choice(every)


def may(slot: Slot) -> Slot:
    """The parameter, as an optional one."""
    return replace(slot[0], is_required=False), slot[1]


CITY = text("city location place town", city_of, "Name of the city, for example Oslo")


@dataclass(frozen=True)
class Named:
    """A kind of tool under one name, its parameters under one name each, or left out.

    `task` is what it is for, in the words of its definition, where its verb may be in the third
    person.
    """

    kind: ToolKind
    definition: Json
    names: tuple[str | None, ...]
    task: str

    def turn(self, rng: Random, chat: Chat) -> None:
        """One errand, sometimes two at once."""
        errands = [self._errand(rng) for _ in range(rng.choice((1, 1, 1, 1, 2)))]
        name = self.definition["name"]
        calls = [Call(name, self._arguments(errand)) for errand in errands]
        request = self.kind.joint.join(errand.request for errand in errands)
        plan = plan_of(self.task, name)
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


def definition_of(rng: Random, kind: ToolKind) -> Named:
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
        # One that no request gives; no other parameter's name ends like this.
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


def _description(rng: Random, kind: ToolKind) -> tuple[str, str]:
    """A description, and the task that it tells."""
    short = kind.descriptions[0]
    if len(kind.descriptions) == 1:
        return short, _task(short)
    description, how = rng.choice(kind.descriptions), rng.random()
    if how < 0.2:
        return rng.choice(_LEADS).format(_task(short)), _task(short)
    if description.startswith("Use this"):
        return f"{short} {description}", _task(short)
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
