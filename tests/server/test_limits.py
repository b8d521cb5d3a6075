"""What a request may hold: sizes, numbers and ranges, refused before anything is rendered."""

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from mlx_engine.server import fields, messages_in
from mlx_engine.server.app import create_app
from mlx_engine.server.body import MAX_BODY_BYTES, json_object
from mlx_engine.server.security import Access
from mlx_engine.server.service import Service
from tests.scripted_engine import ScriptedEngine
from tests.server.support import PATIENCE_S, Server, on_port, serving

Object = dict[str, Any]

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, Object] = {
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/completions": {"prompt": "Hi"},
}
GENERATING = [path for path in BODIES if not path.endswith("count_tokens")]


def refusal(server: Server, path: str, status: int = 400, **options: Any) -> str:
    """The message that a request is refused with, in its protocol's form."""
    response = server.ask("POST", path, **options)
    assert response.status_code == status, response.text
    body = response.json()
    assert response.headers["request-id"].startswith("req_")
    assert ("request_id" in body) == path.startswith("/v1/messages")
    assert server.engine.courses == []
    return body["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_body_beyond_the_limit_is_not_read(path: str) -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        small = Service(server.worker, server.engine.tokenizer, 100_000, max_body_bytes=1000)
        limited = Server(create_app(small, Access()), small, server.engine)
        long = BODIES[path] | {"user": "x" * 2000}
        assert "larger than 1000 bytes" in refusal(limited, path, 413, json=long)

        async def pieces() -> Any:  # sent in chunks, so that no length is announced
            for _ in range(20):
                yield b" " * 100

        assert "larger than 1000 bytes" in refusal(limited, path, 413, content=pieces())
        assert limited.ask("POST", path, json=BODIES[path]).status_code == 200
    assert MAX_BODY_BYTES == 32 * 2**20


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_come_at_once_are_held_to_a_limit_together(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_engine.server.service.MAX_BODIES_BYTES", 900)
    monkeypatch.setattr("mlx_engine.server.body.SMALL_BODY_BYTES", 100)
    text = json.dumps(BODIES[path] | {"user": "x" * 700})

    async def ask(server: Server) -> list[httpx.Response]:
        is_here, go_on = asyncio.Event(), asyncio.Event()

        async def halting() -> AsyncIterator[bytes]:
            yield text[:400].encode()
            is_here.set()
            await go_on.wait()
            yield text[400:].encode()

        async def broken() -> AsyncIterator[bytes]:
            yield text[:500].encode()
            raise ConnectionError

        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.post(path, content=broken())).status_code == 500
            first = asyncio.create_task(http.post(path, content=halting()))
            await is_here.wait()
            refused = await http.post(path, content=text)
            go_on.set()
            return [await first, refused, await http.post(path, content=text)]

    with serving(ScriptedEngine("</think>Hello")) as server:
        first, refused, later = asyncio.run(ask(server))
        assert (first.status_code, later.status_code) == (200, 200)
        assert refused.status_code == (529 if path.startswith("/v1/messages") else 429)
        assert int(refused.headers["retry-after"]) > 0
        assert server.worker.counts.refused == 1


@pytest.mark.parametrize("path", BODIES)
def test_uploads_that_stall_leave_room_for_small_bodies_and_end(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_engine.server.service.MAX_BODIES_BYTES", 2000)
    monkeypatch.setattr("mlx_engine.server.body.SMALL_BODY_BYTES", 1000)
    large, small = (json.dumps(BODIES[path] | {"user": "x" * n}).encode() for n in (1500, 500))

    async def ask(server: Server) -> tuple[list[httpx.Response], list[httpx.Response]]:
        n_here, is_here = 0, asyncio.Event()

        async def stalling() -> AsyncIterator[bytes]:
            nonlocal n_here
            yield large[:-1]
            n_here += 1
            if n_here == 3:
                is_here.set()
            await asyncio.Event().wait()

        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            stalled = [asyncio.create_task(http.post(path, content=stalling())) for _ in range(3)]
            await is_here.wait()
            meanwhile = [await http.post(path, content=data) for data in (large, small)]
            ended = [await each for each in stalled]
            return [*meanwhile, await http.post(path, content=large)], ended

    with serving(ScriptedEngine("</think>Hello"), body_silence_s=2) as server:
        answers, ended = asyncio.run(ask(server))
    refused = 529 if path.startswith("/v1/messages") else 429
    assert [answer.status_code for answer in answers] == [refused, 200, 200]
    for answer in ended:
        assert answer.status_code == 408 and answer.headers["request-id"].startswith("req_")
        assert "nothing came of the body for 2 s" in answer.json()["error"]["message"]
        assert ("request_id" in answer.json()) == path.startswith("/v1/messages")


@pytest.mark.parametrize("path", BODIES)
def test_stalled_small_bodies_have_a_limit_and_shut_nobody_out_for_good(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_engine.server.service.MAX_BODIES_BYTES", 1000)
    monkeypatch.setattr("mlx_engine.server.body.FREE_BODIES", 2)
    data = json.dumps(BODIES[path] | {"user": "x" * 300}).encode()
    room = 2 + 1000 // (len(data) - 1)

    async def ask(server: Server) -> tuple[list[httpx.Response], httpx.Response]:
        n_here, is_here = 0, asyncio.Event()

        async def stalling() -> AsyncIterator[bytes]:
            nonlocal n_here
            yield data[:-1]
            n_here += 1
            if n_here == room:
                is_here.set()
            await asyncio.Event().wait()

        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            posts = (http.post(path, content=stalling()) for _ in range(room))
            stalled = [asyncio.create_task(post) for post in posts]
            await is_here.wait()
            refused = await http.post(path, content=data)
            ended = [await each for each in stalled]
            answers = [refused, *ended]
            return answers, await http.post(path, content=data)

    with serving(ScriptedEngine("</think>Hello"), body_silence_s=1) as server:
        (refused, *ended), later = asyncio.run(ask(server))
    assert refused.status_code == (529 if path.startswith("/v1/messages") else 429)
    assert [answer.status_code for answer in ended] == [408] * room
    assert later.status_code == 200


def test_a_body_that_never_ends_is_given_up() -> None:
    async def trickle() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.01)
            yield b" "

    with serving(ScriptedEngine("</think>Hello"), body_s=0.3) as server:
        message = refusal(server, "/v1/messages", 408, content=trickle())
        assert "the body did not come within 0.3 s" in message
        assert server.message()["stop_reason"] == "end_turn"


def test_a_connection_whose_upload_stalled_is_closed() -> None:
    with serving(ScriptedEngine("</think>Hello"), body_silence_s=0.1) as server:
        with on_port(server.app) as address:
            url = urlsplit(address)
            head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as client:
                client.sendall(head + b"{")
                with client.makefile("rb") as reader:
                    assert reader.read().startswith(b"HTTP/1.1 408 ")


def test_a_body_that_comes_slowly_is_read_to_its_end() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for byte in json.dumps(BODIES["/v1/messages"]).encode():
            await asyncio.sleep(0.01)
            yield bytes([byte])

    with serving(ScriptedEngine("</think>Hello"), body_silence_s=0.5) as server:
        assert server.ask("POST", "/v1/messages", content=pieces()).status_code == 200


@pytest.mark.parametrize("path", GENERATING)
def test_a_full_queue_reads_no_body(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[bytes] = []

    async def pieces() -> Any:
        pulled.append(b" ")
        yield b" "

    with serving(ScriptedEngine()) as server:
        monkeypatch.setattr(server.worker, "_max_queued", 0)
        status = 529 if path == "/v1/messages" else 429
        assert "waiting already" in refusal(server, path, status, content=pieces())
    assert pulled == []


@pytest.mark.parametrize("path", BODIES)
def test_a_large_body_is_parsed_beside_all_else(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def parse(data: bytearray) -> Object:
        threads.append(threading.current_thread())
        return json_object(data)

    monkeypatch.setattr("mlx_engine.server.service.json_object", parse)
    with serving(ScriptedEngine("</think>Hello")) as server:
        for n in (10, 2**19):
            data = json.dumps(BODIES[path] | {"user": "x" * n})
            assert server.ask("POST", path, content=data).status_code == 200
    small, large = threads
    assert small is threading.main_thread() and large is not small


@pytest.mark.parametrize("path", BODIES)
def test_what_is_no_json_object(path: str) -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        for data in (
            b"",
            b"no JSON",
            b"\xff\xfe{}",
            b"[" * 100_000,
            b'{"n": ' + b"9" * 5000 + b"}",
        ):
            assert "not JSON" in refusal(server, path, content=data)
        for number in ("NaN", "-Infinity", "1e999"):
            changed = json.dumps(BODIES[path])[:-1] + f', "temperature": {number}}}'
            assert "not JSON" in refusal(server, path, content=changed)
        for data in (b"[]", b"1", b"null", b'"text"'):
            assert "no JSON object" in refusal(server, path, content=data)
        whole = json.dumps(BODIES[path])
        answer = server.ask("POST", path, content=b"\xef\xbb\xbf" + whole.encode())
        assert answer.status_code == 200  # a byte order mark is no harm


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["metadata", "user", "instructions", "system", "tools"])
def test_half_of_a_surrogate_pair_is_refused_wherever_it_stands(path: str, field: str) -> None:
    data = json.dumps(BODIES[path] | {field: [{"name": "a\ud800"}]})
    with serving(ScriptedEngine("</think>Hello")) as server:
        assert "not Unicode" in refusal(server, path, content=data)
        whole = json.dumps(BODIES[path] | {"user": "\U0001f600 and \\ud800"})
        assert "\\ud83d" in whole and "\\\\ud800" in whole  # a pair, and text that names a half
        assert server.ask("POST", path, content=whole).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_compressed_body_is_told_to_come_as_it_is(path: str) -> None:
    data = gzip.compress(json.dumps(BODIES[path]).encode())
    with serving(ScriptedEngine("</think>Hello")) as server:
        headers = {"content-encoding": "gzip"}
        assert "compressed" in refusal(server, path, 415, content=data, headers=headers)
        headers = {"content-encoding": "identity"}
        assert server.ask("POST", path, json=BODIES[path], headers=headers).status_code == 200


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"temperature": "hot"}, "temperature: it is a number"),
        ({"temperature": True}, "temperature: it is a number"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": 10**400}, "temperature: the number is too large"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 1.5}, "top_k: it is a whole number"),
        ({"top_k": -2}, "top_k is -2"),
        ({"seed": "7"}, "seed: it is a whole number"),
        ({"seed": 2**70}, "seed is"),
        ({"stream": "yes"}, "stream: it is true or false"),
    ],
)
def test_a_number_out_of_its_range_is_named(path: str, changed: Object, words: str) -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        data = json.dumps(BODIES[path] | changed)
        assert words in refusal(server, path, content=data)


