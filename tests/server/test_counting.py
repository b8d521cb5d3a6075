"""A prompt that takes long to count: the answer begins, and what is refused is told in it."""

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mlx_engine.prompt import Bounds, Prompt
from mlx_engine.request import Request
from mlx_engine.server.service import COUNT_S
from tests.scripted_engine import ScriptedEngine
from tests.server.support import PATIENCE_S, Server, on_port, sent_events, serving, until
from tests.server.test_silence import BODIES, ENDS, SIGNS, asking

encode = Request.encode


@contextmanager
def counting(
    monkeypatch: pytest.MonkeyPatch,
    then: Callable[[], None] = lambda: None,
    **options: Any,
) -> Generator[tuple[Server, str, threading.Event]]:
    """A server that counts the tokens of no prompt until the event is set; `then` may raise."""
    go = threading.Event()

    def slow(request: Request, tokenizer: Any, turns: Any, bounds: Bounds | None = None) -> Prompt:
        if bounds is not None and not go.is_set():
            assert go.wait(PATIENCE_S)
            then()
        return encode(request, tokenizer, turns, bounds)

    monkeypatch.setattr(Request, "encode", slow)
    engine = ScriptedEngine("</think>Hi", context_tokens=options.pop("context_tokens", 100_000))
    with (
        serving(engine, count_s=0.01, keep_alive_s=0.02, **options) as server,
        on_port(server.app) as address,
    ):
        try:
            yield server, address, go
        finally:
            go.set()


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_before_its_prompt_is_counted(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        counting(monkeypatch) as (server, address, go),
        asking(address, path, stream=True) as response,
    ):
        pieces = response.iter_text()
        said = ""
        while said.count(SIGNS[path]) < 5:
            said += next(pieces)
        assert server.engine.courses == [] and server.worker.jobs() == []
        go.set()
        said += "".join(pieces)
        assert said.endswith(ENDS[path])
    if path == "/v1/messages":
        start, *_, delta, _ = sent_events(said)
        assert start["message"]["usage"]["input_tokens"] == 0
        usage = delta["usage"]
        n = len(server.engine.courses[0].call.token_ids)
        assert usage["input_tokens"] + usage["cache_creation_input_tokens"] == n


@pytest.mark.parametrize("path", BODIES)
def test_too_long_a_prompt_is_told_in_the_stream(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counting(monkeypatch, context_tokens=3000) as (server, address, go):
        with asking(address, path, stream=True) as response:
            pieces = response.iter_text()
            said = next(pieces)
            go.set()
            said += "".join(pieces)
        assert server.engine.courses == []
    last = said.strip().split("\n\n")[-1]
    assert "prompt is too long: " in last and " tokens > 2999 maximum" in last
    kind = {"/v1/messages": "event: error", "/v1/responses": "event: response.failed"}
    assert last.startswith(kind.get(path, 'data: {"error"'))


@pytest.mark.parametrize("path", BODIES)
def test_too_long_a_prompt_has_its_status_where_nothing_was_sent(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counting(monkeypatch, context_tokens=3000) as (_, address, go):
        threading.Timer(0.1, go.set).start()
        response = httpx.post(address + path, json=BODIES[path], timeout=30, verify=False)
        assert response.status_code == 400
        assert "prompt is too long: " in response.json()["error"]["message"]


def test_a_queue_that_has_filled_meanwhile_is_told_in_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with counting(monkeypatch, max_queued=1) as (server, address, go):
        with asking(address, "/v1/messages", stream=True) as response:
            pieces = response.iter_text()
            said = next(pieces)
            monkeypatch.setattr(server.worker, "_max_queued", 0)
            go.set()
            said += "".join(pieces)
    assert sent_events(said)[-1]["error"]["type"] == "overloaded_error"


def test_a_fault_of_our_own_is_logged_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise KeyError("words of a prompt")

    with counting(monkeypatch, fail) as (server, address, go):
        with asking(address, "/v1/messages", stream=True) as response:
            pieces = response.iter_text()
            said = next(pieces)
            go.set()
            with pytest.raises(httpx.RemoteProtocolError):
                for piece in pieces:
                    said += piece
        assert sent_events(said)[-1]["error"]["type"] == "api_error"
        until(lambda: "KeyError" in caplog.text)
        assert "words" not in said + caplog.text
        body = json.dumps(BODIES["/v1/messages"])
        assert server.ask("POST", "/v1/messages", content=body).status_code == 200


def test_nobody_waits_for_a_count_longer_than_a_second() -> None:
    assert COUNT_S < 1
