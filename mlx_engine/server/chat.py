"""The endpoint of OpenAI's Chat Completions protocol.

Owns what a body means, the chunks of a streamed answer and the whole one. The conversion is the
vendor's package's, after what it refuses without need was put right.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlx_engine.answer import ReasoningDelta, TextDelta
from mlx_engine.errors import BadRequest
from mlx_engine.request import Request
from mlx_engine.respond import End, Event, Progress
from mlx_engine.server import converter, fields, logprobs, openai_in
from mlx_engine.server.body import check_fields, note_unknown
from mlx_engine.server.errors import request_id
from mlx_engine.server.fields import Object, as_list, as_object, as_string, is_true, quoted
from mlx_engine.server.openai_out import FINISH_REASONS, ChunkStream, new_id, now_s, usage
from mlx_engine.server.service import Service
from mlx_engine.tool_calls import ToolCall, ToolCallDelta, ToolCallEnd, ToolCallStart

PATH = "/v1/chat/completions"

KNOWN_FIELDS: fields.Types = fields.SAMPLING_FIELDS | {
    "best_of": int,
    "frequency_penalty": float,
    "function_call": (str, dict),
    "functions": list,
    "logit_bias": dict,
    "logprobs": bool,
    "max_completion_tokens": int,
    "max_tokens": int,
    "messages": list,
    "metadata": dict,
    "model": str,
    "n": int,
    "parallel_tool_calls": bool,
    "presence_penalty": float,
    "reasoning": dict,
    "reasoning_effort": str,
    "response_format": dict,
    "stop": (str, list),
    "store": bool,
    "stream": bool,
    "stream_options": dict,
    "thinking": dict,
    "tool_choice": (str, dict),
    "tools": list,
    "top_logprobs": int,
    "user": str,
}

_MESSAGE_FIELDS: fields.Types = {
    "content": (str, list),
    "reasoning": str,
    "reasoning_content": str,
    "role": str,
    "tool_call_id": str,
    "tool_calls": list,
}

_REFUSED = {
    "functions": "declare tools",
    "function_call": "use tool_choice",
    "audio": "this server reads and writes text only",
}


def router(service: Service) -> APIRouter:
    """`/v1/chat/completions`."""
    routes = APIRouter()

    @routes.post(PATH)
    async def _create(http: HttpRequest) -> Response:  # pyright: ignore[reportUnusedFunction]
        service.check_room()
        body = await service.body(http)
        is_streamed = is_true(body, "stream")
        has_usage = openai_in.includes_usage(body)
        asked = await service.read(lambda: read(body))
        ticket = await service.take(asked)
        chunks = ChatChunks(asked, service.model_id, has_usage=has_usage)
        if is_streamed:
            return service.stream(ticket, ChunkStream(chunks, PATH, request_id(http)))
        return service.whole(ticket, chunks, http)

    return routes


def read(body: Object) -> Request:
    """The request that a body asks for. Raises BadRequest."""
    check_fields(PATH, body, KNOWN_FIELDS)
    openai_in.refuse(body, _REFUSED)
    openai_in.refuse_many(body)
    openai_in.refuse_format(body.get("response_format"), "response_format")
    openai_in.note_penalties(PATH, body)
    is_without_tools, tool = openai_in.tool_choice(body.get("tool_choice"))
    cleaned: Object = {
        "model": converter.MODEL,
        "messages": _messages(as_list(body.get("messages"), "messages", fields.MAX_MESSAGES)),
    }
    tools = _tools(body.get("tools"))
    if tools:
        cleaned["tools"] = tools
        if is_without_tools:
            cleaned["tool_choice"] = "none"
    cleaned |= _thinking(body)
    if tool is not None:
        # A call cannot begin before the reasoning has ended, so there is none.
        cleaned["thinking"] = {"type": "disabled"}
        cleaned.pop("reasoning_effort", None)
    max_tokens = fields.integer(body, "max_completion_tokens")
    if max_tokens is None:
        max_tokens = fields.integer(body, "max_tokens")
    return Request(
        conversation=converter.converted(
            lambda: recipe.ChatCompletionRequest(cleaned).convert(converter.OPTIONS)
        ),
        sampling=fields.sampling(body),
        max_tokens=max_tokens,
        stop=fields.stop_strings(body.get("stop"), "stop"),
        starts_in_call=tool,
        parallel_calls=openai_in.is_parallel(body),
        logprobs=logprobs.of_chat(body),
    )


def _thinking(body: Object) -> Object:
    """The vendor's two fields, the effort also from where other servers have it."""
    fields: Object = {}
    reasoning = as_object(body.get("reasoning") or {}, "reasoning")
    check_fields(f"{PATH} reasoning", reasoning, {"effort": str}, "reasoning")
    effort = body.get("reasoning_effort")
    effort = converter.effort(PATH, reasoning.get("effort") if effort is None else effort)
    if effort is not None:
        fields["reasoning_effort"] = effort
    thinking = converter.thinking(PATH, body.get("thinking"))
    if thinking is not None:
        fields["thinking"] = {"type": thinking}
    return fields


