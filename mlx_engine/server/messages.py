"""The endpoints of Anthropic's Messages protocol.

Owns the course of a request from its body to a streamed or a whole answer. What a body means is
messages_in's part, what an answer looks like messages_out's.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_engine.server import messages_in
from mlx_engine.server.body import json_object, note_betas
from mlx_engine.server.errors import request_id
from mlx_engine.server.fields import is_true
from mlx_engine.server.messages_out import PATH, MessageEvents, MessageStream, WholeMessage
from mlx_engine.server.service import Service


def router(service: Service) -> APIRouter:
    """`/v1/messages` and its count_tokens."""
    routes = APIRouter()

    @routes.post(PATH)
    async def _create(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        note_betas(request)
        body = await json_object(request, service.max_body_bytes)
        service.check_room()
        is_streamed = is_true(body, "stream")
        asked = await service.read(lambda: messages_in.read(body))
        ticket = await service.take(asked)
        events = MessageEvents(ticket, service.model_id)
        if is_streamed:
            return service.stream(ticket, MessageStream(events, request_id(request)))
        return service.whole(ticket, WholeMessage(events), request)

    @routes.post(f"{PATH}/count_tokens")
    async def _count_tokens(  # pyright: ignore[reportUnusedFunction]
        request: Request,
    ) -> Response:
        body = await json_object(request, service.max_body_bytes)
        asked = await service.read(lambda: messages_in.read(body, for_count=True))
        encoded = await service.encode(asked)
        return JSONResponse({"input_tokens": encoded.prompt_tokens})

    return routes
