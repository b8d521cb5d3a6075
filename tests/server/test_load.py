"""Many clients at once, half of them leaving at any moment: nobody else's answer changes.

Each answer must be the one that the request gets when it is served alone, by another server, with
nothing kept from other requests; in every protocol, with tools and thinking or without.
"""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_engine.engine import Engine
from mlx_engine.loading import OpenModel
from mlx_engine.request import Request
from mlx_engine.sampling import ScoredToken
from mlx_engine.server import chat, completions, messages_in, messages_out, responses_in
from tests.server import test_chat, test_messages, test_responses
from tests.server.openai_events import chunks_of
from tests.server.real import RealServer, open_tiny, real_server
from tests.server.support import sent_events, until

CLIENTS = 50
ANSWER_TOKENS = 12
# What separates the tokens of an answer from the next likely ones, far above the noise that other
# chunks of a prompt make.
MARGIN = 0.05
LEAVE_WITHIN_S = 1.5
PATIENCE_S = 120.0

Object = dict[str, Any]


def of_message(message: Object) -> Object:
    kept = test_messages.without_ids(message)
    return {key: kept[key] for key in ("content", "stop_reason", "stop_sequence")}


def of_response(response: Object) -> Object:
    return {"status": response["status"], "output": test_responses.without_ids(response)}


def of_text(completion: Object) -> Object:
    (choice,) = completion["choices"]
    return {key: choice[key] for key in ("text", "finish_reason")}


def of_texts(stream: str) -> Object:
    choices = [chunk["choices"][0] for chunk in chunks_of(stream)]
    text = "".join(choice["text"] for choice in choices)
    return {"text": text, "finish_reason": choices[-1]["finish_reason"]}


def without_signs(events: list[Object]) -> list[Object]:
    """A stream of /v1/responses but for the signs of life that it gives while it waits."""
    kept = [each for i, each in enumerate(events) if i < 2 or each["type"] != events[1]["type"]]
    return [each | {"sequence_number": i} for i, each in enumerate(kept)]


@dataclass(frozen=True)
class Protocol:
    """How a body is read, and what of a whole answer and of a stream every answer has alike."""

    path: str
    read: Callable[[Object], Request]
    of_whole: Callable[[Object], Object]
    of_stream: Callable[[str], Object]


MESSAGES = Protocol(
    messages_out.PATH,
    messages_in.read,
    of_message,
    lambda stream: of_message(test_messages.put_together(sent_events(stream))),
)
CHAT = Protocol(
    chat.PATH,
    chat.read,
    lambda whole: test_chat.without_ids(whole["choices"][0]),
    lambda stream: test_chat.without_ids(test_chat.together(chunks_of(stream))),
)
TEXTS = Protocol(completions.PATH, completions.read, of_text, of_texts)
RESPONSES = Protocol(
    responses_in.PATH,
    lambda body: responses_in.read(body).request,
    of_response,
    lambda stream: of_response(test_responses.together(without_signs(sent_events(stream)))),
)


@dataclass(frozen=True)
class Asked:
    """A request, and the answer that it gets alone."""

    protocol: Protocol
    body: Object
    answer: Object


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    return open_tiny(tmp_path_factory.mktemp("tiny"))


def body_for(
    protocol: Protocol, rng: random.Random, head: str, *, has_tools: bool, is_thinking: bool
) -> Object:
    """A head that others have too, and one to three turns that nobody else has."""
    turns: list[Object] = []
    for i in range(rng.choice((1, 3))):
        words = " ".join(rng.choice(("alpha", "beta", "gamma", "delta")) for _ in range(6))
        turns.append({"role": ("user", "assistant")[i % 2], "content": words})
    body: Object = {"model": "ds41", "temperature": 0, "max_tokens": ANSWER_TOKENS}
    if protocol is TEXTS:
        return body | {"prompt": "\n".join([head, *(turn["content"] for turn in turns)])}
    if protocol is MESSAGES:
        thinking = {"type": "adaptive" if is_thinking else "disabled"}
        body |= {"system": head, "messages": turns, "thinking": thinking}
        return body | {"tools": [test_messages.TOOL]} if has_tools else body
    effort = "high" if is_thinking else "none"
    if protocol is CHAT:
        system: Object = {"role": "system", "content": head}
        body |= {"messages": [system, *turns], "reasoning_effort": effort}
        return body | {"tools": test_chat.TOOLS} if has_tools else body
    body["max_output_tokens"] = body.pop("max_tokens")
    body |= {"instructions": head, "input": turns, "reasoning": {"effort": effort}}
    return body | {"tools": test_responses.TOOLS} if has_tools else body


