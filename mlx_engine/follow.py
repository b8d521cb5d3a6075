"""Follow: the process of a rank that does what rank 0 tells it, until that one goes.

Started by ranks, as `python -m mlx_engine.follow`: calls come in on standard input, signs of life
go out on standard output. Imports MLX only after it knows which device it may see.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from mlx_engine.calls import Call, Do, Plan, Start
from mlx_engine.errors import EngineError
from mlx_engine.ranks import BEAT_S, SILENT_S, read_frame

if TYPE_CHECKING:
    from mlx_engine.devices import Devices
    from mlx_engine.loading import OpenModel, Parts
    from mlx_engine.session import Session


_EQUAL = "the devices compute different numbers, so use equal ones with equal software"


class Line:
    """The two pipes to rank 0. When it has gone, or is silent for `stall_s`, this process ends.

    done: calls that were done. progress: counts what shows that a long one goes on.
    """

    def __init__(self, incoming: BinaryIO, outgoing: TextIO) -> None:
        self.progress = 0
        self.stall_s = float("inf")
        self._done = 0
        self._heard_s = time.monotonic()
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outgoing = outgoing
        self._speaking = threading.Lock()
        for target, args in ((self._listen, (incoming,)), (self._beat, ())):
            threading.Thread(target=target, args=args, name="ds41-line", daemon=True).start()

    def calls(self) -> Generator[Any]:
        """What is to be done; one is done when the next is asked for."""
        while True:
            call = self._calls.get()
            yield call
            self._done += 1

    def say(self, kind: str, **about: str) -> None:
        """Tell rank 0 something, and how far this rank is."""
        said = {"kind": kind, "done": self._done, "progress": self.progress, **about}
        with self._speaking:
            try:
                print(json.dumps(said), file=self._outgoing, flush=True)
            except OSError:
                os._exit(1)

    def _listen(self, incoming: BinaryIO) -> None:
        while True:
            try:
                call = read_frame(incoming)
            except (EOFError, OSError):
                # At once, whatever the main thread waits for: rank 0 has gone, or is done.
                os._exit(0)
            self._heard_s = time.monotonic()
            if call is not None:
                self._calls.put(call)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            if time.monotonic() - self._heard_s > max(self.stall_s, SILENT_S):
                os._exit(1)
            self.say("beat")


class Follower:
    """Does what rank 0 does; `sessions` by the numbers that they have there too."""

    def __init__(self, plan: Plan, parts: "Parts", devices: "Devices") -> None:
        from mlx_engine.decoder import Decoder

        self._plan = plan
        self._parts = parts
        self._devices = devices
        self._decoder = Decoder(parts.model)
        self.sessions: dict[int, Session] = {}
        self._readings: dict[int, Generator[int, None, object]] = {}
        self._drawn: dict[int, int] = {}
        self._numbers = count(1)

    def do(self, call: Call) -> None:
        """Do a call of a session as rank 0 does. Raises RuntimeError where it drew otherwise."""
        for number in call.gone:
            self.sessions.pop(number, None)
            self._readings.pop(number, None)
        drawn = self._drawn.pop(call.session, None)
        if call.name == "new":
            self.sessions[next(self._numbers)] = self._new_session()
        elif call.name == "logits":
            from mlx_engine.full_logits import full_logits

            full_logits(self._parts.model, self._parts.engram, *call.args)
        elif call.name == "step" and drawn not in (None, call.args[0]):
            raise RuntimeError(f"it drew token {drawn} where rank 0 drew {call.args[0]}: {_EQUAL}")
        else:
            self._do(self.sessions[call.session], call)

    def _do(self, session: "Session", call: Call) -> None:
        args = call.args
        match call.name:
            case "fork":
                other = session.fork(self._checkpoint(session, *args))
                self.sessions[next(self._numbers)] = other
            case "restore":
                from mlx_engine.state_transfer import receive_state

                ids, tail_bytes = args
                config = self._parts.model.config
                state = receive_state(config, len(ids), tail_bytes, self._devices)
                session.restore(ids, state)
            case "read":
                reading = self._readings[call.session] = session.read(*args)
                next(reading)
            case "go_on":
                (session.chunk_tokens,) = args
                next(self._readings[call.session], None)
            case "draw":
                self._drawn[call.session] = session.draw(*args)
            case "step":
                session.step(*args)
            case "stop_reading":
                self._readings.pop(call.session).close()
            case "compare":
                from mlx_engine.identity import state_digest

                (digest,) = args
                if state_digest(session.state) != digest:
                    raise RuntimeError(f"it computed other numbers than rank 0: {_EQUAL}")
            case "pause_at":
                session.pause_at(*args)
            case "rewind":
                session.rewind(*args)
            case "reset":
                session.reset()
            case "keep_checkpoint":
                session.keep_checkpoint()
            case "keep_unfinished":
                session.keep_unfinished()
            case "drop_checkpoint":
                session.drop_checkpoint(self._checkpoint(session, *args))
            case name:
                raise AssertionError(f"no session does {name}")

    def _new_session(self) -> "Session":
        from mlx_engine.session import Session

        plan, parts = self._plan, self._parts
        return Session(
            parts.model,
            parts.engram,
            prefill=plan.prefill,
            chunk_tokens=plan.chunk_tokens,
            decoder=self._decoder,
        )

    def _checkpoint(self, session: "Session", position: int) -> Any:
        return next(each for each in session.checkpoints if each.position == position)


def follow(line: Line) -> None:
    """Start as rank 0 says, then do what it does."""
    calls = line.calls()
    start: Start = next(calls)
    line.stall_s = start.stall_s
    # Before MLX is imported: which device it sees.
    os.environ.update(start.environment.variables)
    from mlx_engine.identity import identity, kernels
    from mlx_engine.joining import join, listen, reach
    from mlx_engine.loading import open_model
    from mlx_engine.ops import launch

    plan, environment = start.plan, start.environment
    opened = open_model(plan.directory.expanduser(), context_tokens=plan.context_tokens)
    line.say("identity", **identity(opened.checkpoint, plan.dtype, plan.cache_dir))
    devices = follower = None
    with ExitStack() as listening:
        for call in calls:
            match call:
                case Do("listen"):
                    listening.enter_context(listen(environment.listens))
                case Do("reach"):
                    reach(environment.reaches)
                case Do("join"):
                    listening.close()
                    devices = join(environment, start.backend)
                case Do("load"):
                    assert devices is not None
                    follower = Follower(plan, _load(opened, plan, devices, line), devices)
                    line.say(call.what, **kernels(launch.fast_paths()))
                    continue
                case _:
                    assert follower is not None
                    follower.do(call)
            if isinstance(call, Do):
                line.say(call.what)


def _load(opened: "OpenModel", plan: Plan, devices: "Devices", line: Line) -> "Parts":
    def went_on(done_bytes: int, total_bytes: int) -> None:
        line.progress = done_bytes

    return opened.load_parts(
        plan.dtype,
        prefill=plan.prefill,
        chunk_tokens=plan.chunk_tokens,
        session_bytes=plan.session_bytes,
        cache_dir=plan.cache_dir,
        on_progress=went_on,
        devices=devices,
    )


def main() -> None:
    """Follow; what goes wrong is told to rank 0, whose message it becomes."""
    # What libraries print must not come between the signs of life.
    outgoing = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    line = Line(sys.stdin.buffer, outgoing)
    try:
        follow(line)
    except Exception as error:
        is_ours = isinstance(error, EngineError)
        message = str(error) if is_ours else f"{type(error).__name__}: {error}"
        line.say("error", type=type(error).__name__, message=message)
    os._exit(1)


if __name__ == "__main__":
    main()
