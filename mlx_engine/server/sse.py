"""An answer on its way to a client: events as they come, keep-alives, and a client that leaves.

Owns the wait for a job's events beside the client's connection, streamed or not. The bytes of an
event are the protocols' part.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_engine.job import Failed, Job, JobEvent
from mlx_engine.respond import End, Event
from mlx_engine.server.errors import ClientGone

# Clients give up a stream after minutes of silence; proxies between often sooner.
KEEP_ALIVE_S = 5.0


class Writer(Protocol):
    """What a protocol makes of one answer's events."""

    def start(self) -> Iterable[bytes]:
        """What is sent at once, before the answer has begun."""
        ...

    def events(self, event: Event) -> Iterable[bytes]:
        """What an event becomes; after the End nothing follows."""
        ...

    def keep_alive(self) -> bytes:
        """What shows that the connection lives."""
        ...

    def failure(self, error: Exception) -> Iterable[bytes]:
        """How the stream ends for an error."""
        ...


class EventStream(Response):
    """Streams a job's events; a client that leaves cancels it."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, writer: Writer, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self.background = None
        self.status_code = 200
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._job = job
        self._writer = writer
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(pieces: Iterable[bytes]) -> None:
            data = b"".join(pieces)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            headers = [*self.raw_headers]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await write(self._writer.start())
            async with aclosing(_arrivals(self._job, receive, self._keep_alive_s)) as arrivals:
                async for events in arrivals:
                    if not events:
                        await write([self._writer.keep_alive()])
                    await write(piece for event in events for piece in self._bytes(event))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            pass
        finally:
            self._job.cancel()

    def _bytes(self, event: JobEvent) -> Iterable[bytes]:
        if isinstance(event, Failed):
            return self._writer.failure(event.error)
        return self._writer.events(event)


async def whole(job: Job, request: Request, on_event: Callable[[Event], None]) -> End:
    """Wait for all events of a job, told to `on_event` as they come, and return the last.

    Raises what ended the job, and ClientGone; in that case, and when the task is cancelled, the job
    is cancelled too.
    """
    try:
        async with aclosing(_arrivals(job, request.receive, None)) as arrivals:
            async for events in arrivals:
                for event in events:
                    if isinstance(event, Failed):
                        raise event.error
                    on_event(event)
                    if isinstance(event, End):
                        return event
    finally:
        job.cancel()
    raise AssertionError("an answer has an end")


def server_sent(name: str | None, data: Mapping[str, Any]) -> bytes:
    """One server-sent event with JSON in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


async def _arrivals(
    job: Job, receive: Receive, keep_alive_s: float | None
) -> AsyncGenerator[list[JobEvent]]:
    """Yield the events that have come, up to the last; nothing when a time passed without any.

    Raises ClientGone.
    """
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    arrived.set()  # some may have come before

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(arrived.set)

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    job.wake = wake
    left = asyncio.create_task(leave())
    try:
        while True:
            arrival = asyncio.create_task(arrived.wait())
            done, _ = await asyncio.wait(
                (left, arrival), timeout=keep_alive_s, return_when=asyncio.FIRST_COMPLETED
            )
            arrival.cancel()
            if left in done:
                raise ClientGone("the client left before its answer was complete")
            arrived.clear()
            events = job.take()
            if arrival in done and not events:
                continue
            yield events
            if events and isinstance(events[-1], End | Failed):
                return
    finally:
        job.wake = lambda: None
        left.cancel()
