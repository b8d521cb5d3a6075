"""Requests of Anthropic's Messages protocol to this engine's.

Owns the cleaning: what the vendor's converter refuses without need, or renders otherwise than
meant, is put right before it sees the body, and what cannot be answered is refused by name. The
conversion itself is the package's.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import deepseek_recipe as recipe

from mlx_engine.errors import BadRequest
from mlx_engine.request import ANY_TOOL, Request
from mlx_engine.sampling import Sampling
from mlx_engine.server import converter, fields
from mlx_engine.server.blocks import (
    BLOCK_FIELDS,
    ImageInNewestMessage,
    assistant_blocks,
    user_blocks,
)
from mlx_engine.server.body import check_fields, note, note_form, note_unknown
from mlx_engine.server.fields import Object, as_list, as_object, as_string, is_true, quoted

# Changes with every request or conversation, and would make every prompt a new one.
_ATTRIBUTION = "x-anthropic-billing-header:"

# Computed states are kept without being asked for, so cache_control says nothing new.
_TOOL_FIELDS: fields.Types = {
    "cache_control": dict,
    "description": str,
    "input_schema": dict,
    "name": str,
    "strict": bool,
    "type": str,
}

_CHOICE_FIELDS: fields.Types = {"disable_parallel_tool_use": bool, "name": str, "type": str}

KNOWN_FIELDS: fields.Types = fields.SAMPLING_FIELDS | {
    "max_tokens": int,
    "messages": list,
    "metadata": dict,
    "model": str,
    "output_config": dict,
    "stop_sequences": list,
    "stream": bool,
    "system": (str, list),
    "thinking": dict,
    "tool_choice": dict,
    "tools": list,
}


def read(body: Object, *, for_count: bool = False) -> Request:
    """The request that a body asks for; `for_count` when only its prompt matters.

    Raises BadRequest.
    """
    check_fields("/v1/messages", body, KNOWN_FIELDS)
    _refuse_formats(body)
    sampling = Sampling() if for_count else fields.sampling(body)
    max_tokens = None if for_count else fields.integer(body, "max_tokens")
    stop = () if for_count else fields.stop_strings(body.get("stop_sequences"), "stop_sequences")
    turns = _turns(as_list(body.get("messages"), "messages", fields.MAX_MESSAGES))
    choice = _ToolChoice.read(body.get("tool_choice"))
    thinking = converter.thinking("/v1/messages", body.get("thinking"))
    cleaned: Object = {
        "model": converter.MODEL,
        "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
    }
    system = _system_text(body.get("system"))
    if system:
        cleaned["system"] = system
    tools = _tools(as_list(body.get("tools") or [], "tools", fields.MAX_TOOLS))
    if tools:
        cleaned["tools"] = tools
    if choice.is_none:
        cleaned["tool_choice"] = {"type": "none"}
    # A call cannot begin before the reasoning has ended, so there is none.
    if choice.tool is not None or thinking == "disabled":
        cleaned["thinking"] = {"type": "disabled"}
    effort = _effort(body.get("output_config"))
    if effort is not None:
        cleaned["output_config"] = {"effort": effort}
    conversation = converter.converted(
        lambda: recipe.MessagesRequest(cleaned).convert(converter.OPTIONS)
    )
    return Request(
        conversation=converter.continued(conversation),
        signatures=[turn.signature for turn in turns if turn.role == "assistant"],
        signature=secrets.token_urlsafe(32),
        sampling=sampling,
        max_tokens=max_tokens,
        stop=stop,
        starts_in_call=choice.tool,
        parallel_calls=choice.is_parallel,
    )


@dataclass
class _Turn:
    """A message as the converter takes it; signature: of an answer's reasoning."""

    role: str
    content: str | list[Object]
    signature: str = ""
    has_calls: bool = False


def _turns(messages: list[Any]) -> list[_Turn]:
    """The messages: empty ones left out, of one role in a row put together.

    System entries stay where they are, but for one between calls and their results, which the
    converter refuses: it goes behind the results.
    """
    if not messages:
        raise BadRequest("messages: at least one message is required")
    entries = [as_object(message, f"messages.{i}") for i, message in enumerate(messages)]
    newest = fields.newest_question([_role(entry, i) for i, entry in enumerate(entries)])
    turns: list[_Turn] = []
    waiting: list[_Turn] = []
    for i, entry in enumerate(entries):
        turn = _turn(entry, i, is_newest=i == newest)
        if turn is None:
            continue
        last = turns[-1] if turns else None
        if last is not None and last.has_calls and turn.role == "system":
            waiting.append(turn)
        elif last is not None and last.role == turn.role != "system":
            _join(last, turn)
        else:
            if turn.role != "user":
                turns += waiting
                waiting = []
            turns.append(turn)
    for turn in turns:
        if isinstance(turn.content, list):
            # The converter wants results first.
            turn.content.sort(key=lambda block: block["type"] != "tool_result")
    return turns + waiting


def _join(turn: _Turn, other: _Turn) -> None:
    assert isinstance(turn.content, list) and isinstance(other.content, list)
    turn.content += other.content
    turn.signature = other.signature or turn.signature
    turn.has_calls |= other.has_calls


