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
from mlx_engine.server.blocks import ImageInNewestMessage, assistant_blocks, user_blocks
from mlx_engine.server.body import note, note_unknown

# Changes with every request or conversation, and would make every prompt a new one.
_ATTRIBUTION = "x-anthropic-billing-header:"

_EFFORTS = {"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"}

_KNOWN_FIELDS = frozenset(
    "max_tokens messages metadata model output_config seed stop_sequences stream system "
    "temperature thinking tool_choice tools top_p".split()
)

_MODEL = "ds41"
_OPTIONS = recipe.ConversionOptions().with_model_alias(_MODEL, recipe.ModelVersion.DeepseekV41Flash)

Object = dict[str, Any]


def read(body: Object, *, for_count: bool = False) -> Request:
    """The request that a body asks for; `for_count` when only its prompt matters.

    Raises BadRequest.
    """
    note_unknown("/v1/messages", body, _KNOWN_FIELDS)
    _refuse_formats(body)
    turns = _turns(body.get("messages"))
    is_continued = bool(turns) and turns[-1].role == "assistant"
    choice, tool = _tool_choice(body.get("tool_choice"))
    cleaned: Object = {
        "model": _MODEL,
        "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
    }
    system = _system_text(body.get("system"))
    if system:
        cleaned["system"] = system
    tools = _tools(body.get("tools"))
    if tools:
        cleaned["tools"] = tools
    if choice == "none":
        cleaned["tool_choice"] = {"type": "none"}
    # A call cannot begin before the reasoning has ended, so there is none.
    if tool is not None or not _is_thinking(body.get("thinking")):
        cleaned["thinking"] = {"type": "disabled"}
    effort = _effort(body.get("output_config"))
    if effort is not None:
        cleaned["output_config"] = {"effort": effort}
    conversation = _convert(cleaned)
    if is_continued:
        conversation = _continued(conversation)
    return Request(
        conversation=conversation,
        signatures=[turn.signature for turn in turns if turn.role == "assistant"],
        signature=secrets.token_urlsafe(32),
        sampling=Sampling() if for_count else _sampling(body),
        max_tokens=None if for_count else _integer(body, "max_tokens"),
        stop=() if for_count else _stop_sequences(body.get("stop_sequences")),
        starts_in_call=tool,
    )


def _convert(cleaned: Object) -> recipe.Conversation:
    try:
        return recipe.MessagesRequest(cleaned).convert(_OPTIONS).conversation
    except recipe.ConversionError as error:
        raise BadRequest(str(error)) from None
    except UnicodeError:
        raise BadRequest("a text is not Unicode: it holds half of a surrogate pair") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadRequest(str(error)) from None


def _continued(conversation: recipe.Conversation) -> recipe.Conversation:
    """The same conversation with its last answer left open."""
    *messages, last = conversation.messages
    if last.tool_calls:
        raise BadRequest("the last message calls a tool: add a message with its tool_result")
    messages.append(recipe.AssistantMessage(last.content, last.reasoning_content, None, True))
    effort = conversation.reasoning_effort
    return recipe.Conversation(
        messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=effort,
    )


@dataclass
class _Turn:
    """A message as the converter takes it; signature: of an answer's reasoning."""

    role: str
    content: str | list[Object]
    signature: str = ""

    @property
    def calls(self) -> bool:
        return isinstance(self.content, list) and any(
            block["type"] == "tool_use" for block in self.content
        )


