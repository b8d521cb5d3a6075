"""The server's process: its socket, its signals, and its end.

Owns how requests are drained when a signal comes: nothing new is taken, open streams end with an
error event, the worker closes its engine. A second signal ends the process where it is.
"""

import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp

from mlx_engine.errors import BadRequest
from mlx_engine.server.connections import Connection
from mlx_engine.worker import Worker

log = logging.getLogger(__name__)

# A client that reads slowly gets this long for the end of its stream.
_DRAIN_S = 10

# Clients keep connections for later; one that is closed under their hands is an error to them.
_KEEP_CONNECTION_S = 120

# Who waits for a thread on every system sees a signal between two looks at it.
_LOOK_S = 0.1


def numeric(host: str) -> str:
    """The address that a name, or an address, stands for. Raises BadRequest where it is none."""
    if not host:
        raise BadRequest("the host is empty: give an address, as 127.0.0.1, or 0.0.0.0 for all")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
        return socket.getnameinfo(found[0][4], flags)[0]
    except (OSError, UnicodeError) as error:
        raise BadRequest(
            f"the host {host!r} is no address and no known name ({_reason(error)}): give an "
            "address of this machine"
        ) from None


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens at a numeric address, "::" for IPv4 too; port 0 takes a free one.

    Raises BadRequest where it cannot.
    """
    try:
        family, _, _, _, bound = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(
            bound, family=family, backlog=128, dualstack_ipv6=address == "::"
        )
    except (OSError, OverflowError, ValueError) as error:
        raise BadRequest(
            f"{address} port {port} cannot be served ({_reason(error)}): choose others by --host "
            "and --port"
        ) from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def address_of(listener: socket.socket) -> str:
    """The address under which this machine reaches a server."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Serving:
    """Serves an application on a socket until a signal comes, or the worker fails.

    To be run in the main thread, which the signals reach, of a process that ends then: it heeds
    them to its very end. `leave` ends the process at once, whatever is at work in it.
    """

    def __init__(
        self, app: ASGIApp, worker: Worker, listener: socket.socket, leave: Callable[[], NoReturn]
    ) -> None:
        self._worker = worker
        self._listener = listener
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="asyncio",
            http=Connection,
            ws="none",
            server_header=False,
            timeout_keep_alive=_KEEP_CONNECTION_S,
            timeout_graceful_shutdown=_DRAIN_S,
        )
        self._server = _Server(config, worker, leave)

    def run(self) -> None:
        """Serve. Raises what ended the worker, if that was not a signal."""
        # The library's own messages repeat what ours say.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A terminal that closes is one more signal, unless it is to be outlived (nohup).
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._server.handle_exit)
        self._worker.start()
        try:
            self._server.run([self._listener])
        finally:
            self._listener.close()
            while not self._worker.close(_LOOK_S):
                pass
        if self._worker.error is not None:
            raise self._worker.error

    def stop(self) -> None:
        """Let `run` return; any thread may call."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, worker: Worker, leave: Callable[[], NoReturn]
    ) -> None:
        super().__init__(config)
        self._worker = worker
        self._leave = leave
        self._signal: signal.Signals | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            try:
                log.warning("left at once: what was not on disk yet is lost")
            finally:
                self._leave()
        self._signal = signal.Signals(sig)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._signal is not None:
            log.info(
                "%s: open answers end here, and the piece in hand is finished; "
                "Ctrl-C again leaves at once",
                self._signal.name,
            )
        # Streams that have been told of the end close by themselves.
        self._worker.stop()
        await super().shutdown(sockets)
