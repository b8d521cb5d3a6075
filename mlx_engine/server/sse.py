"""An answer on its way to a client: events as they come, signs of life, and a client that leaves.

Owns the wait for an answer's events beside the client's connection, streamed or whole. The bytes of
an event and of a whole answer are the protocols' part.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlx_engine.errors import EngineError
from mlx_engine.job import Failed, Job, JobEvent
from mlx_engine.respond import End, Event
from mlx_engine.server.errors import ClientGone, error_body, error_response
from mlx_engine.server.ticket import Ticket

# Clients give up a stream after minutes of silence; proxies between often sooner.
KEEP_ALIVE_S = 5.0

# Node's fetch gives up after five minutes without a header. A status that was sent cannot be taken
# back, so the header of a whole answer waits until most errors would have shown.
WHOLE_SILENCE_S = 30.0


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


class Answer(Protocol):
    """What a protocol makes of one answer as a whole."""

    def add(self, event: Event) -> None:
        """Take in an event, the last one an End."""
        ...

    @property
    def body(self) -> Mapping[str, Any]:
        """The whole answer."""
        ...


class EventStream(Response):
    """Streams the events of an answer; a client that leaves cancels it."""

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, writer: Writer, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self.background = None
        self.status_code = 200
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._ticket = ticket
        self._writer = writer
        self._silence = _Silence(keep_alive_s, keep_alive_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(pieces: Iterable[bytes]) -> None:
            data = b"".join(pieces)
            # Events that say nothing to the client are no sign of life.
            if not data and self._silence.is_over:
                data = self._writer.keep_alive()
            if data:
                self._silence.end()
                await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            headers = [*self.raw_headers]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await write(self._writer.start())
            async with aclosing(_arrivals(self._ticket, receive, self._silence)) as arrivals:
                async for events in arrivals:
                    await write(piece for event in events for piece in self._bytes(event))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            pass
        except Exception as error:  # of our own
            await write(self._writer.failure(error))
            raise
        finally:
            self._ticket.cancel()

    def _bytes(self, event: JobEvent) -> Iterable[bytes]:
        if isinstance(event, Failed):
            return self._writer.failure(event.error)
        return self._writer.events(event)


class WholeAnswer(Response):
    """Waits for the last event and answers as a whole; a client that leaves cancels the answer.

    While that takes long, white space goes ahead of the JSON. An error that comes after it is
    written in its place, and the connection broken off: to no client this looks like an answer.
    """

    def __init__(
        self,
        ticket: Ticket,
        answer: Answer,
        *,
        path: str,
        request_id: str,
        silence_s: float = WHOLE_SILENCE_S,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.background = None
        self.status_code = 200
        self._ticket = ticket
        self._answer = answer
        self._path = path
        self._request_id = request_id
        self._silence = _Silence(silence_s, keep_alive_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        error: Exception | None = None
        try:
            async with aclosing(_arrivals(self._ticket, receive, self._silence)) as arrivals:
                async for events in arrivals:
                    for event in events:
                        if isinstance(event, Failed):
                            error = event.error
                        else:
                            self._answer.add(event)
                    is_last = bool(events) and isinstance(events[-1], End | Failed)
                    if self._silence.is_over and not is_last:
                        if not has_begun:
                            has_begun = True
                            # Whoever passes it on adds headers to it, so each answer has its own.
                            headers = [(b"content-type", b"application/json")]
                            await send(
                                {"type": "http.response.start", "status": 200, "headers": headers}
                            )
                        self._silence.end()
                        await send({"type": "http.response.body", "body": b" ", "more_body": True})
        except ClientGone:
            return
        finally:
            self._ticket.cancel()
        if has_begun:
            told = error_body(self._path, self._request_id, error) if error else self._answer.body
            # Without its end the server closes the connection.
            is_cut = error is not None
            await send({"type": "http.response.body", "body": _json(told), "more_body": is_cut})
        elif error is not None:
            await error_response(self._path, self._request_id, error)(scope, receive, send)
        else:
            await JSONResponse(self._answer.body)(scope, receive, send)


def server_sent(name: str | None, data: Mapping[str, Any]) -> bytes:
    """One server-sent event with JSON in it."""
    head = "" if name is None else f"event: {name}\n"
    return head.encode() + b"data: " + _json(data) + b"\n\n"


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


class _Silence:
    """How long nothing may be sent: at first, and then each time."""

    def __init__(self, first_s: float, then_s: float) -> None:
        self._until_s = time.monotonic() + first_s
        self._then_s = then_s

    @property
    def left_s(self) -> float:
        return max(self._until_s - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    def end(self) -> None:
        """Something is sent."""
        self._until_s = time.monotonic() + self._then_s


async def _arrivals(
    ticket: Ticket, receive: Receive, silence: _Silence
) -> AsyncGenerator[list[JobEvent]]:
    """Yield the events that have come, up to the last; nothing when the silence is over.

    Raises ClientGone, and what went wrong with the count of the prompt but for what requests do.
    """

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    left = asyncio.create_task(leave())
    try:
        placing = ticket.placing
        assert placing is not None
        while not placing.done():
            await _first(left, placing, silence.left_s)
            if silence.is_over:
                yield []
        refusal = None
        try:
            placing.result()
        except EngineError as error:
            refusal = error
        if refusal is not None:
            yield [Failed(refusal)]
            return
        assert ticket.job is not None
        async with aclosing(_events(ticket.job, left, silence)) as arrivals:
            async for events in arrivals:
                yield events
    finally:
        left.cancel()


async def _events(
    job: Job, left: "asyncio.Task[None]", silence: _Silence
) -> AsyncGenerator[list[JobEvent]]:
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    arrived.set()  # some may have come before

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(arrived.set)

    job.wake = wake
    try:
        while True:
            arrival = asyncio.create_task(arrived.wait())
            try:
                await _first(left, arrival, silence.left_s)
            finally:
                arrival.cancel()
            arrived.clear()
            events = job.take()
            if not events and not silence.is_over:
                continue
            yield events
            if events and isinstance(events[-1], End | Failed):
                return
    finally:
        job.wake = lambda: None


async def _first(left: "asyncio.Task[None]", other: "asyncio.Task[Any]", timeout_s: float) -> None:
    """Wait for the other task, at most so long. Raises ClientGone when the client leaves first."""
    await asyncio.wait((left, other), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if left.done():
        raise ClientGone("the client left before its answer was complete")
