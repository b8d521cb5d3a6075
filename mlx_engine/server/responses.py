"""The endpoint of OpenAI's Responses protocol: an answer as items, streamed and whole.

Owns the grammar of the stream: one item open at a time, each closed with all that it holds. The
whole response is put together by the same events. What a body means is responses_in's part.
"""

import json
from collections.abc import Iterable, Iterator, Sequence

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlx_engine.answer import ReasoningDelta, TextDelta
from mlx_engine.respond import End, Event, Progress
from mlx_engine.server import responses_in
from mlx_engine.server.body import json_object
from mlx_engine.server.errors import error_body, request_id
from mlx_engine.server.fields import Object, is_true
from mlx_engine.server.logprobs import entries
from mlx_engine.server.openai_out import new_id, now_s
from mlx_engine.server.responses_in import PATH, Asked
from mlx_engine.server.service import Service
from mlx_engine.server.sse import server_sent
from mlx_engine.tool_calls import ToolCallDelta, ToolCallEnd, ToolCallStart


def router(service: Service) -> APIRouter:
    """`/v1/responses`."""
    routes = APIRouter()

    @routes.post(PATH)
    async def _create(http: HttpRequest) -> Response:  # pyright: ignore[reportUnusedFunction]
        body = await json_object(http, service.max_body_bytes)
        service.check_room()
        is_streamed = is_true(body, "stream")
        asked = await service.read(lambda: responses_in.read(body))
        ticket = await service.take(asked.request)
        events = ResponseEvents(asked, service.model_id)
        if is_streamed:
            return service.stream(ticket, ResponseStream(events, request_id(http)))
        return service.whole(ticket, events, http)

    return routes