def _messages(messages: list[Any]) -> list[Object]:
    """The messages as the converter takes them; a last one of the assistant is to be continued."""
    entries = [as_object(message, f"messages.{i}") for i, message in enumerate(messages)]
    newest = fields.newest_question([str(message.get("role")) for message in entries])
    cleaned = [_message(m, f"messages.{i}", is_newest=i == newest) for i, m in enumerate(entries)]
    if cleaned and cleaned[-1]["role"] == "assistant":
        if "tool_calls" in cleaned[-1]:
            raise BadRequest("the last message calls a tool: add a message with its result")
        cleaned[-1]["prefix"] = True
    return cleaned


def _message(message: Object, where: str, *, is_newest: bool) -> Object:
    check_fields(f"{PATH} message", message, _MESSAGE_FIELDS, where)
    role = as_string(message.get("role"), f"{where}.role")
    content = message.get("content")
    match role:
        case "assistant":
            return _answer(message, where)
        case "system" | "developer" | "user" | "latest_reminder":
            text = openai_in.text_of(PATH, content, f"{where}.content", is_newest=is_newest)
            return {"role": "system" if role == "developer" else role, "content": text}
        case "tool":
            text = openai_in.text_of(PATH, content, f"{where}.content", is_newest=False)
            id = as_string(message.get("tool_call_id"), f"{where}.tool_call_id")
            return {"role": "tool", "tool_call_id": id, "content": text}
        case _:
            raise BadRequest(
                f"{where}.role: it is {quoted(role)}, it must be system, developer, user, "
                "assistant or tool"
            )


def _answer(message: Object, where: str) -> Object:
    content = message.get("content")
    text = openai_in.text_of(PATH, content or "", f"{where}.content", is_newest=False)
    answer: Object = {"role": "assistant", "content": text}
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        reasoning = message.get("reasoning")
    if reasoning is not None:
        answer["reasoning_content"] = reasoning
    calls = as_list(message.get("tool_calls") or [], f"{where}.tool_calls")
    if calls:
        answer["tool_calls"] = [_call(c, f"{where}.tool_calls.{i}") for i, c in enumerate(calls)]
    return answer


def _call(call: Any, where: str) -> Object:
    call = as_object(call, where)
    if call.get("type") not in (None, "", "function"):
        raise BadRequest(f"{where}.type: calls of functions are the only ones that are supported")
    function = as_object(call.get("function"), f"{where}.function")
    return {
        "id": as_string(call.get("id"), f"{where}.id"),
        "type": "function",
        "function": {
            "name": as_string(function.get("name"), f"{where}.function.name"),
            "arguments": openai_in.arguments_text(
                function.get("arguments"), f"{where}.function.arguments"
            ),
        },
    }


