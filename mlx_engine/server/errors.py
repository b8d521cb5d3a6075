"""Errors as each protocol writes them.

Owns the status of every error and the two forms of its body: Anthropic's under /v1/messages,
OpenAI's everywhere else. What an error says comes from where it was raised.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from mlx_engine.errors import BadRequest, Cancelled, ContextTooLong, EngineError
from mlx_engine.job import Overloaded, Stopped

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    529: "overloaded_error",
}

# While the model loads, or the server ends.
_UNAVAILABLE_RETRY_S = 5


class ApiError(EngineError):
    """An error with a status of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PromptTooLong(ContextTooLong):
    """The prompt leaves no room for an answer, in the words that make clients compact it."""

    def __init__(self, prompt_tokens: int, maximum: int) -> None:
        super().__init__(f"prompt is too long: {prompt_tokens} tokens > {maximum} maximum")


class ClientGone(Cancelled):
    """The client has left; nobody reads what is answered."""


def request_id(request: Request) -> str:
    """The id that this request's answer carries."""
    return request.scope["state"]["request_id"]


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's protocol."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_response(
    path: str, id: str, error: Exception, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The answer to a request that failed before anything was sent."""
    status = status_of(path, error)
    headers = dict(headers or {})
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    elif status == 503:
        headers["retry-after"] = str(_UNAVAILABLE_RETRY_S)
    elif status == 408:
        # What may still come of the body is no new request.
        headers["connection"] = "close"
    return JSONResponse(error_body(path, id, error), status, headers)


def error_body(path: str, id: str, error: Exception) -> Mapping[str, Any]:
    """The error as JSON, for an answer or an event of a stream."""
    status = status_of(path, error)
    kind = _KINDS.get(status, "overloaded_error" if status == 503 else "api_error")
    message = _message(error)
    if is_anthropic(path):
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": id}
    kind = "server_error" if status >= 500 else kind
    return {"error": {"message": message, "type": kind, "param": None, "code": _code(error)}}


def _code(error: Exception) -> str | None:
    """What OpenAI's clients know an error by: to shorten the prompt, or to come back later."""
    match error:
        case ContextTooLong():
            return "context_length_exceeded"
        case Overloaded():
            return "rate_limit_exceeded"
        case Stopped():
            return "server_is_overloaded"
        case _:
            return None


def status_of(path: str, error: Exception) -> int:
    """The HTTP status of an error."""
    match error:
        case ApiError():
            return error.status
        case BadRequest():
            return 400
        case Overloaded():
            return 529 if is_anthropic(path) else 429
        case Stopped():
            return 503
        case ClientGone():
            return 499
        case _:
            return 500


def _message(error: Exception) -> str:
    # What another error says is for the log, and may hold anything.
    return str(error) if isinstance(error, EngineError) else "the engine failed: see its log"
