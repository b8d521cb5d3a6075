"""The gate before every endpoint: who may ask, and under which name.

Owns the API key, the checks against pages of other origins, the request's id, its line in the log,
and the last catch of what went wrong. Endpoints are behind it.
"""

import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_engine.errors import BadRequest
from mlx_engine.server.errors import ApiError, error_response
from mlx_engine.worker import describe

log = logging.getLogger(__name__)

# They say nothing about anybody, and probes carry no key, nor does a browser at first.
_OPEN_PATHS = {"/", "/health", "/api/hello"}

_MAX_PATH_CHARACTERS = 100

# A name or an address, and a port; whatever else a parser of addresses would make sense of is none.
_HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{0,5})?", re.IGNORECASE)

# Browsers leave them out.
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Access:
    """Who may use the server.

    api_key: asked of every request, None for nobody. host_names: by which a client may call the
    server, beside localhost and numeric addresses; None for any. origins: of pages that may use it.
    """

    api_key: str | None = None
    host_names: frozenset[str] | None = frozenset()
    origins: frozenset[str] = frozenset()


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a server bound to that numeric address."""
    return ipaddress.ip_address(address).is_loopback


class Gate:
    """An ASGI application that lets through what `access` allows, each request with an id."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = id
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        started_s = time.perf_counter()
        status = 0

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = MutableHeaders(scope=message)
                added["request-id"] = added["x-request-id"] = id
                if origin in self._access.origins:
                    added["access-control-allow-origin"] = origin or ""
                    added["access-control-expose-headers"] = "request-id, retry-after"
                    added.append("vary", "origin")
            await send(message)

        try:
            response = self._refusal(scope, headers)
            await (response or self._app)(scope, receive, reply)
        except Exception as error:
            log.error("%s failed: %s", id, describe(error))
            if not status:
                await error_response(scope["path"], id, error)(scope, receive, reply)
        finally:
            # Whoever watches asks again and again.
            log.log(
                logging.DEBUG if scope["method"] in ("GET", "HEAD") else logging.INFO,
                "%s %s %r %d %.2f s",
                id,
                scope["method"],
                scope["path"][:_MAX_PATH_CHARACTERS],
                status,
                time.perf_counter() - started_s,
            )

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a request that may not pass."""
        path, id = scope["path"], scope["state"]["request_id"]
        if "content-length" in headers and "transfer-encoding" in headers:
            # Whoever passes requests on might have gone by the other (RFC 9112, 6.3).
            told = "Content-Length and Transfer-Encoding exclude each other: send one of them"
            return error_response(path, id, ApiError(400, told), {"connection": "close"})
        error = self._forbidden(headers)
        if error is None and scope["method"] == "OPTIONS" and headers.get("origin"):
            return _preflight(headers)
        if error is None and path not in _OPEN_PATHS and not self._has_key(headers):
            error = ApiError(
                401, "the API key is missing or wrong: send it as x-api-key, or as a bearer token"
            )
        return error and error_response(path, id, error)

    def _forbidden(self, headers: Headers) -> ApiError | None:
        # A page of another site can reach this address: by a name of its own that it lets point
        # here, or with a request that needs no leave of ours. Browsers tell both.
        host = headers.get("host", "")
        if not self._is_own_name(host):
            return ApiError(403, "the Host header is not a name of this server: use its address")
        origin = headers.get("origin")
        if origin is None or origin in self._access.origins or _netloc(origin) == host.lower():
            return None
        return ApiError(403, "pages of this origin may not use the server: see --allow-origin")

    def _is_own_name(self, host: str) -> bool:
        names = self._access.host_names
        if names is None:
            return True
        name = _hostname(host)
        if name in map(str.lower, names) or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _has_key(self, headers: Headers) -> bool:
        key = self._access.api_key
        if key is None:
            return True
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if kind.lower() == "bearer" else ""]
        # Both are compared, whatever the first says.
        return any([hmac.compare_digest(each.encode(), key.encode()) for each in given])


def _preflight(headers: Headers) -> Response:
    asked = headers.get("access-control-request-headers", "")
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": asked,
            "access-control-max-age": "600",
        },
    )


def _hostname(host: str) -> str:
    match = _HOST.fullmatch(host)
    # The dot at the end says that a name is whole.
    return match["name"].strip("[]").lower().removesuffix(".") if match else ""


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def origins(named: Iterable[str]) -> frozenset[str]:
    """Origins as browsers write them. Raises BadRequest for what is none."""
    return frozenset(map(_origin, named))


def _origin(name: str) -> str:
    try:
        url = urlsplit(name)
        port = url.port
    except ValueError:
        url, port = urlsplit(""), None
    if (
        not (url.scheme and url.hostname)
        or url.path not in ("", "/")
        or any(mark in name for mark in "*@?# ")
    ):
        raise BadRequest(
            f"the origin {name!r} is none: give scheme, name and port, as https://app.example"
        )
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    is_default = port in (None, _DEFAULT_PORTS.get(url.scheme))
    return f"{url.scheme}://{host}" if is_default else f"{url.scheme}://{host}:{port}"
