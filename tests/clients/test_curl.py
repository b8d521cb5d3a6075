"""curl, as a person types it: each protocol whole and as a stream, an error, and an API key."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from mlx_engine.server.security import Access
from tests.scripted_engine import ScriptedEngine
from tests.server import test_chat, test_messages, test_responses
from tests.server.openai_events import chunks_of
from tests.server.support import PATIENCE_S, messages_body, on_port, sent_events, serving

KEY = "a key of ours"
WORDS = "one two three"
HI = {"role": "user", "content": "Hi"}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": messages_body(thinking={"type": "disabled"}),
    "/v1/chat/completions": test_chat.body(reasoning_effort="none"),
    "/v1/completions": {"model": "ds41", "prompt": "Hi", "max_tokens": 100},
    "/v1/responses": test_responses.body(reasoning={"effort": "none"}),
}


@dataclass(frozen=True)
class Reply:
    """What curl has got."""

    status: int
    kind: str
    text: str


def curl(address: str, *args: str, body: dict[str, Any] | None = None) -> Reply:
    """Ask with `curl -sN`; skips without curl, where CI sets DS41_REQUIRE_CLIENTS=1 and fails."""
    if shutil.which("curl") is None:
        reason = "curl is not installed"
        if os.environ.get("DS41_REQUIRE_CLIENTS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    posted = () if body is None else ("-H", "content-type: application/json", "-d", "@-")
    run = subprocess.run(
        # -q: no settings of whoever runs this.
        [
            *("curl", "-q", "-sN", "--noproxy", "*", "-m", str(PATIENCE_S)),
            *("-w", r"\n%{http_code} %{content_type}", *posted, *args, address),
        ],
        input=None if body is None else json.dumps(body),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert run.returncode == 0, run
    text, _, end = run.stdout.rpartition("\n")
    status, _, kind = end.partition(" ")
    return Reply(int(status), kind, text)


def text_of(path: str, whole: dict[str, Any]) -> str:
    """The text of a whole answer."""
    match path:
        case "/v1/messages":
            return whole["content"][0]["text"]
        case "/v1/responses":
            return whole["output"][0]["content"][0]["text"]
        case "/v1/completions":
            return whole["choices"][0]["text"]
        case _:
            return whole["choices"][0]["message"]["content"]


def streamed_text(path: str, stream: str) -> str:
    """The text of a stream, put together."""
    match path:
        case "/v1/messages":
            return text_of(path, test_messages.put_together(sent_events(stream)))
        case "/v1/responses":
            return text_of(path, test_responses.together(sent_events(stream)))
        case "/v1/completions":
            return "".join(chunk["choices"][0]["text"] for chunk in chunks_of(stream))
        case _:
            return text_of(path, {"choices": [test_chat.together(chunks_of(stream))]})


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_and_its_stream(path: str) -> None:
    body = BODIES[path]
    with serving(ScriptedEngine(WORDS)) as server, on_port(server.app) as address:
        whole = curl(address + path, body=body)
        stream = curl(address + path, body=body | {"stream": True})
    assert (whole.status, whole.kind) == (200, "application/json")
    assert text_of(path, json.loads(whole.text)) == WORDS
    assert stream.status == 200 and stream.kind.startswith("text/event-stream")
    assert streamed_text(path, stream.text) == WORDS


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_a_status_and_says_what_is_wrong(path: str, stream: bool) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    with serving(ScriptedEngine(WORDS)) as server, on_port(server.app) as address:
        reply = curl(address + path, body=BODIES[path] | {limit: "many", "stream": stream})
        known = curl(f"{address}/v1/nothing")
    assert (reply.status, reply.kind) == (400, "application/json")
    error = json.loads(reply.text)["error"]
    assert error["type"] == "invalid_request_error" and limit in error["message"]
    assert known.status == 404 and json.loads(known.text)["error"]["message"]


def test_a_key_in_either_header() -> None:
    with (
        serving(ScriptedEngine(WORDS), access=Access(api_key=KEY)) as server,
        on_port(server.app) as address,
    ):
        models = f"{address}/v1/models"
        assert curl(models).status == curl(models, "-H", "x-api-key: another").status == 401
        for header in (f"x-api-key: {KEY}", f"Authorization: Bearer {KEY}"):
            reply = curl(models, "-H", header)
            assert reply.status == 200
            assert json.loads(reply.text)["data"][0]["id"] == "ds41"
