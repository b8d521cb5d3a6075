"""The worker: order, fairness, cancellation, faults and the end, without any protocol."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from mlx_engine.answer import TextDelta
from mlx_engine.engram_table import EngramStats
from mlx_engine.errors import BadRequest, Cancelled, ModelFileError
from mlx_engine.job import Failed, Job, JobEvent, Overloaded, Stopped
from mlx_engine.live import Stats
from mlx_engine.respond import End, Event, Progress, Request, Timings
from mlx_engine.turns import TurnRecord
from mlx_engine.worker import AnsweringEngine, Worker
from tests.server.support import PATIENCE_S, loading, until, working


def end(reason: Any = "stop") -> End:
    return End("", "", 4, 1, 2, Timings(0.5, 0.25, 0, 0), EngramStats(), reason)


class Puppet:
    """Answers a prompt of the form "NAME CHUNKS TOKENS"; each step costs what `seconds` says.

    `gate` is asked for before each step. `steps` are the names of those that made them.
    """

    def __init__(self, gate: Callable[[str], None] = lambda name: None) -> None:
        self.turns = TurnRecord()
        self.now_s = 0.0
        self.seconds = {"chunk": 6.0, "token": 0.5}
        self.steps: list[str] = []
        self.closed: list[str] = []
        self.threads: set[int] = set()
        self.faults: dict[str, Exception] = {}
        self.pieces = 0
        self._gate = gate

    def session_stats(self) -> Stats:
        return Stats()

    def disk_stats(self) -> None:
        return None

    def save_piece(self) -> bool:
        if not self.pieces:
            return False
        self._gate("piece")
        self.pieces -= 1
        self.steps.append("piece")
        return True

    def respond(self, request: Request, *, cancelled: Callable[[], bool]) -> Generator[Event]:
        assert isinstance(request.prompt, str)
        name, chunks, tokens = request.prompt.split()
        try:
            for kind, count in (("chunk", int(chunks)), ("token", int(tokens))):
                for i in range(count):
                    if cancelled():
                        yield end("cancelled")
                        return
                    self._gate(name)
                    self.threads.add(threading.get_ident())
                    self.now_s += self.seconds[kind]
                    self.steps.append(name)
                    if name in self.faults:
                        raise self.faults[name]
                    yield (
                        Progress("prefill", i + 1, count, 0)
                        if kind == "chunk"
                        else TextDelta(str(i))
                    )
            yield end()
        finally:
            self.closed.append(name)


class Turnstile:
    """Lets the worker through step by step, once it is shut."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self.waiting = threading.Event()
        self.name = ""

    def __call__(self, name: str) -> None:
        self.name = name
        self.waiting.set()
        assert self._steps.acquire(timeout=PATIENCE_S)

    def open(self, steps: int = 1_000_000) -> None:
        self._steps.release(steps)

    def wait_for_worker(self) -> None:
        assert self.waiting.wait(PATIENCE_S)


@contextmanager
def puppet_at_work(**options: Any) -> Generator[tuple[Puppet, Worker, Turnstile]]:
    """A worker that has one job "first", and stands before its first step."""
    turnstile = Turnstile()
    puppet = Puppet(turnstile)
    with working(loading(puppet), clock=lambda: puppet.now_s, **options) as worker:
        try:
            yield puppet, worker, turnstile
        finally:
            turnstile.open()


def last(job: Job) -> JobEvent:
    return [*job.wait()][-1]


def test_events_arrive_in_order_and_one_thread_makes_them() -> None:
    puppet = Puppet()
    with working(loading(puppet)) as worker:
        jobs = [worker.submit(Request(f"{name} 2 3")) for name in "abc"]
        for job in jobs:
            events = [*job.wait()]
            assert [type(event) for event in events] == [
                *[Progress] * 2,
                *[TextDelta] * 3,
                End,
            ]
            assert job.is_done and job.take() == []
        assert worker.counts.answered == 3
        assert worker.counts.prompt_tokens == 12 and worker.counts.cached_tokens == 3
    assert len(puppet.threads) == 1 and threading.get_ident() not in puppet.threads


