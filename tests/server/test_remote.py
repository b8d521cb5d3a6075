"""A running server as an engine: the same events as those of an engine in the program."""

import json
import socket
import threading
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
from starlette.responses import Response
from typer.testing import CliRunner

from mlx_engine.answer import ReasoningDelta, TextDelta
from mlx_engine.cli.main import app
from mlx_engine.cli.remote import RemoteEngine
from mlx_engine.errors import BadRequest, EngineError
from mlx_engine.prompt import Message
from mlx_engine.respond import End, Event, Progress, Request
from mlx_engine.sampling import Sampling
from mlx_engine.server.security import Access
from tests.scripted_engine import Course, ScriptedEngine
from tests.server.support import PATIENCE_S, on_port, serving, until

KEY = "a key of ours"
SAID = "why\nthen</think>\n\nso\U0001f600, it is"
PLAIN = Request([Message("user", "Hi")], sampling=Sampling(0.5, 0.9, min_p=0.1, top_k=7, seed=3))


def said(events: Sequence[Event]) -> dict[str, Any]:
    """What was answered, and all but the clock's part of its end."""
    end = events[-1]
    assert isinstance(end, End)
    assert end.reasoning == "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    assert end.text == "".join(e.text for e in events if isinstance(e, TextDelta))
    names = {f.name for f in fields(End)} - {"timings", "reasoning_tokens"}
    return {name: getattr(end, name) for name in names}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"system": "Be brief."},
        {"effort": "off"},
        {"effort": "max"},
        {"max_tokens": 12},
    ],
)
def test_a_server_answers_as_its_engine_does(options: dict[str, Any]) -> None:
    request = Request([Message("user", "Hi")], **options)
    here = [*ScriptedEngine(SAID).respond(request)]
    with serving(ScriptedEngine(SAID)) as server, on_port(server.app) as address:
        there = [*RemoteEngine(address, None).respond(request)]
        (course,) = server.engine.courses
    assert said(there) == said(here)
    engine = ScriptedEngine(SAID)
    list(engine.respond(request))
    assert course.call == engine.courses[0].call


def test_sampling_and_the_key_reach_the_server() -> None:
    access = Access(api_key=KEY)
    with serving(ScriptedEngine(SAID), access=access) as server, on_port(server.app) as address:
        list(RemoteEngine(f"{address}/", KEY).respond(PLAIN))
        assert server.engine.courses[0].call.sampling == PLAIN.sampling
        with pytest.raises(BadRequest, match="the key is missing or wrong"):
            RemoteEngine(address, "another")


def test_a_conversation_goes_on_from_the_answers_own_tokens() -> None:
    with serving(ScriptedEngine("so\U0001f600, it is")) as server, on_port(server.app) as address:
        command = ["chat", "--url", address, "--system", "Be brief.", "--no-thinking"]
        run = CliRunner().invoke(app, command, input="Hi\nHo\n/new\nHi\n")
        assert run.exit_code == 0, run.output
        first, second, third = server.engine.courses
    assert run.stdout == "so\U0001f600, it is\n" * 3
    assert second.cached_tokens == len(first.call.token_ids) + len(first.said)
    assert third.call.token_ids == first.call.token_ids
    assert f"({second.cached_tokens} cached)" in run.stderr


def test_the_prefill_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_engine.cli.remote._STATUS_S", 0.0)
    go = threading.Event()

    def wait(course: Course) -> None:
        if course.chunks_done == 2:
            assert go.wait(PATIENCE_S)

    engine = ScriptedEngine(SAID, chunk_tokens=16, before_step=wait)
    with serving(engine) as server, on_port(server.app) as address:
        seen: list[Progress] = []
        for event in RemoteEngine(address, None).respond(PLAIN):
            if isinstance(event, Progress):
                seen.append(event)
                if event.done_tokens == 32:
                    go.set()
    assert seen[-1].total_tokens == len(engine.courses[0].call.token_ids)
    assert sorted(e.done_tokens for e in seen) == [e.done_tokens for e in seen]


