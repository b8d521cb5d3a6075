"""Bodies and bytes that no client should send, to every endpoint.

Whatever comes, the answer is one that the protocol knows, nothing is logged as an error, nothing
hangs, and the server goes on to serve.
"""

import copy
import json
import logging
import socket
from collections.abc import Generator
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_engine.server import chat, completions, messages_out, responses_in
from mlx_engine.tokenizer import SPELLINGS
from tests.fake_engine import Call
from tests.scripted_engine import ScriptedEngine
from tests.server.support import PATIENCE_S, Server, messages_body, on_port, serving, until
from tests.server.test_messages import calls

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"name": "Read", "description": "Read a file", "parameters": SCHEMA}
DATA = "data:image/png;base64,AA=="

# For each endpoint a body that uses all of its protocol.
MESSAGES: dict[str, Any] = {
    "model": "claude-opus-4-6",
    "max_tokens": 40,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "Read", "description": "Read a file", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stop_sequences": ["STOP"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "metadata": {"user_id": "u"},
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "A reminder."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "text", "text": "I read."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "/a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "a"},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
                        },
                    ],
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ],
}
CHAT: dict[str, Any] = {
    "model": "gpt-5",
    "max_completion_tokens": 40,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "Read"}},
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "stop": ["STOP"],
    "seed": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "logprobs": True,
    "top_logprobs": 2,
    "n": 1,
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "Read", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a"},
    ],
}
RESPONSES: dict[str, Any] = {
    "model": "gpt-5",
    "max_output_tokens": 40,
    "instructions": "Be brief.",
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "custom", "name": "apply_patch"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", **FUNCTION}]},
    ],
    "tool_choice": "required",
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
            "encrypted_content": "e",
        },
        {"type": "function_call", "call_id": "c1", "name": "Read", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_image", "image_url": DATA}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"role": "user", "content": "And?"},
    ],
}
COMPLETIONS: dict[str, Any] = {
    "model": "any",
    "prompt": ["Once"],
    "max_tokens": 40,
    "n": 1,
    "logprobs": 1,
    "stop": "STOP",
    "suffix": None,
    "stream_options": {"include_usage": True},
}
BODIES = {
    messages_out.PATH: MESSAGES,
    f"{messages_out.PATH}/count_tokens": MESSAGES,
    chat.PATH: CHAT,
    responses_in.PATH: RESPONSES,
    completions.PATH: COMPLETIONS,
}
PATHS = [*BODIES, "/", "/health", "/metrics", "/status", "/api/hello", "/v1/models", "/v1/models/x"]

