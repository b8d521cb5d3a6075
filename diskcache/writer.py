"""The one thread that writes, and the queue before it, bounded by bytes.

Knows nothing of what its jobs do. A job that fails is counted and logged and hurts nobody.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mlx_engine.diskcache.lock import Busy, Gone

_log = logging.getLogger(__name__)


class OutOfTime(Exception):
    """The time to close is over: what is not written stays unwritten."""


@dataclass(frozen=True, slots=True)
class Job:
    """Something to do, and the bytes that it holds in memory until it is done."""

    run: Callable[[], None]
    n_bytes: int
    on_drop: Callable[[], None]


class Writer:
    """Runs jobs one after the other on a thread of its own."""

    def __init__(self, queue_bytes: int) -> None:
        self._queue_bytes = queue_bytes
        self._jobs: deque[Job] = deque()
        self._held_bytes = 0
        self._is_closing = False
        self._deadline_s = float("inf")
        self._changed = threading.Condition()
        self._is_busy = False
        self.faults = 0
        self._thread = threading.Thread(target=self._work, name="ds41-kv-write", daemon=True)
        self._thread.start()

    @property
    def deadline_s(self) -> float:
        """When the work must be over (time.monotonic)."""
        return self._deadline_s

    @property
    def held_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._held_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that the queue can still take."""
        return self._queue_bytes - self._held_bytes

    def check_time(self) -> None:
        """OutOfTime once the time to close is over."""
        if time.monotonic() >= self._deadline_s:
            raise OutOfTime

    def put(self, job: Job) -> bool:
        """Queue a job; False if the writer is closing or the queue is full."""
        with self._changed:
            if self._is_closing or job.n_bytes > self.room_bytes:
                return False
            self._jobs.append(job)
            self._held_bytes += job.n_bytes
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is done; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Do what is queued for at most this long, then drop the rest.

        False if the file system has not let go of the thread even then.
        """
        with self._changed:
            self._is_closing = True
            self._deadline_s = min(self._deadline_s, time.monotonic() + timeout_s)
            self._changed.notify_all()
        # A call of the file system cannot be broken off; one more moment is for it to return.
        self._thread.join(timeout_s + 1.0)
        return not self._thread.is_alive()

    def _is_idle(self) -> bool:
        return not self._jobs and not self._is_busy

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_busy = True
            self._run(job)
            with self._changed:
                self._held_bytes -= job.n_bytes
                self._is_busy = False
                del job
                self._changed.notify_all()

    def _run(self, job: Job) -> None:
        try:
            self.check_time()
            job.run()
        except OutOfTime:
            job.on_drop()
        except Gone:
            job.on_drop()
        except Busy:
            self._fail(job, "another process holds its lock")
        except OSError as error:
            self._fail(job, error.strerror or str(error))
        except Exception:
            # Whatever it is, it must not end the thread and with it all later saves.
            _log.exception("The disk cache could not be written")
            self.faults += 1
            job.on_drop()

    def _fail(self, job: Job, reason: str) -> None:
        _log.warning("The disk cache could not be written: %s.", reason)
        self.faults += 1
        job.on_drop()