def test_a_place_in_the_queue_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_engine.cli.remote._STATUS_S", 0.0)
    go = threading.Event()

    def wait(course: Course) -> None:
        assert go.wait(PATIENCE_S)

    engine = ScriptedEngine(SAID, before_step=wait)
    with serving(engine, max_active=1) as server, on_port(server.app) as address:
        first = RemoteEngine(address, None).respond(PLAIN)
        next(first)
        until(lambda: len(engine.courses) == 1)
        stages: list[str] = []
        for event in RemoteEngine(address, None).respond(PLAIN):
            if isinstance(event, Progress):
                stages.append(event.stage)
                go.set()
        assert stages[0] == "waiting"
        assert said([*first])["text"] == "so\U0001f600, it is"


@pytest.mark.parametrize("chunks", [0, 2])
def test_leaving_frees_the_server_at_once(chunks: int) -> None:
    go = threading.Event()

    def wait(course: Course) -> None:
        if course.chunks_done == chunks:
            assert go.wait(PATIENCE_S)

    engine = ScriptedEngine(SAID, chunk_tokens=16, before_step=wait)
    with serving(engine) as server, on_port(server.app) as address:

        def cancelled() -> bool:
            return bool(engine.courses) and engine.courses[0].chunks_done == chunks

        *_, end = RemoteEngine(address, None).respond(PLAIN, cancelled=cancelled)
        assert isinstance(end, End)
        assert (end.finish_reason, end.text, end.completion_tokens) == ("cancelled", "", 0)
        until(lambda: all(job.is_cancelled for job in server.worker.jobs()))
        go.set()
        until(lambda: not server.worker.jobs())
        assert server.worker.counts.cancelled == 1


def test_what_goes_wrong_is_one_sentence() -> None:
    request = Request([Message("user", "Hi")])
    with serving(ScriptedEngine(KeyError("x"))) as server, on_port(server.app) as address:
        with pytest.raises(EngineError, match="the server ended the answer: the engine failed"):
            list(RemoteEngine(address, None).respond(request))
    with serving(ScriptedEngine(SAID, context_tokens=20)) as server, on_port(server.app) as address:
        with pytest.raises(BadRequest, match="refused the message: prompt is too long"):
            list(RemoteEngine(address, None).respond(request))
        remote = RemoteEngine(address, None)
    with pytest.raises(EngineError, match=rf"the connection to {address} failed: "):
        list(remote.respond(request))
    with pytest.raises(BadRequest, match="does not answer as ds41 serve does"):
        RemoteEngine(address, None)


@pytest.mark.parametrize("said", [b"data: {\n", b"data: \xff\n", b"data: " + b"[" * 60_000 + b"\n"])
def test_no_word_of_a_parser_is_shown(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    def ask_status(url: str, api_key: str | None) -> dict[str, Any]:
        return {"state": "ready", "model": "m"}

    monkeypatch.setattr("mlx_engine.cli.remote.ask_status", ask_status)
    with on_port(Response(said)) as address:
        with pytest.raises(EngineError, match=f"^{address} sent what is no answer: ask again$"):
            list(RemoteEngine(address, None).respond(PLAIN))


def test_leaving_ends_an_answer_after_which_no_other_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask_status(url: str, api_key: str | None) -> dict[str, Any]:
        return {"state": "ready", "model": "m"}

    monkeypatch.setattr("mlx_engine.cli.remote.ask_status", ask_status)
    has_left = threading.Event()
    delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "so"}}
    header = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n"

    def answer(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client, client.makefile("rb") as request:
            length = 0
            while (line := request.readline().strip().lower()) != b"":
                if line.startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            request.read(length)
            client.sendall(f"{header}data: {json.dumps(delta)}\n\n".encode())
            if not request.read():
                has_left.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        events = RemoteEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", None).respond(PLAIN)
        assert next(events) == TextDelta("so")
        events.close()
        assert has_left.wait(PATIENCE_S)
        thread.join()
