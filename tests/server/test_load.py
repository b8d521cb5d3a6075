"""Many clients at once, half of them leaving at any moment: nobody else's answer changes.

Each answer must be the one that the request gets when it is served alone, by another engine, with
nothing kept from other requests.
"""

import asyncio
import logging
import random
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mlx_engine.engine import Engine
from mlx_engine.loading import OpenModel
from mlx_engine.respond import End, Request
from mlx_engine.server import messages_in
from tests.server.real import RealServer, load, open_tiny, real_server
from tests.server.support import sent_events, until

CLIENTS = 50
BODIES = 8
ANSWER_TOKENS = 12
# What separates the tokens of an answer from the next likely ones, far above the noise that other
# chunks of a prompt make.
MARGIN = 0.05
LEAVE_WITHIN_S = 1.5
PATIENCE_S = 120.0

Body = dict[str, Any]
# Reasoning, text and the reason of the end.
Answer = tuple[str, str, str]
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    return open_tiny(tmp_path_factory.mktemp("tiny"))


def conversation(rng: random.Random, heads: list[str]) -> Body:
    """One of a few heads, and one to three turns that nobody else has."""
    messages: list[Body] = []
    for i in range(rng.choice((1, 3))):
        words = " ".join(rng.choice(("alpha", "beta", "gamma", "delta")) for _ in range(6))
        messages.append({"role": ("user", "assistant")[i % 2], "content": words})
    return {
        "model": "ds41",
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "system": rng.choice(heads),
        "messages": messages,
    }


def served_alone(opened: OpenModel, folder: Path) -> list[tuple[Body, Answer]]:
    """Requests whose answers are no close call, and what an engine of their own says to each."""
    rng = random.Random(0)
    heads = [f"You are agent {i}. " + "Be brief and kind. " * 4 for i in range(3)]
    found: list[tuple[Body, Answer]] = []
    with load(opened, folder, contexts=1) as engine:
        while len(found) < BODIES:
            body = conversation(rng, heads)
            request = messages_in.read(body)
            engine.reset()
            *_, end = engine.respond(request)
            assert isinstance(end, End)
            answer = (end.reasoning, end.text, STOP_REASONS[end.finish_reason])
            if end.completion_tokens == ANSWER_TOKENS and is_clear(engine, request):
                found.append((body, answer))
    return found


def is_clear(engine: Engine, request: Request) -> bool:
    """Whether no token of the answer was a close call."""
    prompt = request.encode(engine.tokenizer).token_ids
    answer = engine.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0)
    said = [token for token in answer if isinstance(token, int)]
    at = range(len(prompt) - 1, len(prompt) + len(said) - 1)
    best = np.sort(engine.logits([*prompt, *said], at), axis=-1)[:, -2:]
    return bool(np.diff(best).min() > MARGIN)


async def ask(http: httpx.AsyncClient, body: Body, *, stream: bool) -> Answer:
    """An answer, whole or put together from its stream."""
    reply = await http.post("/v1/messages", json=body | {"stream": stream})
    assert reply.status_code == 200, reply.text
    parts = {"thinking": "", "text": ""}
    if not stream:
        message = reply.json()
        for block in message["content"]:
            parts[block["type"]] += block[block["type"]]
        return parts["thinking"], parts["text"], message["stop_reason"]
    stop_reason = ""
    for event in sent_events(reply.text):
        delta = event.get("delta", {})
        for kind in parts:
            parts[kind] += delta.get(kind, "")
        stop_reason = delta.get("stop_reason", stop_reason)
    return parts["thinking"], parts["text"], stop_reason


async def leave(http: httpx.AsyncClient, body: Body, *, after_s: float, stream: bool) -> None:
    """Close the connection, whatever has come by then."""
    try:
        await asyncio.wait_for(ask(http, body, stream=stream), after_s)
    except TimeoutError:
        pass


async def crowd(server: RealServer, pool: list[tuple[Body, Answer]], seconds: float) -> list[bool]:
    """Whether each answer was the right one; every client that stays has one at least."""
    end_s = time.monotonic() + seconds
    right: list[bool] = []

    async def client(number: int) -> None:
        rng = random.Random(number)
        while True:
            body, answer = rng.choice(pool)
            stream = rng.random() < 0.5
            if number % 2:
                await leave(http, body, after_s=rng.uniform(0, LEAVE_WITHIN_S), stream=stream)
            else:
                right.append(await ask(http, body, stream=stream) == answer)
            if time.monotonic() > end_s:
                return

    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(
        base_url=server.address, timeout=PATIENCE_S, limits=limits, trust_env=False
    ) as http:
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return right


@pytest.mark.parametrize("seconds", [10, pytest.param(180, marks=pytest.mark.slow)])
def test_no_answer_changes_for_who_comes_and_goes(
    opened: OpenModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    pool = served_alone(opened, tmp_path)
    with real_server(opened, tmp_path, contexts=3) as server:
        right = asyncio.run(crowd(server, pool, seconds))
        until(lambda: server.worker.jobs() == [])
        counts, stats = server.worker.counts, server.engine.session_stats()
    assert len(right) >= CLIENTS / 2 and all(right), right.count(False)
    assert counts.failed == counts.refused == 0 and counts.cancelled > 0
    held_bytes = stats.state_bytes + stats.checkpoint_bytes + stats.leaving_bytes
    assert held_bytes <= stats.budget_bytes
    # Most of what was asked again was known.
    assert counts.cached_tokens > counts.prompt_tokens / 2
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []
