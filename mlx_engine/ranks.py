"""Ranks: the other processes that hold one model with this one, and whether they live.

Owns starting them, the pipes to them, and the end of the whole run when one of them dies, fails or
makes no progress. What they are told to compute is lead's part, doing it follow's. Data of the
model never goes through here.
"""

import json
import os
import pickle
import shlex
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn, cast

from mlx_engine import errors
from mlx_engine.errors import DeviceError, EngineError
from mlx_engine.hosts import Host, Hosts

BEAT_S = 1.0
STALL_S = 120.0
# Without a sign of life for so long a rank is rather stopped than waiting for another.
SILENT_S = 3.0
# What follows from a death may be seen before the death is.
_SETTLE_S = 0.5
_START_S = 30.0
_POLL_S = 0.1
_END_S = 5.0

_ALIVE = ("ServerAliveInterval=2", "ServerAliveCountMax=3")

_LENGTH = struct.Struct("<Q")


def write_frame(file: BinaryIO, message: object) -> None:
    """Send a message to a rank."""
    data = pickle.dumps(message)
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def read_frame(file: BinaryIO) -> Any:
    """The next message from rank 0, whose child this is; raises EOFError when that has gone."""
    length = file.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise EOFError
    (n_bytes,) = _LENGTH.unpack(length)
    data = file.read(n_bytes)
    if len(data) < n_bytes:
        raise EOFError
    return pickle.loads(data)


def end_process(message: str) -> NoReturn:
    """End this process at once, also where other threads wait for a device for ever."""
    os.write(2, f"ds41: {message}\n".encode())
    os._exit(1)