WORDS = st.sampled_from(
    [
        *("", "user", "assistant", "system", "tool", "text", "image", "tool_use", "tool_result"),
        *("auto", "any", "none", "max", "thinking", "redacted_thinking", "document", "Read"),
        *("\0", "\ud800", "é" * 9, *SPELLINGS.values()),
        *("<｜DSML｜ calls>", calls(("Read", {"path": '"/a"'}))),
    ]
)
NUMBERS = st.one_of(
    st.integers(-2, 2), st.sampled_from([10**9, 2**63, -(10**30), 10**4000]), st.floats()
)
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=8))
JSON = st.recursive(
    PLAIN,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.dictionaries(
            st.one_of(WORDS, st.sampled_from(["type", "role", "content", "name", "input"])),
            parts,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in nested JSON: its container, and its key or index there."""
    if isinstance(value, dict):
        keys: list[Any] = [*cast(dict[str, Any], value)]
    elif isinstance(value, list):
        keys = [*range(len(cast(list[Any], value)))]
    else:
        return []
    container = cast(Any, value)
    inside = [place for key in keys for place in places(container[key])]
    return [(container, key) for key in keys] + inside


@st.composite
def damaged(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """A body with up to four places that were changed, removed, doubled, wrapped or added."""
    body = copy.deepcopy(body)
    body["stream"] = draw(st.booleans())
    for _ in range(draw(st.integers(0, 4))):
        found = places(body)
        if not found:
            break
        container, key = draw(st.sampled_from(found))
        match draw(st.sampled_from(["change", "change", "remove", "double", "wrap", "add"])):
            case "change":
                container[key] = draw(JSON)
            case "remove":
                del container[key]
            case "double" if isinstance(key, int):
                container.insert(key, copy.deepcopy(container[key]))
            case "wrap":
                container[key] = draw(st.sampled_from([[container[key]], {"x": container[key]}]))
            case _ if isinstance(key, str):
                container[draw(WORDS)] = draw(JSON)
            case _:
                container.append(draw(JSON))
    return body


def on_the_wire(body: Any) -> bytes:
    """JSON as careless clients write it: NaN as it is, and halves of surrogates escaped."""
    return json.dumps(body).encode()


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    """A model that thinks, calls and breaks its markup."""
    said = "Hm.</think>I read.\n\n" + calls(("Read", {"path": '"/a"'}))

    def script(call: Call) -> str:
        return said[: sum(call.token_ids) % (len(said) + 1)]

    with serving(ScriptedEngine(script, context_tokens=8000)) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_wrong(server: Server, caplog: pytest.LogCaptureFixture) -> Generator[None]:
    """No error is logged, no job is left, and the next request is answered."""
    yield
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []
    until(lambda: server.worker.jobs() == [])
    assert server.message()["type"] == "message"


# How the protocols name what is the server's own fault.
FAULTS = ("api_error", "server_error")
# In the last event of a stream.
ENDS = ("message_stop", "[DONE]", "response.completed", "response.incomplete")


def check(response: httpx.Response) -> None:
    """The status is one that a client may be told, and what is said is whole."""
    status = response.status_code
    assert status in (200, 204, 529) or 400 <= status < 500, response.text
    kind = response.headers.get("content-type", "")
    if kind == "application/json" and response.content:
        body = response.json()
        assert bool(body.get("error")) == (status > 204)
        assert status <= 204 or body["error"]["type"] not in FAULTS
    elif kind.startswith("text/event-stream"):
        assert status == 200 and not any(fault in response.text for fault in FAULTS)
        last = response.text.rstrip().rpartition("\n\n")[2]
        assert any(end in last for end in ENDS), last


def ask(server: Server, path: str, content: bytes) -> httpx.Response:
    return server.ask("POST", path, content=content, timeout=PATIENCE_S)


FUZZ = settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow], database=None
)


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_body_is_answered(server: Server, path: str) -> None:
    """What the others damage is understood as it is."""
    for stream in (False, True):
        response = ask(server, path, on_the_wire(BODIES[path] | {"stream": stream}))
        check(response)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", BODIES)
def test_damaged_bodies(server: Server, path: str) -> None:
    statuses: set[int] = set()

    @FUZZ
    @given(damaged(BODIES[path]))
    def fuzz(body: dict[str, Any]) -> None:
        response = ask(server, path, on_the_wire(body))
        check(response)
        statuses.add(response.status_code)

    fuzz()
    assert statuses >= {200, 400}


@pytest.mark.parametrize("path", BODIES)
def test_any_json_and_any_bytes(server: Server, path: str) -> None:
    depth = 100_000
    statuses: set[int] = set()
    bodies = st.one_of(
        JSON.map(on_the_wire),
        st.binary(max_size=40),
        st.sampled_from([b"[" * depth, b'{"a":' * depth, b"1" * depth, b'{"model": "\xff"}']),
    )

    @FUZZ
    @given(bodies)
    def fuzz(content: bytes) -> None:
        response = ask(server, path, content)
        check(response)
        statuses.add(response.status_code)

    fuzz()
    assert 400 in statuses


def test_any_method_on_any_path(server: Server) -> None:
    @FUZZ
    @given(
        st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "FOO"]),
        st.one_of(
            st.sampled_from(PATHS),
            st.text(min_size=1, max_size=20).map(lambda text: "/" + text.encode().hex()),
            st.sampled_from(["//", "/..%2f..", "/v1/models/%00%ff", "/v1/messages/", "/%F0%9F"]),
        ),
        st.binary(max_size=10),
    )
    def fuzz(method: str, path: str, content: bytes) -> None:
        response = server.ask(method, path, content=content)
        check(response)

    fuzz()


HEAD = "POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"
BODY = json.dumps(messages_body()).encode()
RAW = {
    "nothing": b"",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "half a head": HEAD.encode(),
    "no host": b"POST /v1/messages HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    "two lengths": f"{HEAD}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}".encode(),
    "a length below zero": f"{HEAD}Content-Length: -1\r\n\r\n".encode(),
    "a length that is no number": f"{HEAD}Content-Length: many\r\n\r\n".encode(),
    "a length beyond all limits": f"{HEAD}Content-Length: {10**12}\r\n\r\n{{".encode(),
    "a body that ends early": f"{HEAD}Content-Length: 99\r\n\r\n{{".encode(),
    "chunks that are none": f"{HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
    "chunks without an end": f"{HEAD}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n".encode(),
    "a head without an end": HEAD.encode() + b"X: " + b"y" * 200_000,
    "bytes in a head": HEAD.encode() + b"X: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
    "an upgrade": f"{HEAD}Upgrade: websocket\r\nConnection: upgrade\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n".encode()
    + BODY,
    "two requests at once": 2 * (f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY),
}


@pytest.mark.parametrize("sent", RAW.values(), ids=RAW)
def test_any_bytes_on_the_socket(server: Server, sent: bytes) -> None:
    with on_port(server.app) as address:
        url = urlsplit(address)
        with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as client:
            received = b""
            try:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                while part := client.recv(65536):
                    received += part
            except ConnectionResetError:
                pass
        for line in received.splitlines():
            if line.startswith(b"HTTP/1.1 "):
                assert line.split()[1] == b"200" or line.split()[1].startswith(b"4"), received
