"""The endpoint of OpenAI's Completions protocol: a text is continued as it is.

Owns what a body means, the chunks of a streamed answer and the whole one.
"""

from collections.abc import Iterator
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mlx_engine.answer import TextDelta
from mlx_engine.errors import BadRequest
from mlx_engine.request import Request
from mlx_engine.respond import End, Event
from mlx_engine.server import openai_in
from mlx_engine.server.body import json_object, note_unknown
from mlx_engine.server.errors import request_id
from mlx_engine.server.openai_in import Object
from mlx_engine.server.openai_out import FINISH_REASONS, ChunkStream, new_id, now_s, usage
from mlx_engine.server.service import Encoded, Service
from mlx_engine.server.sse import EventStream, whole

PATH = "/v1/completions"

_KNOWN_FIELDS = openai_in.SAMPLING_FIELDS | frozenset(
    "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt "
    "stop stream stream_options suffix user".split()
)

_REFUSED = {
    "suffix": "the text is continued at its end only",
    "response_format": "leave it out",
}

# The protocol's own.
_DEFAULT_MAX_TOKENS = 16


def router(service: Service) -> APIRouter:
    """`/v1/completions`."""
    routes = APIRouter()

    @routes.post(PATH)
    async def _create(http: HttpRequest) -> Response:  # pyright: ignore[reportUnusedFunction]
        body = await json_object(http, service.max_body_bytes)
        is_streamed = openai_in.is_true(body, "stream")
        has_usage = openai_in.includes_usage(body)
        is_echoed = openai_in.is_true(body, "echo")
        encoded = await service.encode(lambda: read(body))
        job = service.submit(_within(encoded, service.context_tokens))
        echo = body["prompt"] if is_echoed else ""
        chunks = TextChunks(service.model_id, _text(echo), has_usage=has_usage)
        if is_streamed:
            stream = ChunkStream(chunks, PATH, request_id(http))
            return EventStream(job, stream, service.keep_alive_s)
        return JSONResponse(chunks.completion(await whole(job, http, lambda event: None)))

    return routes


def read(body: Object) -> Request:
    """The request that a body asks for. Raises BadRequest."""
    note_unknown(PATH, body, _KNOWN_FIELDS)
    openai_in.refuse(body, _REFUSED)
    # Here it is a number, and 0 asks for those of the tokens that were drawn.
    if body.get("logprobs") is not None and body["logprobs"] is not False:
        raise BadRequest("logprobs: it is not supported: leave it out")
    openai_in.refuse_many(body)
    openai_in.note_penalties(PATH, body)
    max_tokens = openai_in.integer(body, "max_tokens")
    return Request(
        _text(body.get("prompt")),
        raw=True,
        max_tokens=_DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        sampling=openai_in.sampling(body),
        stop=openai_in.stop_strings(body),
    )


def _text(prompt: object) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:  # pyright: ignore[reportUnknownArgumentType]
        prompt = prompt[0]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(prompt, str):
        raise BadRequest("prompt: it is one text: send each in a request of its own")
    return prompt


def _within(encoded: Encoded, context_tokens: int) -> Encoded:
    """The same request, its answer no longer than the room that there is."""
    request = encoded.request
    room = max(context_tokens - encoded.prompt_tokens, 1)
    max_tokens = min(request.max_tokens or room, room)
    return replace(encoded, request=replace(request, max_tokens=max_tokens))


class TextChunks:
    """What the protocol says at each event of one answer, which begins with `echo`."""

    def __init__(self, model_id: str, echo: str, *, has_usage: bool) -> None:
        self._head: Object = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": now_s(),
            "model": model_id,
        }
        self._echo = echo
        self._has_usage = has_usage

    def start(self) -> Iterator[Object]:
        """The text that is continued, if it was asked for."""
        if self._echo:
            yield self._chunk(self._echo)

    def events(self, event: Event) -> Iterator[Object]:
        """What an event of the answer becomes."""
        match event:
            case TextDelta(text):
                yield self._chunk(text)
            case End():
                yield self._chunk("", FINISH_REASONS[event.finish_reason])
                if self._has_usage:
                    yield self._head | {"choices": [], "usage": usage(event)}
            case _:
                pass

    def completion(self, end: End) -> Object:
        """The whole answer."""
        choice = _choice(self._echo + end.text, FINISH_REASONS[end.finish_reason])
        return self._head | {"choices": [choice], "usage": usage(end)}

    def _chunk(self, text: str, finish_reason: str | None = None) -> Object:
        chunk = self._head | {"choices": [_choice(text, finish_reason)]}
        return chunk | {"usage": None} if self._has_usage else chunk


def _choice(text: str, finish_reason: str | None) -> Object:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
