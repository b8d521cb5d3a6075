"""Worker: the one thread that loads the model and runs it, and the queue before it.

Owns who is answered when, what happens to a job that is cancelled or fails, and how full the queue
may be. Knows nothing of protocols, and nothing of asyncio: a job calls whoever waits for it.

Of the jobs at work the one that has had the least time goes on, by one event: a chunk of a prompt
or a token. A job that arrives has had as much as the least of them, so that a short request waits
for one chunk of a long prompt and not for all of it; and so has one that had to wait for another's.
Those that wait so make way for others; what is beyond `max_active` waits in its order.
"""

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Literal, Protocol

from mlx_engine.diskcache.cache import CacheStats
from mlx_engine.errors import BadRequest, Cancelled, EngineError
from mlx_engine.job import Failed, Job, JobEvent, Overloaded, Stopped
from mlx_engine.live import Stats
from mlx_engine.memory import ANSWERS
from mlx_engine.respond import End, Event, Progress, Request
from mlx_engine.turns import TurnRecord

log = logging.getLogger(__name__)

MAX_QUEUED = 64

# The log tells of a long prompt this often.
_LOG_S = 10.0

_STOPPED = "the server is shutting down: send the request again when it is back"

_NOT_LOADED = "the model could not be loaded: see the log of the server"

_FAILED = "the engine has failed: see the log of the server, and start it again"


class AnsweringEngine(Protocol):
    """What the worker needs of an engine; `respond` in the worker's thread, the rest in any."""

    @property
    def turns(self) -> TurnRecord: ...

    def session_stats(self) -> Stats: ...

    def disk_stats(self) -> CacheStats | None: ...

    def respond(self, request: Request, *, cancelled: Callable[[], bool]) -> Generator[Event]: ...

    def save_piece(self) -> bool:
        """Hand the disk cache a piece of what waits for it; whether any did. Never raises."""
        ...


# Loads an engine; told of bytes read and in all. Entered and left in the worker's thread.
Load = Callable[[Callable[[int, int], None]], AbstractContextManager[AnsweringEngine]]


@dataclass(eq=False)
class _Active:
    """A job at work, and the time that it has had.

    is_due: whether there may be more by now, while the job waits for another; None otherwise.
    """

    job: Job
    events: Generator[Event]
    used_s: float
    is_due: Callable[[], bool] | None = None


@dataclass
class Counts:
    """What the worker has done since its start."""

    answered: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    waited_s: float = 0.0


WorkerState = Literal["loading", "ready", "failed", "stopped"]


