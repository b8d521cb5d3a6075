"""Single fields of a body: their types, their sizes, and those that mean the same everywhere.

Owns the sentences that say what a field must be, each with the field's place in the body, and how
many entries a list may have. What a whole body means is the protocols' part.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from mlx_engine.errors import BadRequest
from mlx_engine.sampling import Sampling

Object = dict[str, Any]

# Of each field, the types that its value may have: int for whole numbers, float for all numbers,
# object for any.
Types = Mapping[str, type | tuple[type, ...]]

# As many as Anthropic's servers take.
MAX_MESSAGES = 100_000
MAX_TOOLS = 10_000

# Each costs a step for every character of the answer; the vendor's servers take 16 too.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1_000

# Of what a client wrote, an error or a note repeats so much.
_QUOTED_CHARACTERS = 60

SAMPLING_FIELDS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
}

_NAMES = {
    str: "a string",
    list: "a list",
    dict: "an object",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}

_SEEDS = 2**63


def quoted(value: object) -> str:
    """The beginning of what a client wrote, for an error or a note."""
    return repr(str(value)[:_QUOTED_CHARACTERS])


def check_types(body: Object, types: Types, where: str = "") -> None:
    """Raise BadRequest for the first field whose value has a wrong type; null has none.

    A whole number that is written as another, such as 40.0, becomes one in the body.
    where: the place of the object in the body.
    """
    for name, allowed in types.items():
        value = body.get(name)
        if value is not None:
            allowed = allowed if isinstance(allowed, tuple) else (allowed,)
            if type(value) is float and int in allowed and value.is_integer():
                body[name] = value = int(value)
            _check_type(value, f"{where}.{name}" if where else name, *allowed)


def _check_type(value: Any, where: str, *types: type) -> None:
    # Exactly: to Python, true and false are whole numbers too.
    if type(value) in types or object in types or (type(value) is int and float in types):
        return
    raise BadRequest(f"{where}: it is {' or '.join(_NAMES[each] for each in types)}")


def as_object(value: Any, where: str) -> Object:
    """The value as an object. Raises BadRequest."""
    _check_type(value, where, dict)
    return cast(Object, value)


def as_list(value: Any, where: str, most: int | None = None) -> list[Any]:
    """The value as a list of `most` entries or fewer. Raises BadRequest."""
    _check_type(value, where, list)
    entries = cast(list[Any], value)
    if most is not None and len(entries) > most:
        raise BadRequest(f"{where}: it has {len(entries):,} entries, and may have {most:,}")
    return entries


def as_string(value: Any, where: str) -> str:
    """The value as a string. Raises BadRequest."""
    if not isinstance(value, str):
        raise BadRequest(f"{where}: it is missing, or no string")
    return value


def is_true(body: Object, name: str) -> bool:
    """Whether a flag is set; null is no. Raises BadRequest for what is no flag."""
    check_types(body, {name: bool})
    return bool(body.get(name))


def integer(body: Object, name: str) -> int | None:
    """A whole number, None where there is none. Raises BadRequest."""
    check_types(body, {name: int})
    return body.get(name)


def number(body: Object, name: str) -> float | None:
    """A number, None where there is none. Raises BadRequest."""
    check_types(body, {name: float})
    value = body.get(name)
    try:
        return None if value is None else float(value)
    except OverflowError:
        raise BadRequest(f"{name}: the number is too large") from None


def sampling(body: Object) -> Sampling:
    """How tokens are drawn, as the body says. Raises BadRequest."""
    values: Object = {name: number(body, name) for name in ("temperature", "top_p", "min_p")}
    top_k, seed = integer(body, "top_k"), integer(body, "seed")
    # Where it comes from, -1 stands for all tokens as 0 does.
    values["top_k"] = 0 if top_k == -1 else top_k
    # OpenAI's may be negative.
    values["seed"] = seed % _SEEDS if seed is not None and abs(seed) <= _SEEDS else seed
    return Sampling(**{name: value for name, value in values.items() if value is not None})


def stop_strings(value: Any, where: str) -> list[str]:
    """The strings that end the answer, one or a list of them. Raises BadRequest."""
    if value is None:
        return []
    listed = [value] if isinstance(value, str) else as_list(value, where, MAX_STOP_STRINGS)
    strings = [as_string(each, where) for each in listed]
    if any(len(string) > MAX_STOP_CHARACTERS for string in strings):
        raise BadRequest(f"{where}: one is longer than {MAX_STOP_CHARACTERS:,} characters")
    return strings


def newest_question(roles: Sequence[str]) -> int:
    """Which message of the user is to be answered, -1 where the results of tools are.

    What stands beside results was put there by the program that ran the tools.
    """
    newest = -1
    for i in reversed(range(len(roles))):
        if roles[i] == "tool":
            return -1
        if roles[i] == "assistant" and newest >= 0:
            break
        if roles[i] == "user" and newest < 0:
            newest = i
    return newest