def test_a_short_request_waits_for_one_chunk_of_a_long_prompt() -> None:
    with puppet_at_work() as (puppet, worker, turnstile):
        long = worker.submit(Request("long 100 1"))
        turnstile.wait_for_worker()
        short = worker.submit(Request("short 1 3"))
        turnstile.open()
        assert isinstance(last(short), End)
        assert puppet.steps[: puppet.steps.index("short")] == ["long"]
        # What the short one takes is a few tokens after its chunk, in the time of one chunk more.
        end_of_short = len(puppet.steps) - puppet.steps[::-1].index("short")
        assert puppet.steps[:end_of_short].count("long") <= 3
        assert isinstance(last(long), End)


def test_jobs_at_work_get_equal_time_and_not_equal_steps() -> None:
    with puppet_at_work() as (puppet, worker, turnstile):
        decoding = worker.submit(Request("decoding 0 48"))
        turnstile.wait_for_worker()
        reading = worker.submit(Request("reading 4 1"))
        turnstile.open()
        for job in (decoding, reading):
            last(job)
    # A chunk of 6 s is worth 12 tokens of 0.5 s.
    chunks = [i for i, name in enumerate(puppet.steps) if name == "reading"][:4]
    between = [b - a - 1 for a, b in pairwise(chunks)]
    assert between == [12, 12, 12]


class Follower:
    """An engine whose jobs "second" wait until "first" has made so many steps."""

    def __init__(self, first_steps: int) -> None:
        self.turns = TurnRecord()
        self.steps: list[str] = []
        self.asked_in_vain = 0
        self.most_begun = 0
        self._begun = 0
        self._first_steps = first_steps

    def session_stats(self) -> Stats:
        return Stats()

    def disk_stats(self) -> None:
        return None

    def save_piece(self) -> bool:
        return False

    def is_due(self) -> bool:
        return self.steps.count("first") >= self._first_steps

    def respond(self, request: Request, *, cancelled: Callable[[], bool]) -> Generator[Event]:
        name = str(request.prompt)
        while name == "second" and not self.is_due():
            if cancelled():
                yield end("cancelled")
                return
            self.asked_in_vain += bool(self.steps)
            yield Progress("waiting", 0, 9, 0.0, self.is_due)
        self._begun += 1
        self.most_begun = max(self.most_begun, self._begun)
        for i in range(6):
            self.steps.append(name)
            yield Progress("prefill", i, 9, 0.0)
        self._begun -= 1
        yield end()


def test_a_job_that_waits_is_not_asked_and_gets_no_more_than_its_share_later() -> None:
    engine, go = Follower(4), threading.Event()

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> Generator[AnsweringEngine]:
        assert go.wait(PATIENCE_S)
        yield engine

    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1
        return now_s

    with working(load, clock=clock) as worker:
        jobs = [worker.submit(Request(name)) for name in ("first", "second", "third")]
        go.set()
        for job in jobs:
            assert isinstance(last(job), End)
    # The third went on by turns with the first; then all three do.
    assert engine.steps[:8].count("third") == 4 and "second" not in engine.steps[:7]
    start = engine.steps.index("second")
    assert engine.steps[start : start + 6].count("second") in (2, 3)
    assert engine.asked_in_vain <= 1


def test_jobs_that_wait_make_way_for_others() -> None:
    engine, go = Follower(6), threading.Event()

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> Generator[AnsweringEngine]:
        assert go.wait(PATIENCE_S)
        yield engine

    with working(load, max_active=2, max_queued=4) as worker:
        names = ("first", "second", "second", "second", "third", "third")
        jobs = [worker.submit(Request(name)) for name in names]
        with pytest.raises(Overloaded):
            worker.submit(Request("late"))
        go.set()
        for job in jobs:
            assert isinstance(last(job), End)
    assert engine.steps.index("third") < engine.steps.index("second")
    assert engine.most_begun == 2


