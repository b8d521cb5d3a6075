"""The endpoint of OpenAI's Completions protocol: a text is continued as it is.

Owns what a body means, the chunks of a streamed answer and the whole one.
"""

from collections.abc import Iterator

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlx_engine.answer import TextDelta
from mlx_engine.errors import BadRequest
from mlx_engine.request import Request
from mlx_engine.respond import End, Event
from mlx_engine.server import fields, logprobs, openai_in
from mlx_engine.server.body import check_fields
from mlx_engine.server.errors import request_id
from mlx_engine.server.fields import Object, is_true
from mlx_engine.server.logprobs import TextLogprobs
from mlx_engine.server.openai_out import FINISH_REASONS, ChunkStream, new_id, now_s, usage
from mlx_engine.server.service import Service

PATH = "/v1/completions"

KNOWN_FIELDS: fields.Types = fields.SAMPLING_FIELDS | {
    "best_of": int,
    "echo": bool,
    "frequency_penalty": float,
    "logit_bias": dict,
    "logprobs": (int, bool),
    "max_tokens": int,
    "model": str,
    "n": int,
    "presence_penalty": float,
    "prompt": (str, list),
    "stop": (str, list),
    "stream": bool,
    "stream_options": dict,
    "suffix": str,
    "user": str,
}

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
        service.check_room()
        body = await service.body(http)
        is_streamed = is_true(body, "stream")
        has_usage = openai_in.includes_usage(body)
        is_echoed = is_true(body, "echo")
        asked = await service.read(lambda: read(body))
        ticket = await service.take(asked)
        echo = body["prompt"] if is_echoed else ""
        chunks = TextChunks(asked, service.model_id, _text(echo), has_usage=has_usage)
        if is_streamed:
            return service.stream(ticket, ChunkStream(chunks, PATH, request_id(http)))
        return service.whole(ticket, chunks, http)

    return routes


def read(body: Object) -> Request:
    """The request that a body asks for. Raises BadRequest."""
    check_fields(PATH, body, KNOWN_FIELDS)
    openai_in.refuse(body, _REFUSED)
    openai_in.refuse_many(body)
    openai_in.note_penalties(PATH, body)
    max_tokens = fields.integer(body, "max_tokens")
    return Request(
        _text(body.get("prompt")),
        raw=True,
        max_tokens=_DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=logprobs.of_text(body),
        sampling=fields.sampling(body),
        stop=fields.stop_strings(body.get("stop"), "stop"),
    )


def _text(prompt: object) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:  # pyright: ignore[reportUnknownArgumentType]
        prompt = prompt[0]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(prompt, str):
        raise BadRequest("prompt: it is one text: send each in a request of its own")
    return prompt


class TextChunks:
    """What the protocol says at each event of one answer, which begins with `echo`."""

    def __init__(self, asked: Request, model_id: str, echo: str, *, has_usage: bool) -> None:
        self._head: Object = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": now_s(),
            "model": model_id,
        }
        self._echo = echo
        self._has_usage = has_usage
        self._logprobs = None if asked.logprobs is None else TextLogprobs(asked.logprobs)
        self.body: Object = {}

    def start(self) -> Iterator[Object]:
        """The text that is continued, if it was asked for."""
        if self._echo:
            yield self._chunk(self._echo)

    def events(self, event: Event) -> Iterator[Object]:
        """What an event of the answer becomes."""
        match event:
            case TextDelta(text):
                yield self._chunk(text, logprobs=self._logprobs_of(event))
            case End():
                yield self._chunk("", FINISH_REASONS[event.finish_reason])
                if self._has_usage:
                    yield self._head | {"choices": [], "usage": usage(event)}
            case _:
                pass

    def add(self, event: Event) -> None:
        """Take in an event, for the whole answer."""
        if isinstance(event, TextDelta):
            self._logprobs_of(event)
        elif isinstance(event, End):
            text, reason = self._echo + event.text, FINISH_REASONS[event.finish_reason]
            choice = _choice(text, reason, self._logprobs and self._logprobs.whole)
            self.body = self._head | {"choices": [choice], "usage": usage(event)}

    def _logprobs_of(self, event: TextDelta) -> Object | None:
        return self._logprobs and self._logprobs.add(event.text, event.logprobs)

    def _chunk(
        self, text: str, finish_reason: str | None = None, *, logprobs: Object | None = None
    ) -> Object:
        chunk = self._head | {"choices": [_choice(text, finish_reason, logprobs)]}
        return chunk | {"usage": None} if self._has_usage else chunk


def _choice(text: str, finish_reason: str | None, logprobs: Object | None) -> Object:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
