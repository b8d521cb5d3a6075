"""The endpoints of Anthropic's Messages protocol.

Owns the course of a request from its body to a streamed or a whole answer. What a body means is
messages_in's part, what an answer looks like messages_out's.
"""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_engine.server import messages_in
from mlx_engine.server.body import json_object
from mlx_engine.server.errors import request_id
from mlx_engine.server.messages_out import PATH, MessageEvents, MessageStream, WholeMessage
from mlx_engine.server.service import Service
from mlx_engine.server.sse import EventStream, whole


def router(service: Service) -> APIRouter:
    """`/v1/messages` and its count_tokens."""
    routes = APIRouter()

    @routes.post(PATH)
    async def _create(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        body = await json_object(request, service.max_body_bytes)
        encoded = await service.encode(lambda: messages_in.read(body))
        job = service.submit(encoded)
        events = MessageEvents(encoded, service.model_id)
        if _is_streamed(body):
            stream = MessageStream(events, request_id(request))
            return EventStream(job, stream, service.keep_alive_s)
        answer = WholeMessage(events)
        await whole(job, request, answer.add)
        return JSONResponse(answer.message)

    @routes.post(f"{PATH}/count_tokens")
    async def _count_tokens(  # pyright: ignore[reportUnusedFunction]
        request: Request,
    ) -> Response:
        body = await json_object(request, service.max_body_bytes)
        encoded = await service.encode(lambda: messages_in.read(body, for_count=True))
        return JSONResponse({"input_tokens": encoded.prompt_tokens})

    return routes


def _is_streamed(body: dict[str, Any]) -> bool:
    return body.get("stream") is True