class ResponseEvents:
    """What the protocol says at each event of one answer; `body` is what it has come to."""

    def __init__(self, asked: Asked, model_id: str) -> None:
        self.body: Object = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": now_s(),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model_id,
            "output": [],
            "usage": None,
        } | asked.echo
        self._asked = asked
        self._n_sent = 0
        self._item: Object | None = None
        self._parts: list[str] = []  # of what the open item says
        self._logprobs: list[Object] = []

    def start(self) -> Iterator[Object]:
        """What is said before the answer has begun."""
        yield self._event("response.created", response=self._snapshot())
        yield self.in_progress()

    def in_progress(self) -> Object:
        """What says that the answer is still being made."""
        return self._event("response.in_progress", response=self._snapshot())

    def add(self, event: Event) -> None:
        """Take in an event of the answer, for the whole response."""
        for _ in self.events(event):
            pass

    def events(self, event: Event) -> Iterator[Object]:
        """What an event of the answer becomes."""
        match event:
            # What comes next closes a call: the end may say that it was cut.
            case Progress() | ToolCallEnd():
                pass
            case ReasoningDelta(text):
                yield from self._begin_text("reasoning", "reasoning_text")
                yield self._say("response.reasoning_text.delta", text, content_index=0)
            case TextDelta(text):
                yield from self._begin_text("message", "output_text")
                new = entries(event.logprobs)
                self._logprobs += new
                yield self._say("response.output_text.delta", text, content_index=0, logprobs=new)
            case ToolCallStart(id, name):
                yield from self._close()
                yield from self._begin_call(id, name)
            case ToolCallDelta(fragment):
                if self._is_custom():
                    self._parts.append(fragment)
                else:
                    yield self._say("response.function_call_arguments.delta", fragment)
            case End():
                yield from self._close(is_cut=event.finish_reason == "length")
                yield self._end(event)

    def failure(self, error: Exception, request_id: str) -> Object:
        """How the response ends for an error."""
        told = error_body(PATH, request_id, error)["error"]
        code = told["code"] or told["type"]
        self.body |= {
            "status": "failed",
            "error": {"code": code, "message": told["message"]},
        }
        return self._event("response.failed", response=self._snapshot())

    def _event(self, kind: str, **content: object) -> Object:
        self._n_sent += 1
        return {"type": kind, "sequence_number": self._n_sent - 1, **content}

    def _snapshot(self) -> Object:
        return self.body | {"output": [*self.body["output"]]}

    @property
    def _output_index(self) -> int:
        return len(self.body["output"])

    def _on_item(self, kind: str, **content: object) -> Object:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": self._output_index}
        return self._event(kind, **place, **content)

    def _say(self, kind: str, text: str, **content: object) -> Object:
        self._parts.append(text)
        return self._on_item(kind, delta=text, **content)

    def _begin(self, item: Object) -> Iterator[Object]:
        self._item, self._parts, self._logprobs = item, [], []
        yield self._event(
            "response.output_item.added", output_index=self._output_index, item=dict(item)
        )

    def _begin_text(self, kind: str, part: str) -> Iterator[Object]:
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._close()
        if kind == "message":
            item: Object = {"id": new_id("msg_"), "type": kind, "role": "assistant"}
        else:
            item = {"id": new_id("rs_"), "type": kind, "summary": []}
        yield from self._begin(item | {"content": [], "status": "in_progress"})
        yield self._on_item("response.content_part.added", content_index=0, part=_part(part, ""))

    def _begin_call(self, id: str, name: str) -> Iterator[Object]:
        call: Object = {"call_id": id, "name": name, "status": "in_progress"}
        if name in self._asked.custom:
            yield from self._begin(
                {"id": new_id("ctc_"), "type": "custom_tool_call", "input": ""} | call
            )
            return
        if name in self._asked.namespaces:
            call["namespace"], call["name"] = self._asked.namespaces[name]
        yield from self._begin(
            {"id": new_id("fc_"), "type": "function_call", "arguments": ""} | call
        )

    def _is_custom(self) -> bool:
        return self._item is not None and self._item["type"] == "custom_tool_call"

    def _close(self, *, is_cut: bool = False) -> Iterator[Object]:
        """Close the open item with all that it says."""
        item, said = self._item, "".join(self._parts)
        if item is None:
            return
        match item["type"]:
            case "reasoning":
                yield from self._close_text("reasoning_text", said)
                item["encrypted_content"] = self._asked.request.signature
            case "message":
                yield from self._close_text("output_text", said)
            case "function_call":
                item["arguments"] = said
                yield self._on_item(
                    "response.function_call_arguments.done", arguments=said, name=item["name"]
                )
            case _:
                item["input"] = said = _input(said)
                yield self._on_item("response.custom_tool_call_input.delta", delta=said)
                yield self._on_item("response.custom_tool_call_input.done", input=said)
        item["status"] = "incomplete" if is_cut else "completed"
        yield self._event("response.output_item.done", output_index=self._output_index, item=item)
        self.body["output"].append(item)
        self._item = None

    def _close_text(self, kind: str, said: str) -> Iterator[Object]:
        assert self._item is not None
        part = _part(kind, said, self._logprobs)
        self._item["content"] = [part]
        logprobs: Object = {"logprobs": self._logprobs} if kind == "output_text" else {}
        yield self._on_item(f"response.{kind}.done", content_index=0, text=said, **logprobs)
        yield self._on_item("response.content_part.done", content_index=0, part=part)

    def _end(self, end: End) -> Object:
        is_cut = end.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        self.body |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(end),
        }
        return self._event(f"response.{status}", response=self._snapshot())


def _part(kind: str, text: str, logprobs: Sequence[Object] = ()) -> Object:
    extra: Object = {"annotations": [], "logprobs": [*logprobs]} if kind == "output_text" else {}
    return {"type": kind, "text": text} | extra


def _input(arguments: str) -> str:
    """The one text of a call whose arguments hold nothing else, whatever the model named it."""
    values = json.loads(arguments)
    text = values.get("input", next(iter(values.values()), ""))
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _usage(end: End) -> Object:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


class ResponseStream:
    """The events as bytes of a stream."""

    def __init__(self, events: ResponseEvents, request_id: str) -> None:
        self._events = events
        self._request_id = request_id

    def start(self) -> Iterable[bytes]:
        return map(_bytes, self._events.start())

    def events(self, event: Event) -> Iterable[bytes]:
        return map(_bytes, self._events.events(event))

    def keep_alive(self) -> bytes:
        # Codex gives up after five minutes without an event, and comments are none to it.
        return _bytes(self._events.in_progress())

    def failure(self, error: Exception) -> Iterable[bytes]:
        yield _bytes(self._events.failure(error, self._request_id))


def _bytes(event: Object) -> bytes:
    return server_sent(event["type"], event)