def _role(message: Object, i: int) -> str:
    """Who speaks: user, assistant or system, or tool where the results of calls stand."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"messages.{i}: a message has the role user, assistant or system")
    blocks = cast(list[Any], content if role == "user" and isinstance(content, list) else [])
    kinds = (cast(Object, block).get("type") for block in blocks if isinstance(block, dict))
    return "tool" if "tool_result" in kinds else role


def _turn(message: Object, i: int, *, is_newest: bool) -> _Turn | None:
    role, content = message["role"], message.get("content")
    note_unknown("/v1/messages message", message, ("role", "content"))
    if content is None and role == "system":
        return None  # only carries settings
    where = f"messages.{i}.content"
    blocks = _objects(content, where)
    if role == "system":
        text = "\n\n".join(_texts(blocks, where))
        return _Turn(role, text) if text else None
    if role == "user":
        try:
            return _Turn(role, user_blocks(blocks, where, is_newest=is_newest))
        except ImageInNewestMessage:
            raise BadRequest(
                f"{where}: this server reads text only: describe the image, or leave it out"
            ) from None
    signatures = [block.get("signature") for block in blocks if block.get("type") == "thinking"]
    signature = next((s for s in reversed(signatures) if isinstance(s, str) and s), "")
    answer = assistant_blocks(blocks, where)
    has_calls = any(block["type"] == "tool_use" for block in answer)
    return _Turn(role, answer, signature, has_calls) if answer else None


def _objects(content: Any, where: str) -> list[Object]:
    """The blocks of a content, each an object that has a type."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadRequest(f"{where}: it is a string or a list of blocks")
    for i, block in enumerate(cast(list[Any], content)):
        if not isinstance(block, dict) or not isinstance(cast(Object, block).get("type"), str):
            raise BadRequest(f"{where}.{i}: a block is an object with a type")
    return cast(list[Object], content)


def _texts(blocks: Sequence[Object], where: str) -> Iterator[str]:
    for i, block in enumerate(blocks):
        check_fields("/v1/messages block", block, BLOCK_FIELDS, f"{where}.{i}")
        text = block.get("text")
        if block["type"] != "text" or not isinstance(text, str):
            raise BadRequest(f"{where}.{i}: a system text has blocks of text only")
        if text:
            yield text


def _system_text(system: Any) -> str:
    if system is None:
        return ""
    blocks = _objects(system, "system")
    texts = list(_texts(blocks, "system"))
    if texts and texts[0].startswith(_ATTRIBUTION):
        texts[0] = texts[0].partition("\n")[2]
    return "\n\n".join(text for text in texts if text)


def _tools(tools: list[Any]) -> list[Object]:
    return [tool for i, each in enumerate(tools) for tool in _tool(each, f"tools.{i}")]


def _tool(tool: Any, where: str) -> Iterator[Object]:
    tool = as_object(tool, where)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        kind = as_string(kind, f"{where}.type")
        # Anthropic's servers run these themselves, and their prompts describe them.
        if not kind.startswith(("web_search", "web_fetch", "tool_search", "code_execution")):
            raise BadRequest(
                f"{where}: {quoted(kind)} is not known here: describe the tool by an input_schema"
            )
        note(f"/v1/messages: a tool of the type {quoted(kind)} is left out, nothing runs it here")
        return
    check_fields("/v1/messages tool", tool, _TOOL_FIELDS, where)
    note_form("/v1/messages", tool)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest(f"{where}.input_schema: a tool has a JSON schema of its input")
    schema = cast(Object, schema)
    if schema.get("type") is None:
        schema = {"type": "object", **{k: v for k, v in schema.items() if k != "type"}}
    # All tools are shown: no search would find one that is deferred.
    yield {"name": as_string(tool.get("name"), f"{where}.name"), "input_schema": schema} | {
        key: tool[key] for key in ("description", "strict") if tool.get(key) is not None
    }


@dataclass(frozen=True)
class _ToolChoice:
    """Whether tools are turned off, which the answer starts with, and whether it may call more."""

    is_none: bool = False
    tool: str | None = None
    is_parallel: bool = True

    @classmethod
    def read(cls, choice: Any) -> "_ToolChoice":
        if choice is None:
            return cls()
        check_fields("/v1/messages tool_choice", choice, _CHOICE_FIELDS, "tool_choice")
        kind = choice.get("type")
        if kind not in ("auto", "any", "tool", "none"):
            raise BadRequest("tool_choice.type: it is auto, any, tool or none")
        tool = ANY_TOOL if kind == "any" else None
        if kind == "tool":
            tool = as_string(choice.get("name"), "tool_choice.name")
            if tool == ANY_TOOL:
                raise BadRequest("tool_choice.name: name the tool to call")
        return cls(kind == "none", tool, not is_true(choice, "disable_parallel_tool_use"))


def _effort(config: Any) -> str | None:
    if config is None:
        return None
    types: fields.Types = {"effort": str, "format": dict}
    check_fields("/v1/messages output_config", config, types, "output_config")
    return converter.effort("/v1/messages", config.get("effort"))


def _refuse_formats(body: Object) -> None:
    config = body.get("output_config")
    has_format = isinstance(config, dict) and cast(Object, config).get("format") is not None
    if has_format or body.get("output_format") is not None:
        raise BadRequest(
            "output_config.format: answers by a schema are not supported: leave the format out"
        )
