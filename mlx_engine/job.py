"""Job: one request on its way through the worker, as the thread that asked sees it.

Owns the handing over of events between threads, and what is known of a prefill's course. When a job
gets its turn is worker's part.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Condition
from typing import Literal

from mlx_engine.errors import EngineError
from mlx_engine.respond import End, Event, Progress, Request

# How long a client that was refused should wait.
_RETRY_AFTER_S = 5


class Overloaded(EngineError):
    """The queue is full; `retry_after_s` later it may have room."""

    def __init__(self, message: str, retry_after_s: int = _RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopped(EngineError):
    """The worker ends, so this answer does not come."""


@dataclass(frozen=True)
class Failed:
    """The last event of an answer that an error ended."""

    error: Exception


JobEvent = Event | Failed
JobState = Literal["queued", "waiting", "prefill", "decode", "done"]


class Job:
    """One request on its way; any thread may call.

    `progress` is the prefill's, None before it begins; `completion_tokens` have been sampled. Who
    waits for events calls `take` whenever `wake` was called, which happens in another thread and
    must not block.
    """

    def __init__(
        self, request: Request, drop: Callable[["Job"], None], id: str | None = None
    ) -> None:
        self.id = id or secrets.token_hex(8)
        self.request = request
        self.created_s = self.logged_s = time.monotonic()
        self.state: JobState = "queued"
        self.progress: Progress | None = None
        self.completion_tokens = 0
        self.decode_tokens_per_s = 0.0
        self.wake: Callable[[], None] = lambda: None
        self.is_cancelled = False
        self._drop = drop
        self._first_progress: Progress | None = None  # with the tokens that were known before
        self._first_token_s = 0.0
        self._arrived = Condition()
        self._events: list[JobEvent] = []

    @property
    def is_done(self) -> bool:
        """Whether no more events come."""
        return self.state == "done"

    @property
    def cached_tokens(self) -> int | None:
        """The prompt's tokens that were known before, None while that is not known."""
        return self._first_progress and self._first_progress.done_tokens

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast the engine has read the prompt so far, 0 while that is not known."""
        return self._prefill_tokens_in(_worked_s)

    @property
    def prefill_tokens_per_elapsed_s(self) -> float:
        """The same, the time that others had the engine counted too."""
        return self._prefill_tokens_in(lambda progress: progress.elapsed_s)

    @property
    def prefill_left_s(self) -> float | None:
        """How long the rest of the prompt will take, None while that is not known."""
        # Others will have the engine as often as they had it so far.
        tokens_per_s = self.prefill_tokens_per_elapsed_s
        if self.progress is None or not tokens_per_s:
            return None
        return (self.progress.total_tokens - self.progress.done_tokens) / tokens_per_s

    def _prefill_tokens_in(self, seconds: Callable[[Progress], float]) -> float:
        """The prompt's tokens a second, by a count of seconds."""
        first, last = self._first_progress, self.progress
        if first is None or last is None or seconds(last) <= seconds(first):
            return 0.0
        return (last.done_tokens - first.done_tokens) / (seconds(last) - seconds(first))

    def cancel(self) -> None:
        """End the answer: at once where it has not begun, otherwise after the chunk or token."""
        self.is_cancelled = True
        self._drop(self)

    def take(self) -> list[JobEvent]:
        """The events since the last call; the last one of all is an End or Failed."""
        with self._arrived:
            events, self._events = self._events, []
        return events

    def wait(self) -> Iterator[JobEvent]:
        """Yield the events as they come, up to the last."""
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._events)
            for event in self.take():
                yield event
                if isinstance(event, End | Failed):
                    return

    def put(self, event: JobEvent) -> None:
        """Add an event, unless the last one is there already: for the worker."""
        with self._arrived:
            if self.state == "done":
                return
            if isinstance(event, End | Failed):
                self.state = "done"
            elif isinstance(event, Progress):
                self._note(event)
                if event.stage == "decode":
                    # Nobody waits for a count.
                    return
            else:
                self.state = "decode"
            self._events.append(event)
            self._arrived.notify_all()
        self.wake()

    def _note(self, progress: Progress) -> None:
        match progress.stage:
            case "waiting":
                self.state = "waiting"
            case "prefill":
                # The one before the prefill knows nothing of what is cached.
                if self.progress is not None and self._first_progress is None:
                    self._first_progress = progress
                self.progress = progress
                self.state = "prefill"
            case "decode":
                self.state = "decode"
                self.completion_tokens = progress.done_tokens
                self._first_token_s = self._first_token_s or _worked_s(progress)
                since_s = _worked_s(progress) - self._first_token_s
                if since_s > 0:
                    self.decode_tokens_per_s = (self.completion_tokens - 1) / since_s


def _worked_s(progress: Progress) -> float:
    return progress.elapsed_s - progress.waited_s
