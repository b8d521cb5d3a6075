"""Servers to test with: over an engine double, in the process or on a port of this machine."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from mlx_engine.server.app import create_app
from mlx_engine.server.connections import Connection
from mlx_engine.server.security import Access
from mlx_engine.server.service import Service
from mlx_engine.worker import AnsweringEngine, Load, Worker
from tests.scripted_engine import ScriptedEngine

PATIENCE_S = 20.0


def loading(engine: AnsweringEngine) -> Load:
    """A load that gives an engine at once."""

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> Generator[AnsweringEngine]:
        on_progress(1, 1)
        yield engine

    return load


@contextmanager
def working(load: Load, **options: Any) -> Generator[Worker]:
    """A worker that is stopped at the end."""
    worker = Worker(load, **options)
    worker.start()
    try:
        yield worker
    finally:
        assert worker.close(PATIENCE_S)


@dataclass(frozen=True)
class Server:
    """An application over a scripted engine, and ways to ask it."""

    app: ASGIApp
    service: Service
    engine: ScriptedEngine

    @property
    def worker(self) -> Worker:
        return self.service.worker

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request without a socket."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.request(method, path, **options)

        return asyncio.run(ask())

    def message(self, **body: Any) -> dict[str, Any]:
        """The message that /v1/messages answers with."""
        response = self.ask("POST", "/v1/messages", json=messages_body(**body))
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """The events that /v1/messages streams."""
        response = self.ask("POST", "/v1/messages", json=messages_body(stream=True, **body))
        assert response.status_code == 200, response.text
        return sent_events(response.text)


def messages_body(**body: Any) -> dict[str, Any]:
    """A body for /v1/messages; the prompt is short unless `messages` says otherwise."""
    plain: dict[str, Any] = {
        "model": "claude-opus-4-6",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    return plain | body


def sent_events(text: str) -> list[dict[str, Any]]:
    """The JSON of server-sent events; each has its type as its name."""
    events: list[dict[str, Any]] = []
    for part in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.splitlines())
        if lines:
            events.append(json.loads(lines["data"]))
            assert lines["event"] == events[-1]["type"]
    return events


@contextmanager
def serving(
    engine: ScriptedEngine,
    *,
    access: Access | None = None,
    load: Load | None = None,
    keep_alive_s: float = 5.0,
    whole_silence_s: float = 30.0,
    body_silence_s: float = PATIENCE_S,
    body_s: float = PATIENCE_S,
    count_s: float = PATIENCE_S,
    **options: Any,
) -> Generator[Server]:
    """A server over an engine double."""
    with working(load or loading(engine), **options) as worker:
        service = Service(
            worker,
            engine.tokenizer,
            engine.context_tokens,
            keep_alive_s=keep_alive_s,
            whole_silence_s=whole_silence_s,
            body_silence_s=body_silence_s,
            body_s=body_s,
            count_s=count_s,
        )
        yield Server(create_app(service, access or Access()), service, engine)


@contextmanager
def on_port(app: ASGIApp, *, keep_connection_s: int = 5) -> Generator[str]:
    """The application on a free port of this machine: its address."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=Connection,
        log_config=None,
        lifespan="off",
        timeout_keep_alive=keep_connection_s,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; fail when it takes long."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "this did not come about"
        time.sleep(0.002)