class Rank:
    """One of the processes: its pipes, what it has said, and how far it is.

    done: messages that it has done. progress: counts whatever shows that it goes on.
    """

    def __init__(self, number: int, host: Host) -> None:
        self.number, self.host = number, host
        command = [host.python or sys.executable, "-P", "-m", "mlx_engine.follow"]
        if not host.is_local:
            # A machine that vanishes closes no connection.
            wanted = ("BatchMode=yes", "ConnectTimeout=10", *_ALIVE)
            options = [word for each in wanted for word in ("-o", each)]
            command = ["ssh", *options, "--", host.ssh, shlex.join(command)]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C is for rank 0, which tells the others.
                start_new_session=True,
            )
        except OSError as error:
            raise DeviceError(
                f"{command[0]} cannot be started for rank {number} on {host.ssh}: {error.strerror}"
            ) from None
        self.done = 0
        self.progress = 0
        self.moved_s = self.heard_s = time.monotonic()
        self.has_ended = False
        self.error: Mapping[str, Any] | None = None
        self.answers: dict[str, Mapping[str, Any]] = {}
        self.last_lines: deque[str] = deque(maxlen=20)
        self._sending = threading.Lock()

    def __str__(self) -> str:
        return f"rank {self.number} on {self.host.ssh}"

    def send(self, message: object) -> None:
        """Send a message; nothing happens when the process has gone, which is seen elsewhere."""
        assert self.process.stdin is not None
        with self._sending, suppress(OSError, ValueError):
            write_frame(self.process.stdin, message)  # pyright: ignore[reportArgumentType]

    def hear(self, line: bytes) -> None:
        """Take in what it says of itself."""
        try:
            said: Any = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict) or "kind" not in said:
            # The greeting of a login.
            return
        said = cast("dict[str, Any]", said)
        now_s = self.heard_s = time.monotonic()
        if (said["done"], said["progress"]) != (self.done, self.progress):
            self.done, self.progress, self.moved_s = said["done"], said["progress"], now_s
        if said["kind"] == "error":
            self.error = said
        elif said["kind"] != "beat":
            self.answers[said["kind"]] = said

    def why_ended(self) -> str:
        """What its process left."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        code = self.process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        said = f": {self.last_lines[-1]}" if self.last_lines else ""
        return f"has ended{said}"


class Ranks:
    """The processes of ranks 1 and up. `end` is told why the run cannot go on, and ends it.

    Of ranks that wait for each other none gets further when one does not: after `stall_s` without
    progress the run ends. What goes wrong before `has_started` is set is raised by `wait` instead.
    """

    def __init__(
        self, hosts: Hosts, stall_s: float, end: Callable[[str], NoReturn] = end_process
    ) -> None:
        self.has_started = False
        self._stall_s = stall_s
        self._end = end
        self._sent = 0
        self._own_done = 0
        self._own_moved_s = time.monotonic()
        self._failure: EngineError | None = None
        self._is_closing = False
        self._is_waiting = False
        self._changed = threading.Condition()
        self._ending = threading.Lock()
        self._ranks: list[Rank] = []
        try:
            for number, host in enumerate(hosts.hosts[1:], 1):
                self._ranks.append(Rank(number, host))
        except BaseException:
            self._kill()
            raise
        for rank in self._ranks:
            self._watch(self._listen, rank)
            self._watch(self._note_errors, rank)
            self._watch(self._beat, rank)
        self._watch(self._supervise)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Ranks 1 and up."""
        return tuple(self._ranks)

    def send(self, message: object) -> None:
        """Give every rank the same to do."""
        self.send_each(lambda rank: message)

    def send_each(self, message: Callable[[Rank], object]) -> None:
        """Give every rank its own part of what all do now, this one too."""
        self._own_moved_s = time.monotonic()
        self._sent += 1
        for rank in self._ranks:
            rank.send(message(rank))

    def did(self) -> None:
        """Note that this process has done its part too."""
        self._own_done = self._sent
        self.went_on()

    def went_on(self) -> None:
        """Note that this process goes on."""
        self._own_moved_s = time.monotonic()

    def wait(self, kind: str) -> list[Mapping[str, Any]]:
        """What every rank answers. Raises what one of them raised, or DeviceError."""
        with self._changed:
            self._is_waiting = True
            self._changed.wait_for(
                lambda: self._failure or all(kind in each.answers for each in self._ranks)
            )
            self._is_waiting = False
            if self._failure is not None:
                raise self._failure
        return [each.answers[kind] for each in self._ranks]

    def fail(self, error: Exception) -> NoReturn:
        """End the run for an error of this process; it may be that another one's death caused."""
        deadline_s = time.monotonic() + 2 * _SETTLE_S + SILENT_S * _is_of_group(str(error))
        while self._failure is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        failure = self._failure or DeviceError(
            f"rank 0 on this machine failed, which ends the run: {_described(error)}"
        )
        self._finish(failure)

    def close(self) -> None:
        """Let the processes end; those that do not are killed, which ends the run for a fault."""
        self._is_closing = True
        for rank in self._ranks:
            assert rank.process.stdin is not None
            with suppress(OSError):
                rank.process.stdin.close()
        deadline_s = time.monotonic() + _END_S
        try:
            for rank in self._ranks:
                with suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(deadline_s - time.monotonic(), 0))
            left = [rank for rank in self._ranks if rank.process.poll() is None]
        finally:
            self._kill()
        if left and self.has_started:
            self._end(f"{left[0]} did not end within {_END_S:g} s when the run did; it was killed")

    def _watch(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name="ds41-ranks", daemon=True).start()

    def _listen(self, rank: Rank) -> None:
        assert rank.process.stdout is not None
        for line in rank.process.stdout:
            rank.hear(line)
            with self._changed:
                self._changed.notify_all()
        rank.has_ended = True

    def _note_errors(self, rank: Rank) -> None:
        """Keep the last that a process writes, which tells why it ended."""
        assert rank.process.stderr is not None
        for line in rank.process.stderr:
            if text := line.decode(errors="replace").strip():
                rank.last_lines.append(text)

    def _beat(self, rank: Rank) -> None:
        while not rank.has_ended:
            rank.send(None)
            time.sleep(BEAT_S)

    def _supervise(self) -> None:
        looked_s = time.monotonic()
        while not self._is_closing:
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > SILENT_S:
                # This process was stopped itself, and has not heard yet what the others said.
                self.went_on()
            if any(each.has_ended or each.error for each in self._ranks):
                time.sleep(_SETTLE_S)
                failure = self._fault()
            else:
                failure = self._stall()
            if failure is not None and not self._is_closing:
                self._fail(failure)
                return
            time.sleep(_POLL_S)

    def _fail(self, failure: EngineError) -> None:
        with self._changed:
            self._failure = failure
            is_raised = self._is_waiting and not self.has_started
            self._changed.notify_all()
        if not is_raised:
            self._finish(failure)

    def _finish(self, failure: EngineError) -> NoReturn:
        # Never given back: of two threads that see the end, one tells of it.
        self._ending.acquire()
        self._kill()
        self._end(str(failure))

    def _fault(self) -> EngineError:
        """Of all that has gone wrong that which came first: deaths cause errors of others."""
        for rank in self._ranks:
            if rank.has_ended and rank.error is None:
                return DeviceError(f"{rank} {rank.why_ended()}; the run ends with it")
        failed = [each for each in self._ranks if each.error]
        failed.sort(key=lambda each: _is_of_group(each.error["message"] if each.error else ""))
        rank, error = failed[0], failed[0].error
        assert error is not None
        known = getattr(errors, error["type"], None) if error["type"] in _RAISED else None
        return (known or DeviceError)(f"{rank} failed, which ends the run: {error['message']}")

    def _stall(self) -> EngineError | None:
        now_s = time.monotonic()
        behind = [each for each in self._ranks if each.done < self._sent]
        moved_s = max([self._own_moved_s, *(each.moved_s for each in self._ranks)])
        is_under_way = behind or self._own_done < self._sent
        limit_s, whose = self._stall_s, "--stall-timeout"
        # Before a step was done a program has to be read and a device to be found.
        if not self.has_started and limit_s < _START_S:
            limit_s, whose = _START_S, "which a start has at least"
        if not is_under_way or now_s - moved_s <= limit_s:
            return None
        silent = [each for each in behind if now_s - each.heard_s > SILENT_S]
        slowest = min(silent or behind, key=lambda each: each.done, default=None)
        who = "rank 0 on this machine" if slowest is None else str(slowest)
        return DeviceError(
            f"{who} has made no progress for {limit_s:g} s ({whose}) while others wait; "
            "the run ends"
        )

    def _kill(self) -> None:
        self._is_closing = True
        for rank in self._ranks:
            with suppress(OSError):
                rank.process.kill()


_RAISED = ("BadRequest", "ModelFileError", "DeviceError")


def _is_of_group(message: str) -> bool:
    """Whether MLX says it of the connection to another rank, which then is the cause."""
    return "[ring]" in message or "[nccl]" in message or "[jaccl]" in message.lower()


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