@pytest.mark.parametrize("path", GENERATING)
def test_what_a_request_says_of_sampling_is_obeyed(path: str) -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        said = {"temperature": 0.25, "top_p": 0.5, "top_k": 40, "seed": 7}
        for changed in (said, {}, {"top_k": -1, "seed": -1}, {"top_k": 10**30}):
            assert server.ask("POST", path, json=BODIES[path] | changed).status_code == 200
        given, plain, negative, huge = (course.call.sampling for course in server.engine.courses)
    assert (given.temperature, given.top_p, given.top_k, given.seed) == (0.25, 0.5, 40, 7)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.seed) == (1.0, 1.0, 0, None)
    assert negative.top_k == 0 and negative.seed == 2**63 - 1
    assert huge.top_k > 129_280


STOPS = {
    "/v1/messages": "stop_sequences",
    "/v1/chat/completions": "stop",
    "/v1/completions": "stop",
}


@pytest.mark.parametrize("path", STOPS)
def test_stop_strings_are_few_and_short(path: str) -> None:
    name = STOPS[path]
    with serving(ScriptedEngine("</think>Hello")) as server:
        for stop, words in (
            (["x"] * 17, f"{name}: it has 17 entries, and may have 16"),
            (["x" * 1001], f"{name}: one is longer than 1,000 characters"),
            ([""], "stop string is empty"),
            ([1], f"{name}: it is missing, or no string"),
            ({"a": 1}, f"{name}: it is a"),
        ):
            assert words in refusal(server, path, json=BODIES[path] | {name: stop})
        most = BODIES[path] | {name: ["y" * 1000] * 16}
        assert server.ask("POST", path, json=most).status_code == 200


