"""Who may use the server: keys, names, origins, sizes; and what the log keeps."""

import logging
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from mlx_engine.errors import BadRequest
from mlx_engine.server.security import Access, is_loopback, origins
from tests.scripted_engine import ScriptedEngine
from tests.server.support import PATIENCE_S, messages_body, on_port, serving

KEY = "a key of ours"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {KEY}"}, 200),
        ({"x-api-key": "wrong", "authorization": f"Bearer {KEY}"}, 200),
        ({}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": KEY[:-1]}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"x-api-key": "schlüssel".encode()}, 401),
    ],
)
def test_a_key_is_asked_for_in_either_form(headers: dict[str, Any], status: int) -> None:
    with serving(ScriptedEngine("</think>Hello"), access=Access(api_key=KEY)) as server:
        for method, path in (("POST", "/v1/messages"), ("GET", "/v1/models"), ("GET", "/metrics")):
            response = server.ask(method, path, headers=headers, json=messages_body())
            assert response.status_code == status
            if status == 401:
                error = response.json()["error"]
                assert error["type"] == "authentication_error" and KEY not in response.text
        assert len(server.engine.courses) == (status == 200)


def test_probes_need_no_key() -> None:
    with serving(ScriptedEngine(), access=Access(api_key=KEY)) as server:
        for method, path in (("GET", "/health"), ("HEAD", "/"), ("GET", "/api/hello")):
            assert server.ask(method, path).status_code == 200


def test_every_path_asks_for_the_key_even_where_nothing_is() -> None:
    with serving(ScriptedEngine(), access=Access(api_key=KEY)) as server:
        assert server.ask("GET", "/nothing/here").status_code == 401


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost:8041", True),
        ("LOCALHOST", True),
        ("ds41.localhost:1", True),
        ("127.0.0.1:8041", True),
        ("[::1]:8041", True),
        ("192.168.1.5", True),
        ("mac.example", True),
        ("MAC.example", True),
        ("evil.example", False),
        ("localhost.evil.example:8041", False),
        ("127.0.0.1.evil.example", False),
        ("mac.example.evil.example", False),
        ("LocalHost.:8041", True),
        ("[::FFFF:127.0.0.1]:", True),
        ("[::1", False),
        ("::1", False),
        ("[::1%25lo]", False),
        ("evil.example@127.0.0.1", False),
        ("127.0.0.1:x", False),
        ("127.0.0.1/x", False),
        ("localhost#x", False),
        ("localhost?.evil.example", False),
        ("127.1", False),
        ("", False),
    ],
)
def test_a_foreign_name_is_refused(host: str, is_ours: bool) -> None:
    access = Access(host_names=frozenset({"Mac.example"}))
    with serving(ScriptedEngine("</think>Hello"), access=access) as server:
        response = server.ask("POST", "/v1/messages", headers={"host": host}, json=messages_body())
        assert response.status_code == (200 if is_ours else 403)
        assert len(server.engine.courses) == is_ours


def test_any_name_will_do_where_a_key_protects() -> None:
    with serving(ScriptedEngine(), access=Access(api_key=KEY, host_names=None)) as server:
        headers = {"host": "mac.example", "x-api-key": KEY}
        assert server.ask("GET", "/v1/models", headers=headers).status_code == 200


def test_pages_of_other_origins_are_refused_unless_allowed() -> None:
    allowed = "https://app.example"
    with serving(
        ScriptedEngine("</think>Hello"), access=Access(origins=frozenset({allowed}))
    ) as server:

        def ask(method: str, origin: str) -> Any:
            headers = {"origin": origin, "host": "localhost:8041"}
            return server.ask(method, "/v1/messages", headers=headers, json=messages_body())

        for origin in ("https://evil.example", "null", "http://localhost:9999"):
            for method in ("POST", "OPTIONS"):
                response = ask(method, origin)
                assert response.status_code == 403
                assert "access-control-allow-origin" not in response.headers
        assert server.engine.courses == []
        assert ask("POST", "http://localhost:8041").status_code == 200  # its own page
        response = ask("POST", allowed)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == allowed
        assert response.headers["vary"] == "origin"
        assert "request-id" in response.headers["access-control-expose-headers"]
        response = ask("OPTIONS", allowed)
        assert response.status_code == 204
        assert "POST" in response.headers["access-control-allow-methods"]


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://app.example", "https://app.example"),
        ("https://app.example/", "https://app.example"),
        ("HTTPS://App.Example:443", "https://app.example"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("app://obsidian.md", "app://obsidian.md"),
    ],
)
def test_an_origin_is_what_browsers_write(given: str, origin: str) -> None:
    assert origins([given]) == {origin}


@pytest.mark.parametrize(
    "given",
    ["", "*", "null", "app.example", "https://*.example", "https://a/b", "https://a:x", "https://"],
)
def test_what_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(BadRequest, match="give scheme, name and port"):
        origins([given])


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.0.0.7", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("fe80::1%lo", False),
    ],
)
def test_which_addresses_only_this_machine_reaches(address: str, is_local: bool) -> None:
    assert is_loopback(address) == is_local


def test_the_log_holds_no_word_of_prompts_or_answers(caplog: pytest.LogCaptureFixture) -> None:
    secret, answer = "zanzibar", "quetzal"
    with caplog.at_level(logging.DEBUG), serving(ScriptedEngine(f"{answer}</think>{answer}")) as s:
        message: dict[str, Any] = {"role": "user", "content": secret}
        s.message(messages=[message], system=secret)
        s.events(messages=[message], metadata={"user_id": secret})
        for wrong in ({"role": secret, "content": secret}, {"role": "user", "content": [secret]}):
            body = messages_body(messages=[wrong])
            assert s.ask("POST", "/v1/messages", json=body).status_code == 400
        assert s.ask("POST", "/v1/messages", content=secret).status_code == 400
    ours = [record for record in caplog.records if record.name.startswith("mlx_engine")]
    assert len(ours) >= 5
    assert not [record for record in ours if secret in str(record.__dict__)]
    assert not [record for record in ours if answer in str(record.__dict__)]


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: {n}\r\nTransfer-Encoding: chunked",
        "transfer-encoding: CHUNKED\r\ncontent-length: {n}",
        "Content-Length: 5\r\nContent-Length: {n}",
        "Content-Length: 5, {n}",
    ],
)
def test_a_request_that_may_end_at_two_places_is_refused_and_nothing_after_it_heard(
    framing: str,
) -> None:
    body = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n{framing.format(n=len(body))}\r\n\r\n"
    with serving(ScriptedEngine()) as server, on_port(server.app) as address:
        url = urlsplit(address)
        with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as client:
            client.sendall(head.encode() + body)
            with client.makefile("rb") as reader:
                said = reader.read()  # until the server closes it
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1 ") == 1
