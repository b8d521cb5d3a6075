"""The application: probes, models, loading, overload, faults, and the end."""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Generator
from typing import Any

import httpx
import pytest

from mlx_engine.server.security import Access
from mlx_engine.worker import AnsweringEngine
from tests.scripted_engine import ScriptedEngine
from tests.server.support import (
    PATIENCE_S,
    Server,
    messages_body,
    on_port,
    sent_events,
    serving,
    until,
)


@contextlib.contextmanager
def busy(**options: Any) -> Generator[tuple[Server, str, threading.Event]]:
    """A server on a port, whose engine stands before each step until the event is set."""
    go = threading.Event()
    engine = ScriptedEngine(
        "</think>Hello", before_step=lambda course: _assert(go.wait(PATIENCE_S))
    )
    with serving(engine, **options) as server, on_port(server.app) as address:
        try:
            yield server, address, go
        finally:
            go.set()


def _assert(fact: bool) -> None:
    assert fact


def two_streams(
    server: Server, url: str, body: dict[str, Any], streams: contextlib.ExitStack
) -> list[httpx.Response]:
    """Two open answers: the engine is at the first, the second waits."""
    responses: list[httpx.Response] = []
    for _ in range(2):
        stream = httpx.stream("POST", url, json=body, timeout=30, verify=False)
        responses.append(streams.enter_context(stream))
        until(lambda: bool(server.engine.courses))
    return responses


def test_probes_and_models() -> None:
    with serving(ScriptedEngine(), access=Access(api_key=None)) as server:
        assert server.ask("HEAD", "/").status_code == 200
        assert server.ask("HEAD", "/api/hello").status_code == 200
        assert server.ask("GET", "/api/hello").json() == {"status": "ok"}
        models = server.ask("GET", "/v1/models?limit=1000").json()
        (model,) = models["data"]
        # Both protocols' fields, and no name that is taken for one of Anthropic's.
        assert model["type"] == model["object"] == "model" and models["object"] == "list"
        assert not model["id"].startswith("claude-") and models["first_id"] == model["id"]
        assert not models["has_more"]
        for id in ("ds41", "claude-opus-4-6", "org/name"):
            assert server.ask("GET", f"/v1/models/{id}").json() == model


def test_what_can_be_read_can_be_asked_about() -> None:
    """HEAD is answered as GET is, and who asks otherwise is told what there is."""
    with serving(ScriptedEngine()) as server:
        for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/any", "/api/hello"):
            answers = [server.ask(method, path) for method in ("GET", "HEAD")]
            assert len({answer.headers["content-type"] for answer in answers}) == 1
            assert [answer.status_code for answer in answers] == [200, 200]
        wrong = server.ask("DELETE", "/v1/models")
        assert wrong.status_code == 405 and "GET" in wrong.headers["allow"]
        wrong = server.ask("GET", "/v1/messages")
        assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"


def test_any_model_is_served_and_the_answer_names_ours() -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        for model in ("claude-haiku-4-5", "gpt-5", "", None):
            assert server.message(model=model)["model"] == "ds41"


def test_every_answer_has_an_id_of_its_own() -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        answers = [
            server.ask("GET", "/health"),
            server.ask("GET", "/nothing"),
            server.ask("POST", "/v1/messages", json=messages_body(stream=True)),
            server.ask("POST", "/v1/messages", content="no JSON"),
        ]
        ids = [answer.headers["request-id"] for answer in answers]
        assert len(set(ids)) == 4 and all(id.startswith("req_") for id in ids)
        assert ids == [answer.headers["x-request-id"] for answer in answers]
        assert answers[3].json()["request_id"] == ids[3]


def test_errors_have_the_form_of_the_path() -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        nothing = server.ask("GET", "/nothing")
        assert nothing.status_code == 404
        assert nothing.json()["error"]["type"] == "not_found_error"
        assert "type" not in nothing.json()
        other = server.ask("GET", "/v1/messages")
        assert other.status_code == 405 and other.json()["type"] == "error"
        deep = server.ask("POST", "/v1/messages/batches", json={})
        assert deep.status_code == 404 and deep.json()["type"] == "error"


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_a_bad_request(number: str) -> None:
    body = f'{{"model": "ds41", "input": "Hello", "temperature": {number}}}'
    with serving(ScriptedEngine("</think>Hello")) as server:
        answer = server.ask("POST", "/v1/responses", content=body)
    assert answer.status_code == 400 and "not JSON" in answer.json()["error"]["message"]


def test_the_port_answers_while_the_model_loads() -> None:
    go = threading.Event()
    engine = ScriptedEngine("</think>Hello")

    @contextlib.contextmanager
    def load(on_progress: Callable[[int, int], None]) -> Generator[AnsweringEngine]:
        on_progress(3, 10)
        assert go.wait(PATIENCE_S)
        yield engine

    with serving(engine, load=load) as server, on_port(server.app) as address:
        until(lambda: server.worker.load_bytes == (3, 10))
        health = httpx.get(f"{address}/health", verify=False)
        assert health.status_code == 503
        assert health.json() == {"status": "loading", "loaded_bytes": 3, "total_bytes": 10}
        body = messages_body()
        count = httpx.post(f"{address}/v1/messages/count_tokens", json=body, verify=False)
        assert count.status_code == 200
        # A request waits for the model instead of being sent away.
        url = f"{address}/v1/messages"
        with httpx.stream(
            "POST", url, json=body | {"stream": True}, timeout=30, verify=False
        ) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: message_start"
            go.set()
            assert "event: message_stop" in [*lines]
        assert httpx.get(f"{address}/health", verify=False).json() == {"status": "ready"}


