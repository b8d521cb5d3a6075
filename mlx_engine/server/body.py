"""Bodies of requests: read within a limit, and what of them nobody knows.

Owns the limit, the reading of JSON, and the notes in the log, each written once.
"""

import json
import logging
import math
from collections.abc import Collection, Mapping
from threading import Lock
from typing import Any, cast

from starlette.requests import ClientDisconnect, Request

from mlx_engine.errors import BadRequest
from mlx_engine.server.errors import ApiError, ClientGone

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20

IMAGE_NOTE = "[image not shown: this server reads text only]"

# Names come from clients: neither many nor long ones are kept.
_MAX_NOTES = 1000
_MAX_NAME_CHARACTERS = 60


async def json_object(request: Request, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The body as a JSON object.

    Raises BadRequest for anything else, ApiError (413) above the limit, ClientGone.
    """
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes: send less")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > max_bytes:
                raise too_large
    except ClientDisconnect:
        raise ClientGone("the client left while it sent the request") from None
    try:
        # Python reads NaN, Infinity and 1e999 too, which no answer could repeat.
        body = json.loads(data, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON: send a JSON object") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object: send one")
    return cast(dict[str, Any], body)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number")
    return number


def note_unknown(protocol: str, body: Mapping[str, Any], known: Collection[str]) -> None:
    """Say in the log, once, which fields of a body have no effect."""
    for name in body:
        if name not in known:
            _NOTES.write(f"{protocol}: the field {name[:_MAX_NAME_CHARACTERS]!r} has no effect")


def note(message: str) -> None:
    """Say something in the log, once."""
    _NOTES.write(message)


class _Notes:
    """What was said already."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._said: set[str] = set()

    def write(self, message: str) -> None:
        with self._lock:
            if message in self._said or len(self._said) >= _MAX_NOTES:
                return
            self._said.add(message)
        log.info("%s", message)


_NOTES = _Notes()