class Worker:
    """Runs jobs on an engine that it loads itself; `start` begins, `close` ends it.

    Jobs may be submitted while it loads. `engine` is None until it is loaded, `error` is why it
    failed, `load_bytes` are those read and in all. `on_state` is called in the worker's thread when
    `state` has changed; `clock` gives seconds.
    """

    def __init__(
        self,
        load: Load,
        *,
        max_active: int = ANSWERS,
        max_queued: int = MAX_QUEUED,
        on_state: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.state: WorkerState = "loading"
        self.error: Exception | None = None
        self.engine: AnsweringEngine | None = None
        self.load_bytes = (0, 0)
        self.counts = Counts()
        self._load = load
        self._max_active = max_active
        self._max_queued = max_queued
        self._on_state = on_state
        self._clock = clock
        self._changed = Condition()
        self._queue: deque[Job] = deque()
        self._active: list[_Active] = []
        self._is_stopping = False
        self._thread = Thread(target=self._run, name="ds41-worker", daemon=True)

    def start(self) -> None:
        """Begin to load, and then to work."""
        self._thread.start()

    def submit(self, request: Request, id: str | None = None) -> Job:
        """Put a request at the end of the queue; the job has that id, or makes one.

        Raises Overloaded when the queue is full, Stopped when nothing is answered any more.
        """
        job = Job(request, self._drop, id)
        with self._changed:
            self.check_room()
            self._queue.append(job)
            self._changed.notify()
        return job

    def check_room(self) -> None:
        """Raise what `submit` would: a request that is refused need not be looked at first."""
        with self._changed:
            if self._is_stopping:
                raise Stopped(_STOPPED)
            if self.error is not None:
                raise self._failure
            # Those that are about to be taken up do not wait.
            n_waiting = max(len(self._queue) + len(self._active) - self._max_active, 0)
            if n_waiting >= self._max_queued:
                self.counts.refused += 1
                are = "request is" if n_waiting == 1 else "requests are"
                raise Overloaded(f"{n_waiting} {are} waiting already: try again later")

    def jobs(self) -> list[Job]:
        """The jobs at work, then those that wait, in their order."""
        with self._changed:
            return [active.job for active in self._active] + list(self._queue)

    def position(self, job: Job) -> int:
        """How many jobs wait before this one, and it too; 0 when it does not wait."""
        with self._changed:
            return self._queue.index(job) + 1 if job in self._queue else 0

    def stop(self) -> None:
        """Refuse what comes, and end every answer with Stopped; what was computed is kept."""
        with self._changed:
            self._is_stopping = True
            for job in self.jobs():
                # Ahead of the end that follows once it is cancelled.
                job.put(Failed(Stopped(_STOPPED)))
                job.is_cancelled = True
            self._queue.clear()
            self._changed.notify()

    def close(self, timeout_s: float | None = None) -> bool:
        """`stop`, then wait until the engine is closed; False when it took too long."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _drop(self, job: Job) -> None:
        """Take a cancelled job out of the queue; one at work is seen by the loop."""
        with self._changed:
            if job not in self._queue:
                return
            self._queue.remove(job)
            self.counts.cancelled += 1
        job.put(Failed(Cancelled("the answer was cancelled before it began")))

    def _run(self) -> None:
        try:
            with self._load(self._report_load) as engine:
                self.engine = engine
                self._set_state("ready")
                self._work(engine)
                self._set_state("stopped")
        except Exception as error:
            if self._is_stopping and isinstance(error, Stopped):
                self._set_state("stopped")
                return
            log.error("the worker has ended: %s", describe(error))
            with self._changed:
                self.error = error
                jobs = self.jobs()
                self._queue.clear()
            self._set_state("failed")
            for job in jobs:
                job.put(Failed(self._failure))

    @property
    def _failure(self) -> Stopped:
        return Stopped(_NOT_LOADED if self.engine is None else _FAILED)

    def _set_state(self, state: WorkerState) -> None:
        self.state = state
        self._on_state()

    def _report_load(self, done_bytes: int, total_bytes: int) -> None:
        self.load_bytes = (done_bytes, total_bytes)
        if self._is_stopping:
            raise Stopped(_STOPPED)

    def _work(self, engine: AnsweringEngine) -> None:
        try:
            while True:
                self._save(engine)
                with self._changed:
                    self._changed.wait_for(self._has_work)
                    # Those at work are cancelled by then, and end at their next step.
                    if self._is_stopping and not self._active:
                        return
                    self._admit(engine)
                    active = self._next()
                self._advance(active)
        finally:
            for active in [*self._active]:
                self._leave(active)
                active.job.put(Failed(self._failure))

    def _save(self, engine: AnsweringEngine) -> None:
        """While nobody asks, let the disk cache have what waits for it."""
        while not self._has_work() and engine.save_piece():
            pass

    def _has_work(self) -> bool:
        return bool(self._queue or self._active) or self._is_stopping

    def _admit(self, engine: AnsweringEngine) -> None:
        while self._queue and len(self._running()) < self._max_active:
            job = self._queue.popleft()
            events = engine.respond(job.request, cancelled=lambda job=job: job.is_cancelled)
            self._active.append(_Active(job, events, self._least_s()))

    def _running(self) -> list[_Active]:
        """The jobs that can go on: with those that need wait no longer, up to `max_active`."""
        running = [active for active in self._active if not active.is_due]
        due = [active for active in self._active if active.is_due and active.is_due()]
        return running + due[: max(self._max_active - len(running), 0)]

    def _least_s(self) -> float:
        """The least time that a job at work has had."""
        return min((active.used_s for active in self._active if not active.is_due), default=0.0)

    def _next(self) -> _Active:
        """The job that goes on."""
        running = self._running()
        for active in running:
            if active.is_due:
                # The time that it waited is not owed to it.
                active.used_s, active.is_due = max(active.used_s, self._least_s()), None
        # A cancelled one only has to end, which frees its place; of equal ones the newest has
        # waited for the other's chunk.
        cancelled = [active for active in self._active if active.job.is_cancelled]
        return min(reversed(cancelled or running or self._active), key=lambda active: active.used_s)

    def _advance(self, active: _Active) -> None:
        """Let a job go on to its next event; whatever goes wrong is the end of this job alone."""
        started_s = self._clock()
        try:
            event: JobEvent = next(active.events)
        except Exception as error:
            if not isinstance(error, BadRequest | Cancelled):
                log.error("an answer failed: %s", describe(error))
            event = Failed(error)
        active.used_s += self._clock() - started_s
        active.is_due = None
        if isinstance(event, Progress) and event.stage == "waiting":
            active.is_due = event.is_due
        if isinstance(event, End | Failed):
            self._leave(active)
            with self._changed:  # cancelled ones are counted by other threads too
                self._count(active.job, event)
        self._pass_on(active.job, event)

    def _pass_on(self, job: Job, event: JobEvent) -> None:
        job.put(event)
        if not isinstance(event, Progress) or event.stage != "prefill":
            return
        now_s = time.monotonic()
        if now_s - job.logged_s < _LOG_S:
            return
        job.logged_s = now_s
        left_s = job.prefill_left_s
        log.info(
            "a prompt: %d of %d tokens read, %.0f/s, %s; %d waiting",
            event.done_tokens,
            event.total_tokens,
            job.prefill_tokens_per_s,
            "time left unknown" if left_s is None else f"{left_s:.0f} s left",
            len(self._queue),
        )

    def _leave(self, active: _Active) -> None:
        try:
            active.events.close()
        except Exception as error:
            log.error("an answer could not be closed: %s", describe(error))
        with self._changed:
            self._active.remove(active)

    def _count(self, job: Job, event: End | Failed) -> None:
        counts = self.counts
        if isinstance(event, Failed):
            counts.failed += 1
            return
        if event.finish_reason == "cancelled":
            counts.cancelled += 1
        else:
            counts.answered += 1
        counts.prompt_tokens += event.prompt_tokens
        counts.cached_tokens += event.cached_tokens
        counts.completion_tokens += event.completion_tokens
        timings = event.timings
        counts.prefill_s += timings.prefill_s
        counts.decode_s += timings.decode_s
        # In the queue, and while others had the engine.
        worked_s = timings.prefill_s + timings.decode_s
        waited_s = max(time.monotonic() - job.created_s - worked_s, 0.0)
        counts.waited_s += waited_s
        log.info(
            "prompt %d tokens (%d cached), %.0f/s; answer %d tokens, %.1f/s; waited %.1f s; %s",
            event.prompt_tokens,
            event.cached_tokens,
            timings.prefill_tokens_per_s,
            event.completion_tokens,
            timings.decode_tokens_per_s,
            waited_s,
            event.finish_reason,
        )


def describe(error: Exception) -> str:
    """What a log may say of an error: never its text, where that could quote a prompt."""
    kind = type(error).__name__
    if isinstance(error, EngineError | OSError | MemoryError):
        return f"{kind}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    where = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames[-4:])
    # MLX reports what the device did as a RuntimeError.
    return f"{kind}: {error} ({where})" if isinstance(error, RuntimeError) else f"{kind} ({where})"
