"""The vendor's converter as all protocols use it: bodies to conversations.

Owns the name under which it knows the model, the efforts that it knows, what becomes of its errors,
and an answer that is left open. What it is given, the protocols clean before.
"""

import json
from collections.abc import Callable
from typing import Any

import deepseek_recipe as recipe

from mlx_engine.errors import BadRequest
from mlx_engine.server.body import note, note_unknown
from mlx_engine.server.fields import as_object, check_types, quoted

MODEL = "ds41"
OPTIONS = recipe.ConversionOptions().with_model_alias(MODEL, recipe.ModelVersion.DeepseekV41Flash)

_EFFORTS = {"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"}

_THINKING = ("enabled", "adaptive", "disabled")


def thinking(path: str, given: Any) -> str | None:
    """Which kind of thinking is asked for, None where nothing is said. Raises BadRequest.

    One that is not known counts as enabled.
    """
    if given is None:
        return None
    given = as_object(given, "thinking")
    note_unknown(f"{path} thinking", given, ("type", "display"))
    check_types(given, {"budget_tokens": int, "display": str, "type": str}, "thinking")
    kind = given.get("type")
    if kind is None or kind in _THINKING:
        return kind
    note(f"{path}: the thinking {quoted(kind)} is not known and counts as enabled")
    return "enabled"


def effort(path: str, value: str | None) -> str | None:
    """The effort that is meant, None where none is given or it is not known."""
    if value is None or value in _EFFORTS:
        return value
    note(f"{path}: the effort {quoted(value)} is not known and counts as high")
    return None


def converted(convert: Callable[[], recipe.ConversationRequest]) -> recipe.Conversation:
    """What the converter makes of a body. Raises BadRequest where it refuses."""
    try:
        return convert().conversation
    except recipe.ConversionError as error:
        raise BadRequest(_sentence(error)) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRequest(str(error)) from None


def continued(conversation: recipe.Conversation) -> recipe.Conversation:
    """The conversation, its last answer left open where that is its end. Raises BadRequest."""
    messages = conversation.messages
    if not messages or messages[-1].role != "assistant":
        return conversation
    last = messages[-1]
    if last.tool_calls:
        raise BadRequest("the last message calls a tool: add a message with its result")
    left_open = recipe.AssistantMessage(last.content, last.reasoning_content, None, True)
    return recipe.Conversation(
        [*messages[:-1], left_open],
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
    )


def _sentence(error: recipe.ConversionError) -> str:
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)
