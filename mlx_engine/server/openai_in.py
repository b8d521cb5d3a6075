"""What the bodies of OpenAI's protocols have in common, made into this engine's terms.

Owns the fields that they share, and what is refused because the answer would not be what was asked
for. A field that has no effect is noted in the log; what a whole body means is the endpoints' part.
"""

import json
from typing import Any, cast

from mlx_engine.errors import BadRequest
from mlx_engine.server.body import IMAGE_NOTE, note, note_form, note_unknown
from mlx_engine.server.fields import Object, as_object, as_string, integer, is_true, quoted
from mlx_engine.tool_calls import ANY_TOOL

# An answer's own parts come back with the last two, which were never the model's words.
_TEXT_FIELDS = ("type", "text", "annotations", "logprobs")

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def includes_usage(body: Object) -> bool:
    """Whether a stream ends with the usage. Raises BadRequest for what is no flag."""
    options = body.get("stream_options")
    return options is not None and is_true(as_object(options, "stream_options"), "include_usage")


def is_parallel(body: Object) -> bool:
    """Whether the answer may hold several calls. Raises BadRequest."""
    return body.get("parallel_tool_calls") is None or is_true(body, "parallel_tool_calls")


def refuse_many(body: Object) -> None:
    """Raise BadRequest for more than one answer to a prompt."""
    for name in ("n", "best_of"):
        if integer(body, name) not in (None, 1):
            raise BadRequest(f"{name}: one answer at a time is supported: ask again for another")


def refuse_format(format: Any, where: str) -> None:
    """Raise BadRequest for an answer in a form that nothing here enforces."""
    if format is None or as_object(format, where).get("type") == "text":
        return
    raise BadRequest(f"{where}: answers in a given form are not supported: leave it out")


def refuse(body: Object, what: dict[str, str]) -> None:
    """Raise BadRequest for the first field that is set; `what` says of each what to do instead."""
    for name, remedy in what.items():
        if body.get(name) not in (None, False, "", [], {}):
            raise BadRequest(f"{name}: it is not supported: {remedy}")


def note_penalties(path: str, body: Object) -> None:
    """Say in the log that tokens are drawn without penalties."""
    for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
        if body.get(name):
            note(f"{path}: {name} has no effect")


def tool_choice(choice: Any) -> tuple[bool, str | None]:
    """Whether tools are turned off, and which tool the answer starts with. Raises BadRequest."""
    if choice in (None, "auto", "none"):
        return choice == "none", None
    if choice == "required":
        return False, ANY_TOOL
    function: Any = choice
    if isinstance(choice, dict):
        function = cast(Object, choice)
        if function.get("type") == "function":
            function = function.get("function", function)
            name = as_string(as_object(function, "tool_choice").get("name"), "tool_choice.name")
            if name != ANY_TOOL:
                return False, name
    raise BadRequest("tool_choice: it is auto, none, required or a function with its name")


def text_of(path: str, content: Any, where: str, *, is_newest: bool) -> str:
    """The text of a message: its parts, with a line in place of what the model cannot see.

    Raises BadRequest for a damaged part, and where the newest message itself carries such a part.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}: it is a string or a list of parts")
    texts: list[str] = []
    for i, each in enumerate(cast(list[Any], content)):
        part = as_object(each, f"{where}.{i}")
        kind = as_string(part.get("type"), f"{where}.{i}.type")
        if kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text"):
            note_unknown(f"{path} part", part, _TEXT_FIELDS)
            texts.append(as_string(part.get("text"), f"{where}.{i}.text"))
        elif kind == "refusal":
            texts.append(as_string(part.get("refusal"), f"{where}.{i}.refusal"))
        elif is_newest:
            raise BadRequest(
                f"{where}.{i}: this server reads text only: describe the {kind[:60]}, or leave it "
                "out"
            )
        else:
            note(f"{path}: a part {quoted(kind)} is not shown to the model")
            is_image = kind in ("image_url", "input_image", "image")
            texts.append(
                IMAGE_NOTE if is_image else f"[{kind[:60]} not shown: this server reads text only]"
            )
    return "\n\n".join(texts)


def function_fields(path: str, function: Object, where: str) -> Object:
    """What the converter takes of a function's declaration; its parameters are an object's.

    Raises BadRequest for one without a name.
    """
    as_string(function.get("name"), f"{where}.name")
    note_unknown(f"{path} function", function, (*_FUNCTION_FIELDS, "type"))
    note_form(path, function)
    known = {key: function[key] for key in _FUNCTION_FIELDS if function.get(key) is not None}
    schema: Any = known.get("parameters")
    if isinstance(schema, dict) and cast(Object, schema).get("type") is None:
        rest = {key: value for key, value in cast(Object, schema).items() if key != "type"}
        known["parameters"] = {"type": "object", **rest}
    return known


def arguments_text(arguments: Any, where: str) -> str:
    """The arguments of an earlier call as the text of JSON. Raises BadRequest."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return as_string(arguments if arguments is not None else "{}", where)
