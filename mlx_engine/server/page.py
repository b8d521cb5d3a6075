"""The page at /, which shows in a browser what the server is at, and the JSON that it asks for.

The page is one file without a prompt, a number or an address of elsewhere in it, so it needs no
key; what it asks for does. Only its own style and script run there, told by their digests.
"""

import asyncio
import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse, JSONResponse, Response

from mlx_engine.server.activity import Activity
from mlx_engine.server.service import Service


def router(service: Service) -> APIRouter:
    """`/` and `/status`."""
    routes = APIRouter()
    activity = Activity(service)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def _page() -> Response:  # pyright: ignore[reportUnusedFunction]
        headers = {
            "content-security-policy": content_security_policy(),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return HTMLResponse(page(), headers=headers)

    @routes.get("/status")
    async def _status() -> Response:  # pyright: ignore[reportUnusedFunction]
        # The disk is asked how much of it is free.
        report = await asyncio.to_thread(activity.report)
        return JSONResponse(report, headers={"cache-control": "no-store"})

    return routes


@cache
def page() -> str:
    """The page's HTML."""
    return files("mlx_engine.server").joinpath("page.html").read_text(encoding="utf-8")


@cache
def content_security_policy() -> str:
    """What a browser lets the page do: its own style and script, and requests to this server."""
    rules = {
        "default-src": "'none'",
        "style-src": _digest("style"),
        "script-src": _digest("script"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _digest(element: str) -> str:
    """How a policy names the one inline element of this kind (W3C CSP level 2, 4.2.5)."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", page(), re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
