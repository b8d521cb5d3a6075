"""Connections of clients: how many there may be, and what becomes of one that says nothing.

Owns the limit of open files and the wait for a request's head; its body is waited for elsewhere.
"""

import asyncio
import resource
from contextlib import suppress

from uvicorn.protocols.http.h11_impl import H11Protocol

# Systems hand out 256 at first, and would give far more.
_FILES = 8192

# A client that sends nothing for so long, or half of a head, has left without a word.
HEAD_SILENCE_S = 30.0


def allow_many() -> None:
    """Let this process have as many connections as the system gives, up to some thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connection(H11Protocol):
    """A connection that is closed when no whole head of a request comes.

    Between two requests the library's own, longer limit holds.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle and not self.cycle.response_complete:
            self._stop_waiting()
        elif not self.cycle or self.conn.trailing_data[0]:
            self._wait()
        else:
            # The body of a request whose answer went ahead: it has stopped the library's timer,
            # which only the end of an answer starts.
            self._stop_waiting()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SILENCE_S, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
