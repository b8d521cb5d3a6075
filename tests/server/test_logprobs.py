"""Log probabilities at the OpenAI endpoints, streamed and whole."""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from mlx_engine.answer import ReasoningDelta, TextDelta, TokenLogprob
from mlx_engine.engram_table import EngramStats
from mlx_engine.respond import End, Event, Progress, Request, Timings
from mlx_engine.server import chat, completions, responses_in
from tests.scripted_engine import ScriptedEngine
from tests.server.openai_events import ok, openai_client, refused, streamed
from tests.server.support import Server, sent_events, serving

Object = dict[str, Any]

HI = [{"role": "user", "content": "Hi"}]
EURO = "€".encode()
REASONING = (TokenLogprob(b"why", -0.25, ((b"why", -0.25), (b"how", -2.0))),)
# A character of two tokens, which one delta completes; and a token that was never likely.
FIRST = (
    TokenLogprob(b"so ", -0.5, ((b"so ", -0.5), (b"thus ", -1.5))),
    TokenLogprob(EURO[:2], -0.125, ()),
    TokenLogprob(EURO[2:], 0.0, ()),
)
SECOND = (TokenLogprob(b"!", -math.inf, ((b"?", -0.0625),)),)


class Saying(ScriptedEngine):
    """Answers every request with the same events, and keeps the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []

    def respond(self, request: Request, **options: Any) -> Generator[Event]:
        self.asked.append(request)
        yield Progress("prefill", 0, 1, 0.0)
        has_any = request.logprobs is not None
        if not request.raw:
            yield ReasoningDelta("why", REASONING if has_any else ())
        yield TextDelta("so €", FIRST if has_any else ())
        yield TextDelta("!", SECOND if has_any else ())
        timings, engram = Timings(1, 1, 1, 1), EngramStats()
        reasoning = "" if request.raw else "why"
        yield End("so €!", reasoning, 1, 0, 5, timings, engram, "stop")


@contextmanager
def saying() -> Generator[tuple[Server, Saying]]:
    engine = Saying()
    with serving(engine) as server:
        yield server, engine


def entry(token: bytes, logprob: float) -> Object:
    return {
        "token": token.decode(errors="replace"),
        "logprob": logprob,
        "bytes": list(token),
    }


ENTRIES: list[Object] = [
    entry(b"so ", -0.5) | {"top_logprobs": [entry(b"so ", -0.5), entry(b"thus ", -1.5)]},
    entry(EURO[:2], -0.125) | {"top_logprobs": []},
    entry(EURO[2:], 0.0) | {"top_logprobs": []},
    entry(b"!", -9999.0) | {"top_logprobs": [entry(b"?", -0.0625)]},
]
THOUGHT: list[Object] = [
    entry(b"why", -0.25) | {"top_logprobs": [entry(b"why", -0.25), entry(b"how", -2.0)]}
]


def test_a_chat() -> None:
    with saying() as (server, engine):
        body: Object = {"messages": HI, "logprobs": True, "top_logprobs": 2}
        (choice,) = ok(server, chat.PATH, body)["choices"]
        assert choice["logprobs"] == {
            "content": ENTRIES,
            "refusal": None,
            "reasoning_content": THOUGHT,
        }
        chunks = streamed(server, chat.PATH, body)
        assert [request.logprobs for request in engine.asked] == [2, 2]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert parts[0] is None and parts[-1] is None  # the role, and the end
    for name, wanted in (("content", ENTRIES), ("reasoning_content", THOUGHT)):
        assert [each for part in parts[1:-1] for each in part[name]] == wanted


def test_a_text() -> None:
    with saying() as (server, engine):
        body: Object = {"prompt": "Hi", "logprobs": 2}
        (choice,) = ok(server, completions.PATH, body)["choices"]
        assert choice["logprobs"] == {
            "tokens": ["so ", "\ufffd", "\ufffd", "!"],
            "token_logprobs": [-0.5, -0.125, 0.0, -9999.0],
            "top_logprobs": [
                {"so ": -0.5, "thus ": -1.5},
                {"\ufffd": -0.125},
                {"\ufffd": 0.0},
                {"!": -9999.0, "?": -0.0625},
            ],
            "text_offset": [0, 3, 4, 4],
        }
        chunks = streamed(server, completions.PATH, body)
        assert [request.logprobs for request in engine.asked] == [2, 2]
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert parts.pop() is None
        for name, wanted in choice["logprobs"].items():
            assert [each for part in parts for each in part[name]] == wanted
        (choice,) = ok(server, completions.PATH, {"prompt": "Hi", "logprobs": 0})["choices"]
        assert choice["logprobs"]["top_logprobs"] == [None] * 4


@pytest.mark.parametrize(
    "asked",
    [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 3}],
)
def test_a_response(asked: Object) -> None:
    with saying() as (server, engine):
        body = {"input": "Hi"} | asked
        whole = ok(server, responses_in.PATH, body)
        response = server.ask("POST", responses_in.PATH, json=body | {"stream": True})
        assert [r.logprobs for r in engine.asked] == [asked.get("top_logprobs", 0)] * 2
    assert whole["top_logprobs"] == asked.get("top_logprobs", 0)
    assert whole["output"][1]["content"][0]["logprobs"] == ENTRIES
    events = sent_events(response.text)
    kinds: dict[str, Callable[[Object], list[Object]]] = {
        "response.output_text.delta": lambda event: event["logprobs"],
        "response.output_text.done": lambda event: event["logprobs"],
        "response.content_part.done": lambda event: event["part"].get("logprobs", []),
    }
    for kind, logprobs in kinds.items():
        assert [each for e in events if e["type"] == kind for each in logprobs(e)] == ENTRIES


def test_nobody_gets_them_unasked() -> None:
    with saying() as (server, engine):
        for path, body in (
            (chat.PATH, {"messages": HI, "logprobs": False, "top_logprobs": 0}),
            (completions.PATH, {"prompt": "Hi", "logprobs": None}),
        ):
            assert ok(server, path, body)["choices"][0]["logprobs"] is None
            chunks = streamed(server, path, body)
            assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)
        body = {"input": "Hi", "include": ["reasoning.encrypted_content"]}
        answer = ok(server, responses_in.PATH, body)
        assert answer["output"][1]["content"][0]["logprobs"] == []
        assert {request.logprobs for request in engine.asked} == {None}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (chat.PATH, {"messages": HI, "logprobs": 1}, "logprobs: it is true or false"),
        (chat.PATH, {"messages": HI, "top_logprobs": 2}, "top_logprobs: it needs logprobs"),
        (
            chat.PATH,
            {"messages": HI, "logprobs": True, "top_logprobs": 21},
            "top_logprobs is 21, it must be from 0 to 20",
        ),
        (completions.PATH, {"prompt": "Hi", "logprobs": 6}, "logprobs is 6"),
        (completions.PATH, {"prompt": "Hi", "logprobs": -1}, "logprobs is -1"),
        (completions.PATH, {"prompt": "Hi", "logprobs": True}, "logprobs: it is a whole number"),
        (completions.PATH, {"prompt": "Hi", "logprobs": 1, "echo": True}, "leave out echo"),
        (responses_in.PATH, {"input": "Hi", "top_logprobs": -1}, "top_logprobs is -1"),
        (responses_in.PATH, {"input": "Hi", "include": "x"}, "include: it is a list"),
    ],
)
def test_what_cannot_be_asked_for(path: str, body: Object, words: str) -> None:
    with saying() as (server, engine):
        assert words in refused(server, path, body)["message"]
        assert engine.asked == []


def test_the_vendor_s_client_reads_them() -> None:
    with saying() as (server, _), openai_client(server) as client:
        answer = client.chat.completions.create(
            model="any", messages=cast(Any, HI), logprobs=True, top_logprobs=2
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [each.logprob for each in logprobs.content] == [-0.5, -0.125, 0.0, -9999.0]
        assert logprobs.content[0].top_logprobs[1].token == "thus "
        text = client.completions.create(model="any", prompt="Hi", logprobs=2)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.text_offset == [0, 3, 4, 4]


@pytest.mark.parametrize("said", ["why</think>so €, é!", "</think>one\n\ntwo ", "why"])
def test_of_an_answer_every_token_of_the_text_has_one(said: str) -> None:
    body: Object = {"messages": HI, "logprobs": True, "top_logprobs": 1}
    with serving(ScriptedEngine(said)) as server:
        (choice,) = ok(server, chat.PATH, body)["choices"]
        chunks = streamed(server, chat.PATH, body)
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for name in ("content", "reasoning_content"):
        tokens = choice["logprobs"][name]
        spelled = b"".join(bytes(token["bytes"]) for token in tokens).decode()
        assert spelled.strip() == (choice["message"].get(name) or "").strip()
        assert all(len(token["top_logprobs"]) == 1 for token in tokens)
        assert [each for part in parts for each in part[name]] == tokens