def test_a_job_that_waits_is_cancelled_at_once() -> None:
    engine = Follower(10**9)
    with working(loading(engine)) as worker:
        second = worker.submit(Request("second"))
        until(lambda: second.state == "waiting")
        second.cancel()
        event = last(second)
        assert isinstance(event, End) and event.finish_reason == "cancelled"


def test_jobs_beyond_the_active_ones_wait_in_their_order() -> None:
    with puppet_at_work(max_active=1) as (puppet, worker, turnstile):
        jobs = [worker.submit(Request(f"{name} 1 1")) for name in "abc"]
        turnstile.wait_for_worker()
        assert [worker.position(job) for job in jobs] == [0, 1, 2]
        assert [job.state for job in jobs] == ["queued"] * 3
        turnstile.open(1)
        until(lambda: jobs[0].state == "prefill")
        turnstile.open()
        for job in jobs:
            last(job)
    assert puppet.steps == ["a", "a", "b", "b", "c", "c"]


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    with puppet_at_work(max_active=1, max_queued=2) as (_, worker, turnstile):
        first = worker.submit(Request("a 1 1"))
        turnstile.wait_for_worker()
        waiting = [worker.submit(Request(f"{name} 1 1")) for name in "bc"]
        with pytest.raises(Overloaded, match="2 requests are waiting already") as refused:
            worker.submit(Request("d 1 1"))
        assert refused.value.retry_after_s > 0 and worker.counts.refused == 1
        waiting[1].cancel()
        again = worker.submit(Request("e 1 1"))
        turnstile.open()
        assert all(isinstance(last(job), End) for job in (first, waiting[0], again))


def test_a_queue_of_one_is_told_of_in_the_singular() -> None:
    with puppet_at_work(max_active=1, max_queued=1) as (_, worker, turnstile):
        worker.submit(Request("a 1 1"))
        turnstile.wait_for_worker()
        worker.submit(Request("b 1 1"))
        with pytest.raises(Overloaded, match="1 request is waiting already"):
            worker.submit(Request("c 1 1"))


def test_as_many_wait_as_the_queue_holds_beside_those_that_are_answered() -> None:
    with puppet_at_work(max_active=3, max_queued=2) as (_, worker, turnstile):
        jobs = [worker.submit(Request("a 1 1"))]
        turnstile.wait_for_worker()
        # They come while the first is at its chunk: two of them need not wait.
        jobs += [worker.submit(Request(f"{name} 1 1")) for name in "bcde"]
        with pytest.raises(Overloaded):
            worker.submit(Request("f 1 1"))
        turnstile.open()
        assert all(isinstance(last(job), End) for job in jobs)


def test_the_time_that_a_job_waits_is_counted_apart_from_the_work_for_it() -> None:
    with puppet_at_work() as (_, worker, turnstile):
        job = worker.submit(Request("a 1 1"))
        turnstile.wait_for_worker()
        job.created_s -= 100
        turnstile.open()
        last(job)
    assert (worker.counts.prefill_s, worker.counts.decode_s) == (0.5, 0.25)
    assert worker.counts.waited_s >= 100 - 0.75


def test_a_queued_job_that_is_cancelled_never_starts_and_disturbs_nobody() -> None:
    with puppet_at_work(max_active=1) as (puppet, worker, turnstile):
        first = worker.submit(Request("first 2 2"))
        turnstile.wait_for_worker()
        leaving, staying = (worker.submit(Request(f"{n} 1 1")) for n in ("leaving", "staying"))
        leaving.cancel()
        failed = last(leaving)
        assert isinstance(failed, Failed) and isinstance(failed.error, Cancelled)
        turnstile.open()
        for job in (first, staying):
            event = last(job)
            assert isinstance(event, End) and event.finish_reason == "stop"
    assert "leaving" not in puppet.steps + puppet.closed


@pytest.mark.parametrize("work", ["100 1", "0 100"], ids=["prefill", "decode"])
def test_a_cancelled_job_ends_after_its_step_and_ahead_of_others(work: str) -> None:
    with puppet_at_work() as (puppet, worker, turnstile):
        leaving = worker.submit(Request(f"leaving {work}"))
        turnstile.wait_for_worker()
        worker.submit(Request("other 100 1"))
        leaving.cancel()
        turnstile.open(1)
        event = last(leaving)
        assert isinstance(event, End) and event.finish_reason == "cancelled"
        assert puppet.closed == ["leaving"] and puppet.steps == ["leaving"]
        assert worker.counts.cancelled == 1


