"""Whatever a body holds, the OpenAI endpoints answer it or say what is wrong with it."""

import json
from collections.abc import Generator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.server import chat, completions, responses_in
from tests.server.openai_events import TOOL, answering
from tests.server.support import Server

BODIES: dict[str, dict[str, Any]] = {
    chat.PATH: {
        "messages": [
            {"role": "developer", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "thinking": {"type": "enabled"},
        "reasoning": {"effort": "low"},
        "response_format": {"type": "text"},
    },
    completions.PATH: {"prompt": ["x"], "stop": ["y"], "stream_options": {}, "echo": True},
    responses_in.PATH: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "instructions": "x",
        "tools": [{"type": "function"} | TOOL, {"type": "namespace", "name": "n", "tools": []}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
    },
}
FIELDS = (
    "max_tokens max_completion_tokens max_output_tokens temperature top_p min_p top_k seed n "
    "best_of logprobs top_logprobs stream parallel_tool_calls reasoning_effort suffix user"
).split()

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=3,
)


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    with answering("so", context_tokens=10_000) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
def test_the_body_that_is_changed_is_answered(server: Server, path: str):
    assert server.ask("POST", path, json=BODIES[path]).status_code == 200


def keys(value: Any) -> list[Any]:
    """What leads from an object or a list to its values; nothing for other values."""
    if isinstance(value, dict):
        return sorted(cast(dict[str, Any], value))
    return list(range(len(cast(list[Any], value)))) if isinstance(value, list) else []


@pytest.mark.parametrize("path", BODIES)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_body_is_answered_or_refused(server: Server, path: str, data: st.DataObject):
    """A sound body with one of its values replaced, at any depth, and one more field."""
    body = json.loads(json.dumps(BODIES[path]))
    place: Any = body
    key = data.draw(st.sampled_from(keys(place)))
    while keys(place[key]) and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(keys(place)))
    place[key] = data.draw(values)
    body |= data.draw(st.dictionaries(st.sampled_from(FIELDS), values, max_size=1))
    response = server.ask("POST", path, content=json.dumps(body).encode())
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]
