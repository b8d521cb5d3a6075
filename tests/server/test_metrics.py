"""What Prometheus reads: counts, gauges, and that nobody waits for them."""

import dataclasses
import threading
import time
from typing import Any, cast

import httpx
import pytest

from mlx_engine.diskcache.cache import CacheStats
from mlx_engine.job import JobState
from mlx_engine.live import Stats
from tests.scripted_engine import Course, ScriptedEngine
from tests.server.support import PATIENCE_S, messages_body, on_port, serving, until


def metrics(text: str) -> dict[str, float]:
    """The values of an exposition, each with a help text and a type of its own."""
    values: dict[str, float] = {}
    described: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            described.append(line.split(" ", 3)[2])
            continue
        name, value = line.rsplit(" ", 1)
        assert name not in values and name.split("{")[0] == described[-1]
        values[name] = float(value)
    assert described[::2] == described[1::2] and len(set(described)) == len(described) // 2
    return values


def test_metrics_count_what_was_done() -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        usages = [server.message()["usage"] for _ in range(2)]
        values = metrics(server.ask("GET", "/metrics").text)
    assert values['ds41_requests_total{outcome="answered"}'] == 2
    assert values["ds41_ready"] == 1 and values["ds41_jobs_active"] == 0
    cached = sum(usage["cache_read_input_tokens"] for usage in usages)
    assert values["ds41_cached_tokens_total"] == cached > 0
    assert values["ds41_completion_tokens_total"] == sum(u["output_tokens"] for u in usages)


def test_metrics_of_sessions_and_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(10, 100))
    disk = {f.name: next(counts) for f in dataclasses.fields(CacheStats)}
    sessions = {f.name: next(counts) for f in dataclasses.fields(Stats)}
    engine = ScriptedEngine()
    monkeypatch.setattr(engine, "disk_stats", lambda: CacheStats(**cast(Any, disk)))
    monkeypatch.setattr(engine, "session_stats", lambda: Stats(**sessions))
    with serving(engine) as server:
        until(lambda: server.worker.state == "ready")
        values = metrics(server.ask("GET", "/metrics").text)
    assert values["ds41_disk_cache_bytes"] == disk["total_bytes"]
    assert values['ds41_disk_cache_lookups_total{result="miss"}'] == disk["misses"]
    assert values['ds41_prompts_total{source="forked"}'] == sessions["forked"]
    n_bytes = sessions["state_bytes"] + sessions["checkpoint_bytes"]
    assert values["ds41_session_bytes"] == n_bytes


def test_metrics_tell_how_far_the_prompts_are() -> None:
    go = threading.Event()

    def stop_in_the_middle(course: Course) -> None:
        if course.chunks_done == 3:
            assert go.wait(PATIENCE_S)
        time.sleep(0.002)

    engine = ScriptedEngine("</think>Hello", before_step=stop_in_the_middle, chunk_tokens=16)
    with serving(engine) as server, on_port(server.app) as address:
        url, body = f"{address}/v1/messages", messages_body(stream=True)
        try:
            with httpx.stream("POST", url, json=body, timeout=30, verify=False) as response:
                (job,) = server.worker.jobs()
                until(lambda: job.progress is not None and job.progress.done_tokens == 48)
                values = metrics(server.ask("GET", "/metrics").text)
                n = len(engine.courses[0].call.token_ids)
                assert values["ds41_jobs_active"] == 1
                left = values["ds41_prefill_tokens_left"]
                assert left == n - 48
                rate = values["ds41_prefill_tokens_per_second"]
                assert values["ds41_prefill_left_seconds"] == pytest.approx(left / rate, abs=0.001)
                go.set()
                response.read()
        finally:
            go.set()
        values = metrics(server.ask("GET", "/metrics").text)
        assert values["ds41_prefill_tokens_left"] == values["ds41_prefill_left_seconds"] == 0


def test_a_request_that_waits_for_another_is_not_at_work() -> None:
    go = threading.Event()

    def wait(course: Course) -> None:
        assert go.wait(PATIENCE_S)

    engine = ScriptedEngine("</think>Hello", before_step=wait)
    with serving(engine) as server, on_port(server.app) as address:
        url, body = f"{address}/v1/messages", messages_body(stream=True)
        try:
            with httpx.stream("POST", url, json=body, timeout=30, verify=False) as response:
                until(lambda: bool(engine.courses))
                (job,) = server.worker.jobs()
                states: dict[JobState, str] = {"waiting": "held", "prefill": "active"}
                for state, counted in states.items():
                    job.state = state
                    values = metrics(server.ask("GET", "/metrics").text)
                    kinds = {name: values[f"ds41_jobs_{name}"] for name in ("held", "active")}
                    assert kinds == {"held": 0, "active": 0} | {counted: 1}
                go.set()
                response.read()
        finally:
            go.set()


def test_nobody_waits_for_the_engine_to_tell_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go = threading.Event(), threading.Event()
    engine = ScriptedEngine()
    stats = engine.session_stats()

    def slow() -> Stats:
        asked.set()
        assert go.wait(PATIENCE_S)
        return stats

    monkeypatch.setattr(engine, "session_stats", slow)
    with serving(engine) as server, on_port(server.app) as address:
        until(lambda: server.worker.state == "ready")
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.get(f"{address}/metrics", timeout=PATIENCE_S, verify=False))

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            assert asked.wait(PATIENCE_S)
            assert httpx.get(f"{address}/health", verify=False).status_code == 200
            assert not answers
        finally:
            go.set()
            thread.join(PATIENCE_S)
    assert answers[0].status_code == 200