@pytest.mark.parametrize("fault", [RuntimeError("[metal] out of memory"), BadRequest("no")])
def test_a_fault_ends_its_job_alone(fault: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with puppet_at_work() as (puppet, worker, turnstile):
        puppet.faults["broken"] = fault
        broken = worker.submit(Request("broken 3 3"))
        turnstile.wait_for_worker()
        sound = worker.submit(Request("sound 3 3"))
        turnstile.open()
        failed = last(broken)
        assert isinstance(failed, Failed) and failed.error is fault
        assert isinstance(last(sound), End)
        assert isinstance(last(worker.submit(Request("later 1 1"))), End)
        assert worker.counts.failed == 1 and worker.state == "ready"
    assert puppet.closed == ["broken", "sound", "later"]
    # What a client did wrong is no news for the log.
    assert ("out of memory" in caplog.text) == (not isinstance(fault, BadRequest))


def test_what_waits_to_be_saved_goes_piece_by_piece_while_nobody_asks() -> None:
    with puppet_at_work() as (puppet, worker, turnstile):
        first = worker.submit(Request("first 1 1"))
        turnstile.wait_for_worker()
        puppet.pieces = 3
        turnstile.open(2)
        # Nobody saves before the end of the answer is out.
        assert isinstance(last(first), End)
        until(lambda: turnstile.name == "piece")
        second = worker.submit(Request("second 1 1"))
        turnstile.open()
        assert isinstance(last(second), End)
        until(lambda: not puppet.pieces)
    assert puppet.steps == ["first", "first", "piece", "second", "second", "piece", "piece"]


def test_a_fault_is_logged_without_what_it_quotes(caplog: pytest.LogCaptureFixture) -> None:
    puppet = Puppet()
    puppet.faults["x"] = KeyError("words of a prompt")
    with working(loading(puppet)) as worker:
        last(worker.submit(Request("x 1 1")))
    assert "KeyError" in caplog.text and "test_worker.py" in caplog.text
    assert "words of a prompt" not in caplog.text


def test_the_end_reaches_every_job_at_once_and_closes_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "mlx_engine.worker")
    left: list[bool] = []

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> Generator[AnsweringEngine]:
        try:
            yield puppet
        finally:
            left.append(threading.current_thread() is threading.main_thread())

    turnstile = Turnstile()
    puppet = Puppet(turnstile)
    with working(load, max_active=1) as worker:
        jobs = [worker.submit(Request(f"{name} 5 5")) for name in "ab"]
        turnstile.wait_for_worker()
        worker.stop()
        # The step that is under way has not returned.
        for job in jobs:
            event = last(job)
            assert isinstance(event, Failed) and isinstance(event.error, Stopped)
        with pytest.raises(Stopped):
            worker.submit(Request("c 1 1"))
        turnstile.open()
    assert left == [False] and puppet.closed == ["a"] and worker.state == "stopped"
    # Nothing follows the end, whatever the step under way came to.
    assert puppet.steps == ["a"] and all(job.take() == [] for job in jobs)
    # It is accounted for like any other that was cancelled; the other one never began.
    assert worker.counts.cancelled == 1
    (line,) = caplog.messages
    assert line.startswith("prompt 4 tokens") and line.endswith("; cancelled")


def test_jobs_may_come_before_the_model_is_loaded() -> None:
    go = threading.Event()
    states: list[str] = []

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> Generator[AnsweringEngine]:
        on_progress(10, 20)
        assert go.wait(PATIENCE_S)
        yield Puppet()

    with working(load, on_state=lambda: states.append(worker.state)) as worker:
        job = worker.submit(Request("a 1 1"))
        until(lambda: worker.load_bytes == (10, 20))
        assert worker.state == "loading" and worker.engine is None and job.state == "queued"
        go.set()
        assert isinstance(last(job), End)
        assert worker.engine is not None
    assert states == ["ready", "stopped"]


