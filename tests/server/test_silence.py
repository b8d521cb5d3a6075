"""No client waits in silence: signs of life in the queue and in the prefill, streamed or not."""

import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mlx_engine.errors import DeviceError
from mlx_engine.server.sse import KEEP_ALIVE_S, WHOLE_SILENCE_S
from tests.scripted_engine import Answer, Course, ScriptedEngine
from tests.server.support import PATIENCE_S, Server, on_port, serving, until

Object = dict[str, Any]

QUESTION = [{"role": "user", "content": "y" * 4_000}]
BODIES: dict[str, Object] = {
    "/v1/messages": {"messages": QUESTION, "max_tokens": 9},
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/responses": {"input": QUESTION},
    "/v1/completions": {"prompt": "y" * 4_000},
}
COMMENT = ": the answer is being computed\n\n"
SIGNS = {
    "/v1/messages": "event: ping\n",
    "/v1/chat/completions": COMMENT,
    # Codex counts events alone.
    "/v1/responses": "event: response.in_progress\n",
    "/v1/completions": COMMENT,
}
ENDS = {
    "/v1/messages": 'data: {"type":"message_stop"}\n\n',
    "/v1/chat/completions": "data: [DONE]\n\n",
    "/v1/responses": "}\n\n",
    "/v1/completions": "data: [DONE]\n\n",
}


@contextmanager
def reading(
    *answers: Answer, is_still: bool = False, **options: Any
) -> Generator[tuple[Server, str, threading.Event]]:
    """A server that reads a prompt until the event is set: still, or by a chunk now and then."""
    go = threading.Event()

    def step(course: Course) -> None:
        if not go.is_set():
            go.wait(PATIENCE_S if is_still else 0.001)

    engine = ScriptedEngine(*answers, chunk_tokens=1, before_step=step)
    with serving(engine, **options) as server, on_port(server.app) as address:
        try:
            yield server, address, go
        finally:
            go.set()


@contextmanager
def asking(address: str, path: str, **body: Any) -> Generator[httpx.Response]:
    """An answer that is read as it comes."""
    body = BODIES[path] | body
    with httpx.stream(
        "POST", address + path, json=body, timeout=PATIENCE_S, verify=False
    ) as response:
        yield response


@pytest.mark.parametrize("is_still", [True, False], ids=["still", "progress"])
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_is_never_silent(path: str, is_still: bool) -> None:
    with (
        reading("</think>Hi", is_still=is_still, keep_alive_s=0.05) as (_, address, go),
        asking(address, path, stream=True) as response,
    ):
        pieces = response.iter_text()
        said = "".join(next(pieces) for _ in range(12))
        # Nothing of the answer yet: all of these were signs of life.
        assert said.count(SIGNS[path]) >= 10
        assert "delta" not in said.replace('"delta":{"role"', "")
        go.set()
        assert "".join(pieces).endswith(ENDS[path])


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_shows_that_it_is_on_its_way(path: str) -> None:
    with serving(ScriptedEngine("</think>Hi")) as server:
        quick = server.ask("POST", path, json=BODIES[path])
        assert int(quick.headers["content-length"]) == len(quick.content)
    waiting: Object = {"whole_silence_s": 0.05, "keep_alive_s": 0.01}
    with reading("</think>Hi", **waiting) as (_, address, go), asking(address, path) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        pieces = response.iter_raw()
        assert b"".join(next(pieces) for _ in range(5)).isspace()
        go.set()
        answer = json.loads(b"".join(pieces))
    changing = {"id", "created", "created_at", "output", "content", "usage"}
    assert set(answer) == set(quick.json())
    assert all(answer[key] == quick.json()[key] for key in set(answer) - changing)


@pytest.mark.parametrize("path", BODIES)
def test_an_error_that_comes_late_looks_like_no_answer(path: str) -> None:
    waiting: Object = {"whole_silence_s": 0.01, "keep_alive_s": 0.01}
    fault = DeviceError("the device is lost: start the server again")
    with (
        reading(fault, "</think>Hi", **waiting) as (server, address, go),
        asking(address, path) as response,
    ):
        pieces = response.iter_raw()
        said = next(pieces)
        go.set()
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            for piece in pieces:
                said += piece
        assert json.loads(said)["error"]["message"] == str(fault)
        assert response.headers["request-id"]
        assert server.ask("POST", path, json=BODIES[path]).status_code == 200


def test_an_error_that_comes_early_has_its_status() -> None:
    fault = DeviceError("the device is lost: start the server again")
    with serving(ScriptedEngine(fault)) as server:
        for path, body in BODIES.items():
            response = server.ask("POST", path, json=body)
            assert response.status_code == 500
            assert response.json()["error"]["message"] == str(fault)


@pytest.mark.parametrize("whole_silence_s", [0.01, 30.0])
def test_the_end_of_the_server_ends_a_whole_answer(whole_silence_s: float) -> None:
    with reading("</think>Hi", is_still=True, whole_silence_s=whole_silence_s) as (
        server,
        address,
        go,
    ):
        answers: list[httpx.Response | Exception] = []

        def ask() -> None:
            url = f"{address}/v1/messages"
            try:
                answers.append(httpx.post(url, json=BODIES["/v1/messages"], verify=False))
            except httpx.HTTPError as error:
                answers.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: bool(server.engine.courses))
        time.sleep(0.1 if whole_silence_s < 1 else 0)
        server.worker.stop()
        thread.join(PATIENCE_S)
        go.set()
    (answer,) = answers
    if whole_silence_s < 1:
        assert isinstance(answer, httpx.RemoteProtocolError)
    else:
        assert isinstance(answer, httpx.Response) and answer.status_code == 503
        assert answer.json()["error"]["type"] == "overloaded_error"


def test_clients_do_not_wait_that_long() -> None:
    """What is known of clients: a sign every ten seconds keeps them, Node's fetch waits 300 s."""
    assert 0 < KEEP_ALIVE_S <= 10 and KEEP_ALIVE_S <= WHOLE_SILENCE_S < 60
