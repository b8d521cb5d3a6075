"""Joining: one process's part in making MLX's group, with what MLX would wait for tried before.

MLX waits for a peer for ever, and shares a port that another group has. Who joins whom is hosts's
to say.
"""

import faulthandler
import os
import socket
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mlx_engine.devices import Devices
from mlx_engine.errors import BadRequest
from mlx_engine.hosts import Address, Backend, Environment

_REACH_S = 8.0
# The ring only connects sockets; the others start a network of their own.
_JOIN_S = {"ring": 8.0, "nccl": 60.0, "jaccl": 60.0}


@contextmanager
def listen(address: Address | None) -> Generator[None]:
    """Hold the address that this rank will open, so that others can try it; BadRequest if taken."""
    if address is None:
        yield
        return
    try:
        listener = socket.create_server(address)
    except OSError as error:
        raise BadRequest(
            f"{address[0]} port {address[1]} cannot be opened ({error.strerror}): end what uses "
            'it, or give another "port" in the host file'
        ) from None
    with listener:
        yield


def reach(address: Address | None) -> None:
    """Try the address of another rank, which listens; raises BadRequest when nobody answers."""
    if address is None:
        return
    try:
        socket.create_connection(address, _REACH_S).close()
    except OSError as error:
        raise BadRequest(
            f"{address[0]} port {address[1]} cannot be reached ({error.strerror or error}): check "
            '"ips" in the host file, and the firewall there'
        ) from None


def join(environment: Environment, backend: Backend, failure: str | None = None) -> Devices:
    """Join the other ranks by MLX.

    Where they do not come the process ends with exit code 1, and with `failure` as its last words
    if there are any. Raises BadRequest where MLX was built without the back-end.
    """
    os.environ.update(environment.variables)
    with tempfile.TemporaryDirectory(prefix="ds41-") as folder:
        for name, content in environment.files.items():
            path = Path(folder) / name
            path.write_text(content, encoding="utf-8")
            os.environ[name] = str(path)
        with _limited(_JOIN_S[backend], failure):
            try:
                return Devices.join(backend)
            except RuntimeError as error:
                raise BadRequest(f"MLX cannot join devices by {backend} here: {error}") from None


@contextmanager
def _limited(limit_s: float, failure: str | None) -> Generator[None]:
    """End the process when what is inside takes longer.

    MLX holds the interpreter while it waits, so that no thread of it could: a thread outside of
    it writes to a pipe then and exits, and a shell at the other end speaks.
    """
    reading, writing = os.pipe()
    speaker = None
    if failure is not None:
        command = ["sh", "-c", 'read -r _ && printf "ds41: %s\n" "$0" >&2', failure]
        speaker = subprocess.Popen(command, stdin=reading, start_new_session=True)
    try:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=writing)
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(writing)
        os.close(reading)
        if speaker is not None:
            speaker.wait()