def served_alone(opened: OpenModel, folder: Path) -> list[Asked]:
    """Requests whose answers are no close call, and what a server of their own says to each."""
    rng = random.Random(0)
    heads = [f"You are agent {i}. " + "Be brief and kind. " * 4 for i in range(3)]
    asked: list[Asked] = []
    with (
        real_server(opened, folder, contexts=1) as server,
        httpx.Client(base_url=server.address, timeout=PATIENCE_S, trust_env=False) as http,
    ):
        for protocol, has_tools in itertools.product(
            (MESSAGES, CHAT, TEXTS, RESPONSES), (False, True)
        ):
            # Both with tools and without, some think.
            is_thinking = has_tools == (protocol is CHAT)
            while True:
                body = body_for(
                    protocol, rng, rng.choice(heads), has_tools=has_tools, is_thinking=is_thinking
                )
                if is_clear(server.engine, protocol.read(body)):
                    break
            server.engine.reset()
            reply = http.post(protocol.path, json=body)
            assert reply.status_code == 200, reply.text
            asked.append(Asked(protocol, body, protocol.of_whole(reply.json())))
            until(lambda: server.worker.jobs() == [])
    return asked


def is_clear(engine: Engine, request: Request) -> bool:
    """Whether a request's answer is long, and no token of it was a close call."""
    prompt = request.encode(engine.tokenizer).token_ids
    answer = engine.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0, logprobs=2)
    said = [token for token in answer if isinstance(token, ScoredToken)]
    margins = [token.top[0][1] - token.top[1][1] for token in said]
    return len(said) == ANSWER_TOKENS and min(margins) > MARGIN


async def ask(http: httpx.AsyncClient, asked: Asked, *, stream: bool) -> Object:
    """An answer, whole or put together from its stream."""
    protocol = asked.protocol
    reply = await http.post(protocol.path, json=asked.body | {"stream": stream})
    assert reply.status_code == 200, reply.text
    return protocol.of_stream(reply.text) if stream else protocol.of_whole(reply.json())


async def leave(http: httpx.AsyncClient, asked: Asked, *, after_s: float, stream: bool) -> None:
    """Close the connection, whatever has come by then."""
    try:
        await asyncio.wait_for(ask(http, asked, stream=stream), after_s)
    except TimeoutError:
        pass


async def crowd(server: RealServer, pool: list[Asked], seconds: float) -> list[tuple[str, bool]]:
    """The path of each answer, and whether it was right; every client that stays has one."""
    end_s = time.monotonic() + seconds
    right: list[tuple[str, bool]] = []

    async def client(number: int) -> None:
        # So that the clients who stay ask for everything.
        rng, is_first = random.Random(number), True
        while True:
            asked = pool[number // 2 % len(pool)] if is_first else rng.choice(pool)
            is_first = False
            stream = rng.random() < 0.5
            if number % 2:
                await leave(http, asked, after_s=rng.uniform(0, LEAVE_WITHIN_S), stream=stream)
            else:
                answer = await ask(http, asked, stream=stream)
                right.append((asked.protocol.path, answer == asked.answer))
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
    assert len(right) >= CLIENTS / 2
    assert [path for path, is_right in right if not is_right] == []
    assert {path for path, _ in right} == {asked.protocol.path for asked in pool}
    assert counts.failed == counts.refused == 0 and counts.cancelled > 0
    held_bytes = stats.state_bytes + stats.checkpoint_bytes + stats.leaving_bytes
    assert held_bytes <= stats.budget_bytes
    # Most of what was asked again was known.
    assert counts.cached_tokens > counts.prompt_tokens / 2
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []
