"""The application: which endpoints there are, and how their errors leave.

Owns the routes that belong to no protocol, and the order of gate, routes and error handlers.
"""

import asyncio

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from mlx_engine.errors import EngineError
from mlx_engine.server import chat, completions, messages, metrics, page, responses
from mlx_engine.server.errors import ApiError, error_response, request_id
from mlx_engine.server.fields import quoted
from mlx_engine.server.security import Access, Gate
from mlx_engine.server.service import Service

# The model's release, as clients sort by it.
_CREATED = "2026-09-10T00:00:00Z"
_CREATED_S = 1_788_998_400

_READ = ["GET", "HEAD"]


def create_app(service: Service, access: Access) -> ASGIApp:
    """The server over a worker that may still be loading its model."""
    app = FastAPI(
        title="ds41", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.include_router(_common(service))
    for part in (page, messages, chat, responses, completions):
        app.include_router(part.router(service))
    app.add_exception_handler(EngineError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)
    return Gate(app, access)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, request_id(request), error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    what = {404: f"there is nothing at {quoted(path)}", 405: "this path has another method"}
    told = ApiError(error.status_code, what.get(error.status_code, error.detail))
    return error_response(path, request_id(request), told, error.headers)


def _common(service: Service) -> APIRouter:
    routes = APIRouter()
    worker = service.worker

    @routes.api_route("/health", methods=_READ)
    async def _health() -> Response:  # pyright: ignore[reportUnusedFunction]
        body: dict[str, object] = {"status": worker.state}
        if worker.state == "loading":
            done, total = worker.load_bytes
            body |= {"loaded_bytes": done, "total_bytes": total}
        return JSONResponse(body, 200 if worker.state == "ready" else 503)

    @routes.api_route("/api/hello", methods=_READ)
    async def _hello() -> Response:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse({"status": "ok"})

    @routes.api_route("/metrics", methods=_READ)
    async def _metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        # The engine may be asked between two of its steps only, and the disk is asked too.
        text = await asyncio.to_thread(metrics.exposition, worker)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @routes.api_route("/v1/models", methods=_READ)
    async def _models() -> Response:  # pyright: ignore[reportUnusedFunction]
        id = service.model_id
        bounds = {"has_more": False, "first_id": id, "last_id": id}
        return JSONResponse({"object": "list", "data": [_model(service)], **bounds})

    @routes.api_route("/v1/models/{id:path}", methods=_READ)
    async def _one_model(id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        # Requests may name any model, so all of them exist.
        return JSONResponse(_model(service))

    return routes


def _model(service: Service) -> dict[str, object]:
    """The model, with the fields of both protocols."""
    return {
        "type": "model",
        "object": "model",
        "id": service.model_id,
        "display_name": service.model_name,
        "created_at": _CREATED,
        "created": _CREATED_S,
        "owned_by": "deepseek-ai",
        "max_input_tokens": service.context_tokens,
    }
