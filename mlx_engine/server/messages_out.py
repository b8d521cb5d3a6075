"""An answer's events in Anthropic's Messages protocol, streamed and whole.

Owns the grammar of the stream: one block open at a time, and the account of tokens at the end. The
whole message is put together from the same events, so that both forms always agree.
"""

import json
from collections.abc import Iterable, Iterator

from mlx_engine.answer import ReasoningDelta, TextDelta
from mlx_engine.respond import End, Event, Progress
from mlx_engine.server.errors import error_body
from mlx_engine.server.fields import Object
from mlx_engine.server.sse import server_sent
from mlx_engine.server.ticket import Encoded, Ticket
from mlx_engine.tool_calls import ToolCallDelta, ToolCallEnd, ToolCallStart

PATH = "/v1/messages"

# Nobody reads what a cancelled answer says of itself.
_STOP_REASONS = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "cancelled": "end_turn",
}


class MessageEvents:
    """What the protocol says at each event of one answer.

    The reasoning is shown and signed whatever the client asked to see: it sends both back.
    """

    def __init__(self, ticket: Ticket, model_id: str) -> None:
        self._ticket = ticket
        self._model_id = model_id
        self._index = -1
        self._open: str | None = None  # the type of the block that is open

    def start(self) -> Object:
        """The first event; how much of the prompt was known shows at the end only.

        So does its length, where it is not counted yet.
        """
        encoded = self._ticket.encoded
        message: Object = {
            "id": f"msg_{self._ticket.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model_id,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": encoded.prompt_tokens if encoded else 0,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        }
        return {"type": "message_start", "message": message}

    def events(self, event: Event) -> Iterator[Object]:
        """What an event of the answer becomes."""
        match event:
            case Progress():
                return
            case ReasoningDelta(text):
                yield from self._begin("thinking", {"thinking": "", "signature": ""})
                yield self._delta("thinking_delta", thinking=text)
            case TextDelta(text):
                yield from self._begin("text", {"text": ""})
                yield self._delta("text_delta", text=text)
            case ToolCallStart(id, name):
                yield from self._close()
                yield from self._begin("tool_use", {"id": id, "name": name, "input": {}})
            case ToolCallDelta(fragment):
                yield self._delta("input_json_delta", partial_json=fragment)
            case ToolCallEnd():
                yield from self._close()
            case End():
                yield from self._close()
                yield self._message_delta(event)
                yield {"type": "message_stop"}

    def _begin(self, kind: str, content: Object) -> Iterator[Object]:
        if self._open == kind:
            return
        yield from self._close()
        self._index += 1
        self._open = kind
        block = {"type": kind, **content}
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Object]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=self._ticket.request.signature)
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, kind: str, **content: str) -> Object:
        delta = {"type": kind, **content}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _message_delta(self, end: End) -> Object:
        is_stop_string = end.finish_reason == "stop" and end.stop_string is not None
        return {
            "type": "message_delta",
            "delta": {
                "stop_reason": "stop_sequence"
                if is_stop_string
                else _STOP_REASONS[end.finish_reason],
                "stop_sequence": end.stop_string if is_stop_string else None,
            },
            "usage": _usage(end, self._ticket.encoded),
        }


def _usage(end: End, encoded: Encoded | None) -> Object:
    """The prompt's tokens in three: known before, computed and kept for later prompts, and others.

    All that is computed up to the answer's header is kept.
    """
    assert encoded is not None
    read = end.cached_tokens
    # The prompt may have been spelled otherwise when it was counted, but for its end.
    kept = encoded.head_tokens + end.prompt_tokens - encoded.prompt_tokens
    created = max(kept - read, 0)
    return {
        "input_tokens": end.prompt_tokens - read - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"thinking_tokens": end.reasoning_tokens},
    }


class MessageStream:
    """The events as bytes of a stream."""

    def __init__(self, events: MessageEvents, request_id: str) -> None:
        self._events = events
        self._request_id = request_id

    def start(self) -> Iterable[bytes]:
        return (_bytes(self._events.start()), self.keep_alive())

    def events(self, event: Event) -> Iterable[bytes]:
        return map(_bytes, self._events.events(event))

    def keep_alive(self) -> bytes:
        return _bytes({"type": "ping"})

    def failure(self, error: Exception) -> Iterable[bytes]:
        return (server_sent("error", error_body(PATH, self._request_id, error)),)


def _bytes(event: Object) -> bytes:
    return server_sent(event["type"], event)


class WholeMessage:
    """The message that the events of a stream make together."""

    def __init__(self, events: MessageEvents) -> None:
        self._events = events
        self.body: Object = events.start()["message"]
        self._json = ""

    def add(self, event: Event) -> None:
        """Take in an event of the answer."""
        for each in self._events.events(event):
            self._apply(each)

    def _apply(self, event: Object) -> None:
        content: list[Object] = self.body["content"]
        match event["type"]:
            case "content_block_start":
                content.append(event["content_block"])
                self._json = ""
            case "content_block_delta":
                self._extend(content[-1], event["delta"])
            case "content_block_stop":
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = json.loads(self._json or "{}")
            case "message_delta":
                self.body |= event["delta"]
                self.body["usage"] = event["usage"]
            case _:
                pass

    def _extend(self, block: Object, delta: Object) -> None:
        if delta["type"] == "input_json_delta":
            self._json += delta["partial_json"]
            return
        key = delta["type"].removesuffix("_delta")
        block[key] += delta[key]
