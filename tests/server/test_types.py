"""Wrong types of known fields are refused at any depth, as the vendors' servers refuse them.

Bodies that hold most of what an endpoint knows, of which each value is replaced by those of other
types; what has no meaning to the server, such as a tool's arguments, may be anything.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest

from mlx_engine.server import chat, completions, messages_in, responses_in
from mlx_engine.server.fields import Types
from tests.scripted_engine import ScriptedEngine
from tests.server.support import serving

Object = dict[str, Any]

FUNCTION: Object = {"name": "f", "description": "d", "parameters": {"type": "object"}}
SAMPLING: Object = {"temperature": 0.5, "top_p": 0.5, "min_p": 0.1, "top_k": 3, "seed": -5}
OF_OPENAI: Object = SAMPLING | {"model": "m", "stream": False, "user": "u"}

BODIES: dict[str, Object] = {
    "/v1/messages": {
        **SAMPLING,
        "model": "m",
        "max_tokens": 9,
        "metadata": {"user_id": "u"},
        "stream": False,
        "stop_sequences": ["zz"],
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"},
        "output_config": {"effort": "low"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"q": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "1",
                        "is_error": False,
                        "content": [{"type": "text", "text": "r"}],
                    },
                    {"type": "text", "text": "now"},
                ],
            },
        ],
        "tools": [
            {
                "type": "custom",
                "name": "f",
                "description": "d",
                "input_schema": {"type": "object"},
                "strict": False,
            }
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    },
    chat.PATH: {
        **OF_OPENAI,
        "best_of": 1,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 9,
        "max_tokens": 9,
        "metadata": {"a": "b"},
        "messages": [
            {"role": "developer", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": "x",
                "reasoning_content": "r",
                "reasoning": "other",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        "n": 1,
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low"},
        "response_format": {"type": "text"},
        "stop": ["zz"],
        "store": False,
        "stream_options": {"include_usage": True},
        "thinking": {"type": "enabled"},
        "tools": [{"type": "function", "function": FUNCTION | {"strict": False}}],
        "tool_choice": "auto",
    },
    responses_in.PATH: {
        **OF_OPENAI,
        "background": False,
        "client_metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"],
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {
                "type": "reasoning",
                "id": "r",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "x"}],
                "encrypted_content": "e",
            },
            {
                "type": "function_call",
                "call_id": "1",
                "id": "i",
                "name": "f",
                "arguments": "{}",
                "status": "completed",
            },
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "instructions": "x",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low"},
        "safety_identifier": "i",
        "service_tier": "auto",
        "store": False,
        "stream_options": {},
        "text": {"format": {"type": "text"}},
        "tools": [
            {"type": "function"} | FUNCTION,
            {"type": "namespace", "name": "n", "description": "d", "tools": []},
        ],
        "tool_choice": "auto",
        "top_logprobs": 2,
        "truncation": "disabled",
    },
    completions.PATH: {
        **OF_OPENAI,
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "logit_bias": {"5": 1},
        "logprobs": 2,
        "max_tokens": 9,
        "n": 1,
        "prompt": ["x"],
        "stop": ["zz"],
        "stream_options": {"include_usage": True},
        "suffix": "",
    },
}

# The servers' own counterpart has these too; none of them means anything here.
FREE = re.compile(
    r"metadata\.\w+|client_metadata\.\w+|logit_bias\.5|.*\.input\.q|.*cache_control\.type"
)
# What may be of a second type, by the last names of its place.
SECOND: dict[str, tuple[type, ...]] = {
    "content": (str, list),
    "system": (str,),
    "stop": (str,),
    "prompt": (str,),
    "input": (str,),
    "output": (list,),
    "arguments": (dict,),
    "logprobs": (bool,),
}
VALUES: tuple[Any, ...] = (
    *("x", "", 5, 0, -1, 1.5, True, False),
    *({}, {"a": 1}, [], ["x"], [1], [{}]),
)


def places(value: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], object]]:
    """Every value inside another one, with the keys that lead to it."""
    if place:
        yield place, value
    if isinstance(value, dict):
        for key, inner in cast(Object, value).items():
            yield from places(inner, (*place, key))
    elif isinstance(value, list):
        for i, inner in enumerate(cast(list[Any], value)):
            yield from places(inner, (*place, i))


def replaced(body: Object, place: tuple[Any, ...], value: Any) -> Object:
    body = copy.deepcopy(body)
    holder: Any = body
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return body


@pytest.mark.parametrize("path", BODIES)
def test_a_value_of_a_wrong_type_is_refused_wherever_it_stands(path: str) -> None:
    body = BODIES[path]
    with serving(ScriptedEngine("</think>Hello", context_tokens=10_000)) as server:
        assert server.ask("POST", path, json=body).status_code == 200
        n_answered = len(server.engine.courses)
        for place, value in places(body):
            where = ".".join(map(str, place))
            if FREE.fullmatch(where):
                continue
            own = type(value)
            allowed = (own, *SECOND.get(str(place[-1]), ()))
            for other in VALUES:
                if type(other) in allowed or (type(other) is int and float in allowed):
                    continue
                response = server.ask("POST", path, json=replaced(body, place, other))
                assert response.status_code == 400, (where, other)
                error = response.json()
                assert error["error"]["type"] == "invalid_request_error"
                assert error["error"]["message"], (where, other)
                assert ("request_id" in error) == (path == "/v1/messages")
        assert len(server.engine.courses) == n_answered


@pytest.mark.parametrize("path", BODIES)
def test_null_is_as_good_as_no_value(path: str) -> None:
    """So clients send it that write all fields of a type."""
    body = BODIES[path]
    with serving(ScriptedEngine("</think>Hello", context_tokens=10_000)) as server:
        for place, _ in places(body):
            if isinstance(place[-1], int) or FREE.fullmatch(".".join(map(str, place))):
                continue
            null = replaced(body, place, None)
            holder: Any = (absent := copy.deepcopy(body))
            for key in place[:-1]:
                holder = holder[key]
            del holder[place[-1]]
            prompts: list[Any] = []
            for each in (null, absent):
                courses = server.engine.courses[:]
                status = server.ask("POST", path, json=each).status_code
                assert status in (200, 400)
                is_answered = status == 200
                assert len(server.engine.courses) == len(courses) + is_answered
                prompts.append(server.engine.courses[-1].call.token_ids if is_answered else None)
            assert prompts[0] == prompts[1], place


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/messages", ("tools", 0, "name")),
        ("/v1/messages", ("messages", 2, "content", 0, "content", 0, "text")),
        (chat.PATH, ("tools", 0, "function", "name")),
        (responses_in.PATH, ("tools", 0, "name")),
        (responses_in.PATH, ("tools", 1, "name")),
        (responses_in.PATH, ("input", 1, "content", 0, "text")),
    ],
)
def test_what_is_missing_is_named_by_its_place(path: str, place: tuple[Any, ...]) -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        answer = server.ask("POST", path, json=replaced(BODIES[path], place, None))
        assert answer.status_code == 400
        where = ".".join(map(str, place))
        assert answer.json()["error"]["message"] == f"{where}: it is missing, or no string"


KNOWN: dict[str, Types] = {
    "/v1/messages": messages_in.KNOWN_FIELDS,
    chat.PATH: chat.KNOWN_FIELDS,
    responses_in.PATH: responses_in.KNOWN_FIELDS,
    completions.PATH: completions.KNOWN_FIELDS,
}


@pytest.mark.parametrize("path", BODIES)
def test_a_known_field_has_its_type(path: str) -> None:
    """Also those that are refused whatever they say, and so are in no body."""
    with serving(ScriptedEngine("</think>Hello")) as server:
        for name, types in KNOWN[path].items():
            allowed = types if isinstance(types, tuple) else (types,)
            for value in VALUES:
                if type(value) in allowed or (type(value) is int and float in allowed):
                    continue
                message = server.ask("POST", path, json=BODIES[path] | {name: value}).json()
                assert message["error"]["message"].startswith(f"{name}: it is "), (name, value)


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_number_may_be_written_as_another(path: str) -> None:
    """As languages write it that have but one kind of number."""
    body = BODIES[path]
    with serving(ScriptedEngine("</think>Hello", context_tokens=10_000)) as server:
        numbers = [
            (place, number)
            for place, number in places(body)
            if type(number) is int and not FREE.fullmatch(".".join(map(str, place)))
        ]
        for place, number in numbers:
            answer = server.ask("POST", path, json=replaced(body, place, float(number)))
            assert answer.status_code == 200, (place, answer.text)
        first, *others = (course.call for course in server.engine.courses)
        assert len(numbers) > 3 and len(others) == len(numbers) - 1
        for call in others:
            assert repr(call) == repr(first)


@pytest.mark.parametrize("path", ["/v1/messages", chat.PATH])
def test_settings_of_thinking_are_the_vendors(path: str) -> None:
    hi: Object = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    with serving(ScriptedEngine("</think>Hello")) as server:
        for thinking, words in (
            ({"type": ["enabled"]}, "thinking.type: it is a string"),
            ({"type": "enabled", "budget_tokens": "5000"}, "thinking.budget_tokens: it is a whole"),
            ({"type": "enabled", "budget_tokens": 0.5}, "thinking.budget_tokens: it is a whole"),
            ("enabled", "thinking: it is an object"),
        ):
            response = server.ask("POST", path, json=hi | {"thinking": thinking})
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]

        def prompt(thinking: Object) -> Any:
            assert server.ask("POST", path, json=hi | {"thinking": thinking}).status_code == 200
            return server.engine.courses[-1].call.token_ids

        on, off = prompt({}), prompt({"type": "disabled"})
        assert on != off
        # Claude Code sends budgets that Anthropic's own servers would refuse.
        for budget_tokens in (-1, 0, 999, 1024, 10**30):
            for kind, expected in (
                ("enabled", on),
                ("adaptive", on),
                ("of another year", on),
                ("", on),
                ("disabled", off),
            ):
                assert prompt({"type": kind, "budget_tokens": budget_tokens}) == expected
