"""The exact streams of every endpoint, as files to read: golden/*.txt.

`python -m tests.server.test_golden` writes them anew; what differs between two runs (ids, times,
signatures) is put in order there.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlx_engine.errors import DeviceError
from mlx_engine.tokenizer import SPELLINGS
from tests.scripted_engine import Course, ScriptedEngine
from tests.server.support import serving

GOLDEN = Path(__file__).with_name("golden")
M = SPELLINGS["dsml"]

INVOKE = (
    f'<{M} invoke name="f">\n<{M} parameter name="n" string="false">1</{M} parameter>\n'
    f"</{M} invoke>\n"
)


def block(*invokes: str) -> str:
    return f"\n\n<{M} calls>\n{''.join(invokes)}</{M} calls>"


@dataclass(frozen=True)
class Scenario:
    """What the model says, what the client limits, and after which token the engine fails."""

    said: str
    max_tokens: int = 1000
    stop: list[str] = field(default_factory=list[str])
    fails_after: int | None = None


SCENARIOS = {
    "text": Scenario("</think>Hi"),
    "thinking and text": Scenario("Hm</think>Hi"),
    "only thinking": Scenario("Hm"),
    "nothing": Scenario("</think>"),
    "a tool call": Scenario(f"Hm</think>Hi{block(INVOKE)}"),
    "parallel calls": Scenario(f"</think>{block(INVOKE, INVOKE)}"),
    "a call without the end of thinking": Scenario(f"Hm{block(INVOKE)}"),
    "length inside a call": Scenario(f"</think>{block(INVOKE)}", max_tokens=69),
    "length inside thinking": Scenario("Hm", max_tokens=1),
    "a stop string": Scenario("</think>Hi STOP", stop=["STOP"]),
    "an error in the middle": Scenario("</think>Hi", fails_after=2),
    "an error in a call": Scenario(f"</think>{block(INVOKE)}", fails_after=40),
}

# A text to be continued has neither thinking nor calls.
TEXTS = {
    "text": Scenario("Hi"),
    "length": Scenario("Hi", max_tokens=1),
    "a stop string": Scenario("Hi STOP", stop=["STOP"]),
    "an error in the middle": Scenario("Hi", fails_after=1),
}

QUESTION = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}}
FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": SCHEMA}


def messages(scenario: Scenario) -> dict[str, Any]:
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    return {
        "max_tokens": scenario.max_tokens,
        "stop_sequences": scenario.stop,
        "messages": QUESTION,
        "tools": [tool],
    }


def chat(scenario: Scenario) -> dict[str, Any]:
    return {
        "max_completion_tokens": scenario.max_tokens,
        "stop": scenario.stop,
        "messages": QUESTION,
        "tools": [{"type": "function", "function": FUNCTION}],
        "stream_options": {"include_usage": True},
    }


def responses(scenario: Scenario) -> dict[str, Any]:
    tools = [{"type": "function", **FUNCTION}]
    return {"max_output_tokens": scenario.max_tokens, "input": "Hi", "tools": tools}


def completions(scenario: Scenario) -> dict[str, Any]:
    return {"max_tokens": scenario.max_tokens, "stop": scenario.stop, "prompt": "Hi"}


ENDPOINTS = {
    "messages": ("/v1/messages", messages, SCENARIOS),
    "chat": ("/v1/chat/completions", chat, SCENARIOS),
    # It has no stop strings.
    "responses": (
        "/v1/responses",
        responses,
        {name: scenario for name, scenario in SCENARIOS.items() if not scenario.stop},
    ),
    "completions": ("/v1/completions", completions, TEXTS),
}


def in_order(text: str) -> str:
    """A stream with its ids numbered, and without times and signatures."""
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        kind = match[1]
        n = sum(each.startswith(kind) for each in numbers.values()) + 1
        return numbers.setdefault(match[0], f"{kind}{n}")

    text = re.sub(r"\b([a-z]+[_-])[0-9a-f]{16,24}\b", number, text)
    text = re.sub(r'"(created(?:_at)?)":\d+', r'"\1":0', text)
    return re.sub(r'"(signature|encrypted_content)":"[\w-]{43}"', r'"\1":"..."', text)


def stream(path: str, body: dict[str, Any], scenario: Scenario) -> str:
    """What the endpoint streams."""

    def fail(course: Course) -> None:
        if len(course.said) == scenario.fails_after:
            raise DeviceError("the device is lost: start the server again")

    with serving(ScriptedEngine(scenario.said, before_step=fail)) as server:
        response = server.ask("POST", path, json=body | {"model": "any", "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return in_order(response.text)


def streams(endpoint: str) -> str:
    path, body, scenarios = ENDPOINTS[endpoint]
    return "".join(
        f"== {name}\n\n{stream(path, body(scenario), scenario)}"
        for name, scenario in scenarios.items()
    )


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_stream_is_the_golden_one(endpoint: str) -> None:
    golden = (GOLDEN / f"{endpoint}.txt").read_text()
    assert streams(endpoint).split("\n\n") == golden.split("\n\n")


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in ENDPOINTS:
        (GOLDEN / f"{name}.txt").write_text(streams(name))
