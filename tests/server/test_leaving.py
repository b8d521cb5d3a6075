"""Clients that leave, at every stage and in every way: the engine is free, the others unharmed."""

import json
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from mlx_engine.prompt import Bounds, Prompt
from mlx_engine.request import Request
from tests.scripted_engine import Course, ScriptedEngine
from tests.server.support import PATIENCE_S, Server, messages_body, on_port, serving, until

# An answer that nobody waits for to its end.
LONG = "</think>" + "x" * 200_000
LONG_PROMPT = [{"role": "user", "content": "y" * 50_000}]


class Brake:
    """Makes steps of the engine slow enough to leave in the middle, and quick at the end."""

    def __init__(self) -> None:
        self.is_off = threading.Event()

    def __call__(self, course: Course) -> None:
        self.is_off.wait(0.002)


@contextmanager
def slow_server(*answers: str, **options: Any) -> Generator[tuple[Server, str, Brake]]:
    brake = Brake()
    engine = ScriptedEngine(*answers, before_step=brake, context_tokens=500_000)
    with serving(engine, **options) as server, on_port(server.app) as address:
        try:
            yield server, address, brake
        finally:
            brake.is_off.set()


def send(address: str, **body: Any) -> socket.socket:
    """Send a request, and leave the answer unread."""
    data = json.dumps(messages_body(max_tokens=300_000, **body)).encode()
    url = urlsplit(address)
    client = socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S)
    head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def leave(client: socket.socket, how: str) -> None:
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    else:
        client.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_the_engine_is_free_when_the_client_has_left(how: str, stage: str, stream: bool) -> None:
    with slow_server(LONG) as (server, address, brake):
        messages = LONG_PROMPT if stage == "prefill" else [{"role": "user", "content": "Hi"}]
        client = send(address, stream=stream, messages=messages)
        courses = server.engine.courses
        until(lambda: bool(courses and (courses[0].said or stage == "prefill")))
        until(lambda: courses[0].chunks_done > 2 or bool(courses[0].said))
        leave(client, how)
        until(lambda: courses[0].is_closed)
        assert bool(courses[0].said) == (stage == "decode") and len(courses[0].said) < 100_000
        assert server.worker.jobs() == []
        client.close()
        # What was computed is there for the next one.
        brake.is_off.set()
        messages = [*messages, {"role": "user", "content": "again"}]
        answer = httpx.post(
            f"{address}/v1/messages",
            json=messages_body(max_tokens=1, messages=messages),
            timeout=PATIENCE_S,
            verify=False,
        )
        assert answer.status_code == 200
        assert answer.json()["usage"]["cache_read_input_tokens"] > 0


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_who_leaves_the_queue_never_starts_and_disturbs_nobody(how: str, stream: bool) -> None:
    with slow_server(LONG, "</think>Hello", max_active=1) as (server, address, _):
        first = send(address, stream=True)
        until(lambda: bool(server.engine.courses))
        leaving = send(address, stream=stream)
        until(lambda: len(server.worker.jobs()) == 2)
        leave(leaving, how)
        until(lambda: len(server.worker.jobs()) == 1)
        said = len(server.engine.courses[0].said)
        until(lambda: len(server.engine.courses[0].said) > said)
        leave(first, "fin")
        until(lambda: server.worker.jobs() == [])
        assert len(server.engine.courses) == 1
        first.close()
        leaving.close()


@pytest.mark.parametrize("how", ["fin", "reset"])
def test_who_leaves_while_the_prompt_is_counted_never_starts(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()
    encode = Request.encode

    def slow(request: Request, tokenizer: Any, turns: Any, bounds: Bounds) -> Prompt:
        begun.set()
        try:
            until(bounds.cancelled)
            return encode(request, tokenizer, turns, bounds)
        finally:
            ended.set()

    monkeypatch.setattr(Request, "encode", slow)
    with slow_server("</think>Hello", count_s=0.01) as (server, address, _):
        client = send(address, stream=True)
        assert begun.wait(PATIENCE_S)
        leave(client, how)
        assert ended.wait(PATIENCE_S)
        client.close()
        monkeypatch.undo()
        answer = httpx.post(
            f"{address}/v1/messages", json=messages_body(), timeout=PATIENCE_S, verify=False
        )
        assert answer.status_code == 200 and len(server.engine.courses) == 1


def test_who_leaves_while_the_model_reads_the_body_is_forgotten() -> None:
    with slow_server("</think>Hello") as (server, address, _):
        url = urlsplit(address)
        client = socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S)
        client.sendall(
            b"POST /v1/messages HTTP/1.1\r\nHost: x.localhost\r\nContent-Length: 99\r\n\r\n{"
        )
        leave(client, "reset")
        answer = httpx.post(
            f"{address}/v1/messages", json=messages_body(), timeout=PATIENCE_S, verify=False
        )
        assert answer.status_code == 200
        assert len(server.engine.courses) == 1


def test_a_crowd_that_leaves_at_any_moment_changes_no_other_answer() -> None:
    with slow_server("</think>" + "word " * 20) as (server, address, _):
        text = httpx.post(
            f"{address}/v1/messages", json=messages_body(), timeout=30, verify=False
        ).json()
        leavers = [send(address, stream=i % 2 == 0) for i in range(12)]
        answers: list[Any] = []

        def ask() -> None:
            body = messages_body()
            answers.append(
                httpx.post(f"{address}/v1/messages", json=body, timeout=60, verify=False).json()
            )

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for i, client in enumerate(leavers):
            until(lambda: len(server.engine.courses) > 2)
            leave(client, ("fin", "reset")[i % 2])
        for thread in threads:
            thread.join(PATIENCE_S)
        assert [answer["content"] for answer in answers] == [text["content"]] * 4
        until(lambda: server.worker.jobs() == [])
        begun = [c for c in server.engine.courses if c.chunks_done or c.said]
        assert len(begun) > 5 and all(course.is_closed for course in begun)
        for client in leavers:
            client.close()
