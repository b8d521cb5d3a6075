"""What the OpenAI protocols' tests have in common: a scripted server and its streams."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import openai

from mlx_engine.tokenizer import SPELLINGS
from tests.scripted_engine import Answer, ScriptedEngine
from tests.server.support import Server, on_port, serving

M = SPELLINGS["dsml"]
TOOL: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object"}}


def calls_of(*names: str) -> str:
    """A block of calls, each with one text and one number."""
    parameters = (
        f'<{M} parameter name="path" string="true">a "b"\n</{M} parameter>\n'
        f'<{M} parameter name="n" string="false">1.50</{M} parameter>'
    )
    calls = "\n".join(f'<{M} invoke name="{n}">\n{parameters}\n</{M} invoke>' for n in names)
    return f"\n\n<{M} calls>\n{calls}\n</{M} calls>"


ARGUMENTS = '{"path": "a \\"b\\"\\n", "n": 1.50}'


@contextmanager
def answering(*answers: Answer, **options: Any) -> Generator[Server]:
    """A server whose engine says these answers."""
    with serving(ScriptedEngine(*answers, **options)) as server:
        yield server


@contextmanager
def openai_client(server: Server) -> Generator[openai.OpenAI]:
    """The vendor's client over a socket of this machine."""
    with (
        on_port(server.app) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ok(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer."""
    response = server.ask("POST", path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error that a body is answered with."""
    response = server.ask("POST", path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ends with [DONE]."""
    data = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") for part in data)
    assert data[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in data[:-1]]


def streamed(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of the same answer as a stream."""
    response = server.ask("POST", path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks_of(response.text)
