"""Processes that write into a disk cache until they are killed: `python -m tests.diskcache.victim`.

Reads a job a line, forks for each, and says how the fork ended: a start costs no imports. The fork
kills itself at the n-th call of the seam, or is killed after some time. Imports no MLX.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_engine.diskcache.layout import TokenIds
from tests.diskcache import content
from tests.diskcache.recording import CHANGES, SYNCS, SeamFiles

# Between other calls the disk and the lock stay as they are.
_STEPS = CHANGES | {"try_lock", "unlock"}
# A fork that lives longer than this hangs.
HANGS_S = 60.0


@dataclass(frozen=True)
class Job:
    """Save `count` prompts' anchors, from the prompt `first` on.

    The process is killed at the `at_call`th call that changes something, in the middle of it if it
    is a write and `is_torn`; or after `after_s`; or not at all.
    """

    folder: str
    space_bytes: int
    first: int
    count: int
    at_call: int = -1
    is_torn: bool = False
    after_s: float = 0.0


@dataclass(frozen=True)
class End:
    """How it ended: the signal, 0 for none; the anchors that it was promised; calls it made."""

    signal: int
    promised: list[tuple[int, int]]
    has_mlx: bool


def prompt(number: int) -> TokenIds:
    """Prompts of which every three share their start."""
    return content.tokens(100 + number, 700, after=content.tokens(number % 3, 1500))


def positions(number: int) -> tuple[int, ...]:
    """Where a prompt has its anchors."""
    return 900, 1500 + 2 * (number % 40), 2200


class SuicidalFiles(SeamFiles):
    """Kills the process at one call, and waits for no disk: the system outlives the process."""

    def __init__(self, at_call: int, is_torn: bool) -> None:
        self._left = at_call
        self._is_torn = is_torn

    def around(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        if name not in _STEPS:
            return call(*args)
        self._left -= 1
        if self._left == -1:
            if self._is_torn and name == "write":
                data = b"".join(bytes(memoryview(each).cast("B")) for each in args[1])
                call(args[0], [data[: len(data) // 2]])
            os.kill(os.getpid(), signal.SIGKILL)
        return None if name in SYNCS else call(*args)


def run(job: Job, promises: int) -> None:
    """Write what the job says; a line for each anchor that is on the disk."""
    files = SuicidalFiles(job.at_call, job.is_torn)
    folder = Path(job.folder)
    with content.opened(folder, space_bytes=job.space_bytes, files=files) as cache:
        for number in range(job.first, job.first + job.count):
            for position in positions(number):
                content.save(cache, prompt(number), position)
                is_done = cache.flush(content.FLUSH_S)
                if is_done and cache.lookup(prompt(number)[:position]) == position:
                    os.write(promises, b"%d %d\n" % (number, position))


def fork(job: Job) -> End:
    """Run a job in a fork until its end."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            run(job, writing)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    if job.after_s:
        time.sleep(job.after_s)
        os.kill(child, signal.SIGKILL)
    # Its end of the pipe closes when it ends.
    signal.setitimer(signal.ITIMER_REAL, HANGS_S)
    with open(reading) as lines:
        whole = [line.split() for line in lines if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)
    has_mlx = any(name.partition(".")[0] == "mlx" for name in sys.modules)
    promised = [(int(number), int(position)) for number, position in whole]
    return End(ended_by, promised, has_mlx)


def main() -> None:
    """Serve jobs until the input ends."""
    for line in sys.stdin:
        print(json.dumps(asdict(fork(Job(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
