"""Clients that connect and say nothing: they go, and keep nobody else out."""

import http.client
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from mlx_engine.server import connections
from tests.scripted_engine import Course, ScriptedEngine
from tests.server.support import PATIENCE_S, on_port, serving

SILENCE_S = 0.3


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SILENCE_S", SILENCE_S)


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(("before", "said"), [(b"", b""), (b"", HEAD[:30]), (HEAD, HEAD[:30])])
def test_a_connection_without_a_whole_head_is_closed(before: bytes, said: bytes) -> None:
    with serving(ScriptedEngine()) as server, on_port(server.app) as address:
        url = urlsplit(address)
        with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as client:
            with client.makefile("rb") as reader:
                if before:
                    client.sendall(before)
                    assert reader.readline().startswith(b"HTTP/1.1 200 ")
                client.sendall(said)
                reader.read()  # until the server closes it


def test_neither_a_long_answer_nor_a_kept_connection_is_cut() -> None:
    def step(course: Course) -> None:
        time.sleep(0.2)

    with serving(ScriptedEngine("</think>Hello", before_step=step)) as server:
        with on_port(server.app) as address:
            connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE_S)
            for _ in range(2):
                started_s = time.monotonic()
                connection.request("POST", "/v1/completions", b'{"prompt": "Hi"}')
                sock = connection.sock
                answer = connection.getresponse()
                assert answer.status == 200 and b"Hello" in answer.read()
                assert time.monotonic() - started_s > 2 * SILENCE_S
                time.sleep(2 * SILENCE_S)
                assert connection.sock is sock  # the client would make another one
            connection.close()


EARLY = b"POST /v1/nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
CHUNKED = b"POST /v1/nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "body"), [(EARLY, b"0123456789"), (CHUNKED, b"a\r\n0123456789\r\n0\r\n\r\n")]
)
def test_a_body_after_its_answer_is_no_head(head: bytes, body: bytes) -> None:
    """It may take its time, and the connection is kept for another request."""
    with serving(ScriptedEngine()) as server, on_port(server.app) as address:
        url = urlsplit(address)
        with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as client:
            with client.makefile("rb") as reader:
                client.sendall(head)
                assert reader.readline().startswith(b"HTTP/1.1 404 ")
                for part in (body[:4], body[4:]):
                    client.sendall(part)
                    time.sleep(2 * SILENCE_S)
                client.sendall(HEAD)
                lines = iter(reader.readline, b"")
                assert any(b"HTTP/1.1 200 " in line for line in lines)


@pytest.mark.parametrize("sent", [EARLY + b"0123", EARLY + b"0123456789"])
def test_a_connection_that_is_kept_has_the_librarys_limit(sent: bytes) -> None:
    with serving(ScriptedEngine()) as server:
        with on_port(server.app, keep_connection_s=1) as address:
            url = urlsplit(address)
            with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as client:
                with client.makefile("rb") as reader:
                    client.sendall(sent[: len(EARLY)])
                    assert reader.readline().startswith(b"HTTP/1.1 404 ")
                    client.sendall(sent[len(EARLY) :])
                    reader.read()  # until the server closes it


def test_a_slow_upload_is_told_why_it_is_refused() -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(8):
            time.sleep(SILENCE_S / 3)
            yield b"x" * 5_000_000

    with serving(ScriptedEngine()) as server, on_port(server.app) as address:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE_S)
        with closing(connection):
            headers = {"Content-Length": str(40_000_000)}
            connection.request("POST", "/v1/messages", pieces(), headers)
            assert connection.getresponse().status == 413


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource as r\n"
        "from mlx_engine.server.connections import allow_many\n"
        "for soft, hard in ((64, {hard}), (64, 100)):\n"
        "    r.setrlimit(r.RLIMIT_NOFILE, (soft, hard)); allow_many()\n"
        "    print(*r.getrlimit(r.RLIMIT_NOFILE))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code.format(hard=hard)], capture_output=True, text=True, timeout=60
    )
    most = 8192 if hard == resource.RLIM_INFINITY else min(8192, hard)
    assert run.stdout.split() == [str(most), str(hard), "100", "100"], run.stderr
