"""What the answers of OpenAI's protocols have in common: the account and the framing.

Owns the usage of chat and text completions and the bytes of their streams. The chunks are the
endpoints' part.
"""

import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from mlx_engine.respond import End, Event
from mlx_engine.server.errors import error_body
from mlx_engine.server.fields import Object
from mlx_engine.server.sse import server_sent

# Nobody reads what a cancelled answer says of itself.
FINISH_REASONS = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "cancelled": "stop",
}


def new_id(kind: str) -> str:
    """An id that no other object has."""
    return f"{kind}{secrets.token_hex(12)}"


def now_s() -> int:
    """The time as the protocols write it."""
    return int(time.time())


def usage(end: End) -> Object:
    """The tokens of prompt and answer; the cached ones in OpenAI's form and the vendor's."""
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "total_tokens": end.prompt_tokens + end.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "prompt_cache_hit_tokens": end.cached_tokens,
        "prompt_cache_miss_tokens": end.prompt_tokens - end.cached_tokens,
    }


class Chunks(Protocol):
    """The chunks of one answer, as JSON."""

    def start(self) -> Iterable[Object]:
        """What comes before the answer has begun."""
        ...

    def events(self, event: Event) -> Iterable[Object]:
        """What an event becomes."""
        ...


class ChunkStream:
    """Chunks as bytes of a stream that ends with [DONE]."""

    def __init__(self, chunks: Chunks, path: str, request_id: str) -> None:
        self._chunks = chunks
        self._path = path
        self._request_id = request_id

    def start(self) -> Iterable[bytes]:
        # Also without a chunk something is sent: the client sees that it was heard.
        yield from map(_bytes, self._chunks.start())
        yield self.keep_alive()

    def events(self, event: Event) -> Iterator[bytes]:
        yield from map(_bytes, self._chunks.events(event))
        if isinstance(event, End):
            yield b"data: [DONE]\n\n"

    def keep_alive(self) -> bytes:
        return b": the answer is being computed\n\n"

    def failure(self, error: Exception) -> Iterable[bytes]:
        yield _bytes(dict(error_body(self._path, self._request_id, error)))


def _bytes(chunk: Object) -> bytes:
    return server_sent(None, chunk)