def _turns(messages: Any) -> list[_Turn]:
    """The messages: empty ones left out, of one role in a row put together.

    System entries stay where they are, but for one between calls and their results, which the
    converter refuses: it goes behind the results.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: at least one message is required")
    entries = cast(list[Any], messages)
    newest = max((i for i, m in enumerate(entries) if _role(m, i) == "user"), default=-1)
    turns: list[_Turn] = []
    waiting: list[_Turn] = []
    for i, message in enumerate(entries):
        turn = _turn(message, i, is_newest=i == newest)
        if turn is None:
            continue
        if turn.role == "system" and turns and turns[-1].calls:
            waiting.append(turn)
            continue
        last = turns[-1] if turns else None
        if last is not None and last.role == turn.role != "system":
            blocks = [*_blocks(last.content), *_blocks(turn.content)]
            # The converter wants results first.
            last.content = sorted(blocks, key=lambda block: block["type"] != "tool_result")
            last.signature = turn.signature or last.signature
            continue
        if turn.role != "user":
            turns += waiting
            waiting = []
        turns.append(turn)
    return turns + waiting


def _role(message: Any, i: int) -> str:
    role: Any = cast(Object, message).get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"messages.{i}: a message has the role user, assistant or system")
    return role


def _turn(message: Object, i: int, *, is_newest: bool) -> _Turn | None:
    role, content = message["role"], message.get("content")
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
    return _Turn(role, answer, signature) if answer else None


def _blocks(content: str | list[Object]) -> list[Object]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _objects(content: Any, where: str) -> list[Object]:
    """The blocks of a content, each an object that has a type."""
    if isinstance(content, str):
        return _blocks(content)
    if not isinstance(content, list):
        raise BadRequest(f"{where}: it is a string or a list of blocks")
    for i, block in enumerate(cast(list[Any], content)):
        if not isinstance(block, dict) or not isinstance(cast(Object, block).get("type"), str):
            raise BadRequest(f"{where}.{i}: a block is an object with a type")
    return cast(list[Object], content)


def _texts(blocks: Sequence[Object], where: str) -> Iterator[str]:
    for i, block in enumerate(blocks):
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


def _tools(tools: Any) -> list[Object]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise BadRequest("tools: it is a list of tools")
    return [
        tool for i, each in enumerate(cast(list[Any], tools)) for tool in _tool(each, f"tools.{i}")
    ]


def _tool(tool: Any, where: str) -> Iterator[Object]:
    if not isinstance(tool, dict):
        raise BadRequest(f"{where}: a tool is an object")
    tool = cast(Object, tool)
    kind = tool.get("type", "custom")
    if not isinstance(kind, str):
        raise BadRequest(f"{where}.type: it is a string")
    if kind != "custom":
        # Anthropic's servers run these themselves, and their prompts describe them.
        if not kind.startswith(("web_search", "web_fetch", "tool_search", "code_execution")):
            raise BadRequest(
                f"{where}: {kind!r} is not known here: describe the tool by an input_schema"
            )
        note(f"/v1/messages: a tool of the type {kind[:60]!r} is left out, nothing runs it here")
        return
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest(f"{where}.input_schema: a tool has a JSON schema of its input")
    schema = cast(Object, schema)
    if schema.get("type") is None:
        schema = {"type": "object", **{k: v for k, v in schema.items() if k != "type"}}
    # All tools are shown: no search would find one that is deferred.
    yield {"name": tool.get("name"), "input_schema": schema} | {
        key: tool[key] for key in ("description", "strict") if tool.get(key) is not None
    }


def _tool_choice(choice: Any) -> tuple[str, str | None]:
    """The kind of choice, and which tool the answer starts with."""
    if choice is None:
        return "auto", None
    choice = cast(Object, choice if isinstance(choice, dict) else {})
    kind = choice.get("type")
    if kind == "tool":
        name = choice.get("name")
        if not isinstance(name, str) or name == ANY_TOOL:
            raise BadRequest("tool_choice.name: name the tool to call")
        return kind, name
    if kind not in ("auto", "any", "none"):
        raise BadRequest("tool_choice.type: it is auto, any, tool or none")
    return kind, ANY_TOOL if kind == "any" else None


def _is_thinking(thinking: Any) -> bool:
    if thinking is None:
        return True
    kind: Any = cast(Object, thinking).get("type") if isinstance(thinking, dict) else None
    if not isinstance(kind, str):
        raise BadRequest("thinking.type: it is adaptive, enabled or disabled")
    return kind != "disabled"


def _effort(config: Any) -> str | None:
    effort: Any = cast(Object, config).get("effort") if isinstance(config, dict) else None
    if effort is None or (isinstance(effort, str) and effort in _EFFORTS):
        return effort
    note(f"/v1/messages: the effort {str(effort)[:20]!r} is not known and counts as high")
    return None


def _refuse_formats(body: Object) -> None:
    config = body.get("output_config")
    has_format = isinstance(config, dict) and cast(Object, config).get("format") is not None
    if has_format or body.get("output_format") is not None:
        raise BadRequest(
            "output_config.format: answers by a schema are not supported: leave the format out"
        )


def _sampling(body: Object) -> Sampling:
    values: Object = {name: _number(body, name) for name in ("temperature", "top_p")}
    values["seed"] = _integer(body, "seed")
    return Sampling(**{name: value for name, value in values.items() if value is not None})


def _number(body: Object, name: str) -> float | None:
    value = body.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise BadRequest(f"{name}: it is a number")


def _integer(body: Object, name: str) -> int | None:
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise BadRequest(f"{name}: it is a whole number")


def _stop_sequences(sequences: Any) -> list[str]:
    if sequences is None:
        return []
    listed = cast(list[Any], sequences if isinstance(sequences, list) else [None])
    if not all(isinstance(sequence, str) for sequence in listed):
        raise BadRequest("stop_sequences: it is a list of strings")
    return listed
