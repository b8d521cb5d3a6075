"""Requests of OpenAI's Responses protocol to this engine's.

Owns the cleaning of a body before the vendor's converter sees it: items that nothing here can use
are noted or refused by name. Nothing is stored, so a body holds its whole conversation.
"""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from mlx_engine.errors import BadRequest
from mlx_engine.request import Request
from mlx_engine.server import converter, fields, logprobs, openai_in
from mlx_engine.server.body import check_fields, note, note_form, note_unknown
from mlx_engine.server.fields import Object, as_list, as_object, as_string, quoted

PATH = "/v1/responses"

KNOWN_FIELDS: fields.Types = fields.SAMPLING_FIELDS | {
    "background": bool,
    "client_metadata": dict,
    "conversation": (str, dict),
    "include": list,
    "input": (str, list),
    "instructions": str,
    "max_output_tokens": int,
    "metadata": dict,
    "model": str,
    "parallel_tool_calls": bool,
    "previous_response_id": str,
    "prompt": dict,
    "prompt_cache_key": str,
    "reasoning": dict,
    "safety_identifier": str,
    "service_tier": str,
    "store": bool,
    "stream": bool,
    "stream_options": dict,
    "text": dict,
    "tool_choice": (str, dict),
    "tools": list,
    "top_logprobs": int,
    "truncation": str,
    "user": str,
}

_REFUSED = {
    "previous_response_id": "nothing is stored here, send the whole conversation as input",
    "conversation": "nothing is stored here, send the whole conversation as input",
    "prompt": "send its text as instructions or input",
    "background": "leave it out, and wait for the answer",
}

# Encrypted reasoning comes without being asked for.
_INCLUDED = (logprobs.OF_OUTPUT, "reasoning.encrypted_content")

# An answer's own items come back with their id, status and summary.
_MESSAGE_FIELDS: fields.Types = {
    "content": (str, list),
    "id": str,
    "role": str,
    "status": str,
    "type": str,
}
_ITEM_FIELDS: fields.Types = {
    "arguments": (str, dict),
    "call_id": str,
    "content": list,
    "encrypted_content": str,
    "id": str,
    "input": str,
    "name": str,
    "namespace": str,
    "output": (str, list),
    "status": str,
    "summary": list,
    "type": str,
}
_CUSTOM_FIELDS: fields.Types = {"description": str, "format": dict, "name": str, "type": str}
_NAMESPACE_FIELDS: fields.Types = {"description": str, "name": str, "tools": list, "type": str}

# The one that the converter has words for.
_CUSTOM_TOOL = "apply_patch"

_MESSAGE_ROLES = ("user", "assistant", "system", "developer")
_ANSWER_TYPES = ("reasoning", "function_call", "custom_tool_call")
_ITEM_TYPES = (*_ANSWER_TYPES, "function_call_output", "custom_tool_call_output")


@dataclass(frozen=True)
class Asked:
    """What a body asks for, and what of it the answer reports.

    custom: tools whose calls are one text. namespaces: of a tool's full name, its two parts.
    """

    request: Request
    echo: Object
    custom: frozenset[str]
    namespaces: dict[str, tuple[str, str]]


def read(body: Object) -> Asked:
    """What a body asks for. Raises BadRequest."""
    check_fields(PATH, body, KNOWN_FIELDS)
    openai_in.refuse(body, _REFUSED)
    text = as_object(body.get("text") or {}, "text")
    note_unknown(f"{PATH} text", text, ("format",))
    openai_in.refuse_format(text.get("format"), "text.format")
    is_without_tools, tool = openai_in.tool_choice(body.get("tool_choice"))
    items = _items(body.get("input"))
    cleaned: Object = {"model": converter.MODEL, "input": items}
    for each in as_list(body.get("include") or [], "include"):
        if as_string(each, "include") not in _INCLUDED:
            note(f"{PATH}: {quoted(each)} cannot be included")
    if body.get("truncation") not in (None, "disabled"):
        note(f"{PATH}: truncation has no effect, a prompt that is too long is refused")
    if body.get("instructions") is not None:
        cleaned["instructions"] = body["instructions"]
    tools = list(_tools(as_list(body.get("tools") or [], "tools", fields.MAX_TOOLS)))
    if tools:
        cleaned["tools"] = tools
        if is_without_tools:
            cleaned["tool_choice"] = "none"
    reasoning = as_object(body.get("reasoning") or {}, "reasoning")
    check_fields(f"{PATH} reasoning", reasoning, {"effort": str}, "reasoning")
    # A call cannot begin before the reasoning has ended, so there is none.
    effort = "none" if tool else converter.effort(PATH, reasoning.get("effort"))
    if effort is not None:
        cleaned["reasoning"] = {"effort": effort}
    namespaces: dict[str, tuple[str, str]] = {}

    def convert() -> recipe.ConversationRequest:
        request = recipe.ResponsesRequest(cleaned)
        namespaces.update(request.namespace_tool_map(converter.OPTIONS))
        return request.convert(converter.OPTIONS)

    conversation = converter.continued(converter.converted(convert))
    signatures = _signatures(items)
    is_known = len(signatures) == sum(m.role == "assistant" for m in conversation.messages)
    return Asked(
        Request(
            conversation=conversation,
            signatures=signatures if is_known else (),
            signature=secrets.token_urlsafe(32),
            sampling=fields.sampling(body),
            max_tokens=fields.integer(body, "max_output_tokens"),
            starts_in_call=tool,
            parallel_calls=openai_in.is_parallel(body),
            logprobs=logprobs.of_responses(body),
        ),
        _echo(body, reasoning),
        frozenset(each["name"] for each in tools if each["type"] == "custom"),
        namespaces,
    )