def _tools(tools: Any) -> list[Object]:
    cleaned: list[Object] = []
    for i, each in enumerate(as_list(tools or [], "tools", fields.MAX_TOOLS)):
        tool = as_object(each, f"tools.{i}")
        if tool.get("type") not in (None, "function"):
            raise BadRequest(f"tools.{i}: functions are the only tools that are supported")
        note_unknown(f"{PATH} tool", tool, ("type", "function"))
        where = f"tools.{i}.function"
        function = openai_in.function_fields(PATH, as_object(tool.get("function"), where), where)
        cleaned.append({"type": "function", "function": function})
    return cleaned


@dataclass(frozen=True)
class _Head:
    """What all chunks of an answer have in common."""

    id: str
    created_s: int
    model_id: str

    def chunk(self, object: str, choices: list[Object]) -> Object:
        return {
            "id": self.id,
            "object": object,
            "created": self.created_s,
            "model": self.model_id,
            "choices": choices,
        }


class ChatChunks:
    """What the protocol says at each event of one answer; has_usage: the stream ends with it."""

    def __init__(self, asked: Request, model_id: str, *, has_usage: bool) -> None:
        self._head = _Head(new_id("chatcmpl-"), now_s(), model_id)
        self._has_usage = has_usage
        self._index = -1  # of the call that is open
        self._has_logprobs = asked.logprobs is not None
        self._content: list[Object] = []  # their log probabilities
        self._reasoning: list[Object] = []
        self.body: Object = {}

    def start(self) -> Iterator[Object]:
        """The role comes at once."""
        yield self._chunk({"role": "assistant", "content": ""})

    def events(self, event: Event) -> Iterator[Object]:
        """What an event of the answer becomes."""
        match event:
            case Progress() | ToolCallEnd():
                pass
            case ReasoningDelta(text):
                told = self._logprobs([], logprobs.entries(event.logprobs))
                yield self._chunk({"reasoning_content": text}, logprobs=told)
            case TextDelta(text):
                told = self._logprobs(logprobs.entries(event.logprobs), [])
                yield self._chunk({"content": text}, logprobs=told)
            case ToolCallStart(id, name):
                self._index += 1
                call = _call_object(ToolCall(id, name, ""))
                yield self._chunk({"tool_calls": [{"index": self._index} | call]})
            case ToolCallDelta(fragment):
                part = {"index": self._index, "function": {"arguments": fragment}}
                yield self._chunk({"tool_calls": [part]})
            case End():
                yield self._chunk({}, FINISH_REASONS[event.finish_reason])
                if self._has_usage:
                    yield self._head.chunk("chat.completion.chunk", []) | {"usage": usage(event)}

    def add(self, event: Event) -> None:
        """Take in an event, for the whole answer."""
        match event:
            case TextDelta():
                self._content += logprobs.entries(event.logprobs)
            case ReasoningDelta():
                self._reasoning += logprobs.entries(event.logprobs)
            case End():
                self.body = self._completion(event)
            case _:
                pass

    def _completion(self, end: End) -> Object:
        message: Object = {"role": "assistant", "content": end.text}
        if end.reasoning:
            message["reasoning_content"] = end.reasoning
        if end.tool_calls:
            message["tool_calls"] = [_call_object(call) for call in end.tool_calls]
            message["content"] = end.text or None
        choice: Object = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(self._content, self._reasoning),
            "finish_reason": FINISH_REASONS[end.finish_reason],
        }
        return self._head.chunk("chat.completion", [choice]) | {"usage": usage(end)}

    def _logprobs(self, content: list[Object], reasoning: list[Object]) -> Object | None:
        """OpenAI's two fields and the vendor's own, where they were asked for."""
        if not self._has_logprobs:
            return None
        return {"content": content, "refusal": None, "reasoning_content": reasoning}

    def _chunk(
        self, delta: Object, finish_reason: str | None = None, *, logprobs: Object | None = None
    ) -> Object:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._head.chunk("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self._has_usage else chunk


def _call_object(call: ToolCall) -> Object:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
