"""Bodies of requests: read within a limit, and what of them nobody knows.

Owns the limits, the reading of JSON, and the notes in the log, each written once.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from itertools import chain
from threading import Lock
from typing import Any, cast

from starlette.requests import ClientDisconnect, Request

from mlx_engine.errors import BadRequest
from mlx_engine.job import Overloaded
from mlx_engine.server.errors import ApiError, ClientGone
from mlx_engine.server.fields import Object, Types, check_types, quoted

log = logging.getLogger(__name__)

# As much as Anthropic's servers take, so clients know what to leave out of a larger one.
MAX_BODY_BYTES = 32 * 2**20

# Of all bodies that are being read, but for the beginning of so many, which stalled ones cannot
# take from them.
MAX_BODIES_BYTES = 8 * MAX_BODY_BYTES
SMALL_BODY_BYTES = 256 * 2**10
FREE_BODIES = 64

# A client that sends nothing for so long, in the middle of a body, has left without a word.
BODY_SILENCE_S = 30.0
# The largest one within this comes at half a megabit a second.
BODY_S = 600.0

IMAGE_NOTE = "[image not shown: this server reads text only]"

# Whoever goes through the values calls itself for each level; other readers of JSON stop here too.
_MAX_DEPTH = 128

# What is noted comes from clients: not too much of it is kept.
_MAX_NOTES = 1000


class Intake:
    """How many bytes the bodies hold that are being read, at most so many; for one thread.

    The first SMALL_BODY_BYTES of FREE_BODIES at a time count for nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._n_free = 0

    @contextmanager
    def body(self) -> Generator[Callable[[int], None]]:
        """One more body, which takes bytes by calling what this gives: it raises Overloaded."""
        is_free = self._n_free < FREE_BODIES
        free_bytes = SMALL_BODY_BYTES if is_free else 0
        own_bytes = 0

        def counted(n_bytes: int) -> int:
            return max(n_bytes - free_bytes, 0)

        def take(n_bytes: int) -> None:
            nonlocal own_bytes
            others_bytes = self._n_bytes - counted(own_bytes)
            all_bytes = others_bytes + counted(own_bytes + n_bytes)
            if all_bytes > self._max_bytes:
                raise Overloaded(
                    f"requests of {self._n_bytes} bytes are being read already: try again later"
                )
            own_bytes += n_bytes
            self._n_bytes = all_bytes

        self._n_free += is_free
        try:
            yield take
        finally:
            self._n_free -= is_free
            self._n_bytes -= counted(own_bytes)


async def received(
    request: Request,
    max_bytes: int,
    take: Callable[[int], None],
    *,
    silence_s: float,
    whole_s: float,
) -> bytearray:
    """The body as it was sent; `take` is told of its bytes as they come.

    Raises ApiError above the limit (413), for one that is compressed (415) and for one of which
    nothing comes for `silence_s` or not all within `whole_s` (408), ClientGone, and what `take`
    does.
    """
    if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise ApiError(415, "the body is compressed: send it as it is")
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes: send less")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    data = bytearray()
    chunks = request.stream()
    whole = asyncio.timeout(whole_s)
    try:
        async with whole:
            while True:
                async with asyncio.timeout(silence_s):
                    chunk = await anext(chunks)
                if len(data) + len(chunk) > max_bytes:
                    raise too_large
                take(len(chunk))
                data += chunk
    except StopAsyncIteration:
        return data
    except TimeoutError:
        what = (
            f"the body did not come within {whole_s:g} s"
            if whole.expired()
            else f"nothing came of the body for {silence_s:g} s"
        )
        raise ApiError(408, f"{what}: send the request again") from None
    except ClientDisconnect:
        raise ClientGone("the client left while it sent the request") from None


def json_object(data: bytearray) -> dict[str, Any]:
    """A body as a JSON object. Raises BadRequest for anything else."""
    try:
        text = data.decode("utf-8-sig")
        # Python reads NaN, Infinity and 1e999 too, which no answer could repeat.
        body = json.loads(
            text, parse_float=_finite, parse_constant=_finite, object_hook=_let_others_run
        )
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON: send a JSON object") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object: send one")
    body = cast(dict[str, Any], body)
    _check_depth(body)
    if "\\ud" in text.lower():
        _check_surrogates(body)
    return body


def _let_others_run(body: dict[str, Any]) -> dict[str, Any]:
    """Return it: the reader is C, and keeps other threads waiting until it calls some Python."""
    return body


def _check_depth(body: dict[str, Any]) -> None:
    """Raise BadRequest for values that hold each other too deeply, level by level."""
    level: list[dict[str, Any] | list[Any]] = [body]
    for _ in range(_MAX_DEPTH):
        values = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for value in chain.from_iterable(values) if type(value) in (dict, list)]
    if level:
        raise BadRequest(f"the values of the body are nested more than {_MAX_DEPTH} deep")


def _check_surrogates(body: object) -> None:
    """Raise BadRequest for half of a surrogate pair, which only an escape can write."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest("a text is not Unicode: it holds half of a surrogate pair") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number")
    return number


def check_fields(protocol: str, body: Object, types: Types, where: str = "") -> None:
    """Note the unknown fields of a body, or of the part `where`, and check the types of the others.

    Raises BadRequest.
    """
    note_unknown(protocol, body, types)
    check_types(body, types, where)


def note_unknown(protocol: str, body: Mapping[str, Any], known: Collection[str]) -> None:
    """Say in the log, once, which fields of a body, or of a part of it, have no effect."""
    for name, value in body.items():
        if value is not None and name not in known:
            note(f"{protocol}: the field {quoted(name)} has no effect")


def note_form(path: str, tool: Mapping[str, Any]) -> None:
    """Say in the log, once, that a strict schema or a format holds no call to it."""
    for name in ("strict", "format"):
        if tool.get(name):
            note(f"{path}: {name} of a tool is not enforced, a call may differ")


def note_betas(request: Request) -> None:
    """Say in the log, once, which betas a client asks for: none of them changes anything here."""
    for value in request.headers.getlist("anthropic-beta"):
        for beta in filter(None, map(str.strip, value.split(","))):
            note(f"{request.url.path}: the beta {quoted(beta)} has no effect")


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