@pytest.mark.parametrize(
    ("path", "name", "entry", "most"),
    [
        ("/v1/messages", "messages", HI[0], fields.MAX_MESSAGES),
        ("/v1/chat/completions", "messages", HI[0], fields.MAX_MESSAGES),
        ("/v1/responses", "input", HI[0], fields.MAX_MESSAGES),
        ("/v1/messages", "tools", {"name": "f"}, fields.MAX_TOOLS),
        ("/v1/chat/completions", "tools", {}, fields.MAX_TOOLS),
        ("/v1/responses", "tools", {}, fields.MAX_TOOLS),
    ],
)
def test_lists_have_a_limit(path: str, name: str, entry: Object, most: int) -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        body = BODIES[path] | {name: [entry] * (most + 1)}
        assert f"{name}: it has {most + 1:,} entries" in refusal(server, path, json=body)


def test_many_messages_of_one_role_cost_what_they_are() -> None:
    """Joined one by one they would take a minute."""
    n = 30_000
    request = messages_in.read({"messages": HI * n})
    assert request.conversation is not None
    assert len(request.conversation.messages) in (1, n)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("depth", [100, 140, 600, 20_000])
def test_values_that_hold_each_other_too_deeply(path: str, depth: int) -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        for opening, closing in (("[", "]"), ('{"a":', "}"), ('{"type":"x","content":[', "]}")):
            deep = f"{opening * depth}1{closing * depth}"
            data = json.dumps(BODIES[path])[:-1] + f', "metadata": {{"a": {deep}}}}}'
            response = server.ask("POST", path, content=data)
            levels = depth * opening.count(":") + depth * opening.count("[")
            assert response.status_code == (200 if levels < 126 else 400), response.text


def test_more_bodies_than_can_be_read_at_once_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_engine.server.service._MAX_READING", 0)
    with serving(ScriptedEngine("</think>Hello")) as server:
        for path in BODIES:
            response = server.ask("POST", path, json=BODIES[path])
            assert response.status_code == (529 if path.startswith("/v1/messages") else 429)
            assert int(response.headers["retry-after"]) in range(1, 61)