def test_a_model_that_cannot_be_loaded_fails_every_job() -> None:
    go = threading.Event()

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> Generator[AnsweringEngine]:
        assert go.wait(PATIENCE_S)
        raise ModelFileError("shard 3 is damaged")
        yield Puppet()

    with working(load) as worker:
        job = worker.submit(Request("a 1 1"))
        go.set()
        event = last(job)
        assert isinstance(event, Failed) and isinstance(event.error, Stopped)
        until(lambda: worker.state == "failed")
        assert isinstance(worker.error, ModelFileError)
        assert str(event.error).startswith("the model could not be loaded")
        with pytest.raises(Stopped, match="could not be loaded"):
            worker.submit(Request("b 1 1"))


def test_an_engine_that_fails_later_is_not_said_to_be_unloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def advance(self: Worker, active: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Worker, "_advance", advance)
    with working(loading(Puppet())) as worker:
        event = last(worker.submit(Request("a 1 1")))
        assert isinstance(event, Failed) and str(event.error).startswith("the engine has failed")
        until(lambda: worker.state == "failed")
        assert isinstance(worker.error, RuntimeError)
        with pytest.raises(Stopped, match="the engine has failed"):
            worker.submit(Request("b 1 1"))


def test_a_load_ends_when_the_worker_stops() -> None:
    is_loading = threading.Event()

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> Generator[AnsweringEngine]:
        while True:
            on_progress(1, 2)
            is_loading.set()
        yield Puppet()

    with working(load) as worker:
        assert is_loading.wait(PATIENCE_S)
    assert worker.state == "stopped" and worker.error is None


def test_the_course_of_an_answer_is_told_without_waking_anybody() -> None:
    job, woken = Job(Request("a"), lambda job: None), 0

    def wake() -> None:
        nonlocal woken
        woken += 1

    job.wake = wake
    job.put(Progress("prefill", 0, 100, 0.0))
    assert job.cached_tokens is None
    job.put(Progress("waiting", 0, 100, 0.0))
    assert job.state == "waiting" and job.cached_tokens is None
    job.put(Progress("prefill", 40, 100, 0.0))
    assert job.state == "prefill" and job.cached_tokens == 40
    before = woken
    for i in range(5):
        job.put(Progress("decode", i + 1, 50, 2.0 + i / 10))
    assert job.state == "decode" and woken == before and len(job.take()) == 3
    assert job.completion_tokens == 5
    assert job.decode_tokens_per_s == pytest.approx(10)


def test_the_course_of_a_prefill_tells_its_speed_and_what_is_left() -> None:
    job = Job(Request("a"), lambda job: None)
    job.put(Progress("prefill", 0, 100, 0.0))
    assert job.prefill_tokens_per_s == 0 and job.prefill_left_s is None
    # Of these nothing was computed.
    job.put(Progress("prefill", 20, 100, 1.0))
    assert job.prefill_left_s is None
    job.put(Progress("prefill", 60, 100, 3.0))
    assert job.prefill_tokens_per_s == 20 and job.prefill_left_s == 2
    # Others had the engine as long as this one, and may have it so again.
    job.put(Progress("prefill", 80, 100, 6.0, waited_s=2.0))
    assert job.prefill_tokens_per_s == 20
    assert job.prefill_left_s == pytest.approx(20 / (60 / 5))


def test_a_long_prefill_is_told_of_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mlx_engine.worker._LOG_S", 0)
    with caplog.at_level("INFO"), working(loading(Puppet())) as worker:
        last(worker.submit(Request("secret 3 1")))
    *lines, end_line = [r.message for r in caplog.records if r.name == "mlx_engine.worker"]
    assert end_line.startswith("prompt 4 tokens (1 cached)") and end_line.endswith("; stop")
    assert [line.partition(",")[0] for line in lines] == [
        f"a prompt: {done} of 3 tokens read" for done in (1, 2, 3)
    ]
    assert "secret" not in caplog.text