def test_a_full_queue_answers_529_and_when_to_come_back() -> None:
    with busy(max_active=1, max_queued=1) as (server, address, go):
        url, body = f"{address}/v1/messages", messages_body(stream=True)
        with contextlib.ExitStack() as streams:
            first, second = two_streams(server, url, body, streams)
            refused = httpx.post(url, json=body, timeout=30, verify=False)
            assert refused.status_code == 529
            assert refused.json()["error"]["type"] == "overloaded_error"
            assert int(refused.headers["retry-after"]) in range(1, 61)
            assert "jobs_waiting 1" in httpx.get(f"{address}/metrics", verify=False).text
            go.set()
            for response in (first, second):
                assert sent_events(response.read().decode())[-1]["type"] == "message_stop"
        assert server.worker.counts.refused == 1


def test_the_log_says_where_in_the_queue_a_request_waits(caplog: pytest.LogCaptureFixture) -> None:
    with busy(max_active=1) as (server, address, _), caplog.at_level("INFO"):
        url, body = f"{address}/v1/messages", messages_body(stream=True)
        with contextlib.ExitStack() as streams:
            for response in two_streams(server, url, body, streams):
                assert response.status_code == 200
            streams.enter_context(httpx.stream("POST", url, json=body, timeout=30, verify=False))
            ids = [job.id for job in server.worker.jobs()]
    told = re.findall(r"(\S+) waits, as (\d)\. in the queue", caplog.text)
    assert told == [(ids[1], "1"), (ids[2], "2")]


def test_counting_goes_on_beside_an_answer() -> None:
    with busy() as (server, address, go):
        url, body = f"{address}/v1/messages", messages_body(stream=True)
        with httpx.stream("POST", url, json=body, timeout=30, verify=False) as response:
            until(lambda: bool(server.engine.courses))
            counted = httpx.post(f"{url}/count_tokens", json=body, timeout=30, verify=False).json()
            go.set()
            *_, delta, _ = sent_events(response.read().decode())
        usage = delta["usage"]
        parts = [count for name, count in usage.items() if name.endswith("input_tokens")]
        assert len(parts) == 3 and counted["input_tokens"] == sum(parts)


def test_a_silent_engine_does_not_make_a_silent_stream() -> None:
    with busy(keep_alive_s=0.01) as (_, address, go):
        url, body = f"{address}/v1/messages", messages_body(stream=True)
        with httpx.stream("POST", url, json=body, timeout=30, verify=False) as response:
            lines = response.iter_lines()
            names = [next(lines) for _ in range(3 * 20)][::3]
            assert names == ["event: message_start"] + ["event: ping"] * 19
            go.set()
            assert "event: message_stop" in [*lines]


def test_the_end_of_the_server_ends_open_streams_with_an_error() -> None:
    with busy(max_active=1) as (server, address, go):
        url, body = f"{address}/v1/messages", messages_body(stream=True)
        with (
            httpx.stream("POST", url, json=body, timeout=30, verify=False) as working,
            httpx.stream("POST", url, json=body, timeout=30, verify=False) as waiting,
        ):
            until(lambda: bool(server.engine.courses))
            server.worker.stop()
            for response in (working, waiting):
                last = sent_events(response.read().decode())[-1]
                assert last["type"] == "error"
                assert last["error"]["type"] == "overloaded_error"
                assert last["request_id"] == response.headers["request-id"]
        refused = httpx.post(url, json=body, timeout=30, verify=False)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        go.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_our_own_in_the_middle_is_no_answer(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise KeyError("words of an answer")

    with serving(ScriptedEngine("</think>Hello")) as server, on_port(server.app) as address:
        monkeypatch.setattr("mlx_engine.server.messages_out.MessageEvents._begin", broken)
        url, body = f"{address}/v1/messages", messages_body(stream=stream)
        with httpx.stream("POST", url, json=body, timeout=30, verify=False) as response:
            text = ""
            with contextlib.suppress(httpx.RemoteProtocolError):
                for piece in response.iter_text():
                    text += piece
        assert response.status_code == (200 if stream else 500)
        last = sent_events(text)[-1] if stream else json.loads(text)
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        until(lambda: "KeyError" in caplog.text)
        assert "words" not in text + caplog.text
        monkeypatch.undo()
        assert server.message()["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("path", "prompt", "code"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "error"),
        ("/v1/completions", {"prompt": "Hi"}, "error"),
        ("/v1/responses", {"input": "Hi"}, "response.failed"),
    ],
)
def test_clients_are_told_to_come_back(path: str, prompt: dict[str, Any], code: str) -> None:
    with busy(max_active=1, max_queued=1) as (server, address, go):
        url, body = f"{address}{path}", prompt | {"stream": True}
        with contextlib.ExitStack() as streams:
            working, waiting = two_streams(server, url, body, streams)
            full = httpx.post(url, json=body, timeout=30, verify=False)
            assert full.status_code == 429 and int(full.headers["retry-after"]) in range(1, 61)
            assert full.json()["error"]["code"] == "rate_limit_exceeded"
            server.worker.stop()
            for response in (working, waiting):
                last = response.read().decode().strip().split("\n\n")[-1]
                assert code in last and "server_is_overloaded" in last
        ended = httpx.post(url, json=body, timeout=30, verify=False)
        assert ended.status_code == 503
        assert ended.json()["error"]["code"] == "server_is_overloaded"
        go.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_our_own_is_an_answer_and_not_the_end(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise KeyError("words of a prompt")

    with serving(ScriptedEngine("</think>Hello")) as server:
        monkeypatch.setattr("mlx_engine.server.messages_in.read", broken)
        response = server.ask("POST", "/v1/messages", json=messages_body(stream=stream))
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "api_error"
        assert "words" not in response.text + caplog.text and "KeyError" in caplog.text
        monkeypatch.undo()
        assert server.message()["stop_reason"] == "end_turn"