def _items(given: Any) -> list[Object]:
    """The items of the conversation as the converter takes them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    entries = [
        as_object(e, f"input.{i}")
        for i, e in enumerate(as_list(given, "input", fields.MAX_MESSAGES))
    ]
    newest = fields.newest_question([_speaker(entry) for entry in entries])
    items = (_item(e, f"input.{i}", is_newest=i == newest) for i, e in enumerate(entries))
    return [item for item in items if item is not None]


def _speaker(item: Object) -> str:
    """Who wrote an item: user, assistant, or tool."""
    kind = str(_kind(item))
    if kind == "message":
        return str(item.get("role"))
    return "tool" if kind.endswith("_output") else "assistant"


def _kind(item: Object) -> Any:
    """An item's type, which a message need not have."""
    return "message" if item.get("type") is None else item["type"]


def _item(item: Object, where: str, *, is_newest: bool) -> Object | None:
    kind = as_string(_kind(item), f"{where}.type")
    if kind == "message":
        check_fields(f"{PATH} item", item, _MESSAGE_FIELDS, where)
    elif kind in _ITEM_TYPES:
        check_fields(f"{PATH} item", item, _ITEM_FIELDS, where)
    match kind:
        case "message":
            role = item.get("role")
            if role not in _MESSAGE_ROLES:
                raise BadRequest(f"{where}.role: it is one of {', '.join(_MESSAGE_ROLES)}")
            content = item.get("content")
            text = openai_in.text_of(PATH, content, f"{where}.content", is_newest=is_newest)
            return {"role": role, "content": text}
        case "reasoning":
            # A summary is not what the model wrote.
            content = item.get("content") or ""
            text = openai_in.text_of(PATH, content, f"{where}.content", is_newest=False)
            content = [{"type": "reasoning_text", "text": text}] if text else []
            signature = item.get("encrypted_content") or ""
            return {
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": as_string(signature, f"{where}.encrypted_content"),
            }
        case "function_call":
            call = _strings(item, where, "call_id", "name")
            arguments = openai_in.arguments_text(item.get("arguments"), f"{where}.arguments")
            if item.get("namespace"):
                call |= _strings(item, where, "namespace")
            return {"type": kind, **call, "arguments": arguments}
        case "custom_tool_call":
            return {"type": kind, **_strings(item, where, "call_id", "name", "input")}
        case "function_call_output" | "custom_tool_call_output":
            output = item.get("output")
            text = openai_in.text_of(PATH, output, f"{where}.output", is_newest=False)
            return {"type": kind, **_strings(item, where, "call_id"), "output": text}
        case "item_reference":
            raise BadRequest(f"{where}: nothing is stored here, send the item itself")
        case _:
            note(f"{PATH}: an item {quoted(kind)} is left out")
            return None


def _strings(item: Object, where: str, *names: str) -> Object:
    return {name: as_string(item.get(name), f"{where}.{name}") for name in names}


def _signatures(items: Sequence[Object]) -> list[str]:
    """What came back with the reasoning of each answer, of which every run of items is one."""
    signatures: list[str] = []
    is_open = False
    for item in items:
        is_answer = item.get("type") in _ANSWER_TYPES or item.get("role") == "assistant"
        if is_answer and not is_open:
            signatures.append("")
        is_open = is_answer
        if item.get("encrypted_content"):
            signatures[-1] = item["encrypted_content"]
    return signatures


def _tools(tools: Iterable[Any], tools_where: str = "tools") -> Iterator[Object]:
    for i, each in enumerate(tools):
        where = f"{tools_where}.{i}"
        tool = as_object(each, where)
        kind = as_string(tool.get("type"), f"{where}.type")
        if kind == "function":
            yield {"type": kind} | openai_in.function_fields(PATH, tool, where)
        elif kind == "custom":
            name = as_string(tool.get("name"), f"{where}.name")
            check_fields(f"{PATH} custom tool", tool, _CUSTOM_FIELDS, where)
            if name != _CUSTOM_TOOL:
                raise BadRequest(
                    f"{where}: of custom tools {_CUSTOM_TOOL} alone is supported: make "
                    f"{quoted(name)} a function"
                )
            note_form(PATH, tool)
            yield {key: value for key, value in tool.items() if value is not None}
        elif kind == "namespace":
            as_string(tool.get("name"), f"{where}.name")
            check_fields(f"{PATH} namespace", tool, _NAMESPACE_FIELDS, where)
            inner = as_list(tool.get("tools") or [], f"{where}.tools")
            yield tool | {"tools": list(_tools(inner, f"{where}.tools"))}
        else:
            note(f"{PATH}: a tool of the type {quoted(kind)} is left out, nothing runs it here")


def _echo(body: Object, reasoning: Object) -> Object:
    """What the answer repeats of the request."""
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": openai_in.is_parallel(body),
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
        "truncation": "disabled",
        "user": body.get("user"),
    }
