"""OpenAI's Chat Completions: bodies, chunks and whole answers."""

import json
from typing import Any

import pytest

from mlx_engine.errors import DeviceError
from mlx_engine.prompt import render
from mlx_engine.request import ANY_TOOL
from mlx_engine.sampling import Sampling
from mlx_engine.server.body import IMAGE_NOTE
from mlx_engine.server.chat import PATH, read
from mlx_engine.tokenizer import SPELLINGS
from tests.fake_engine import tiny_tokenizer, with_special_tokens
from tests.server.openai_events import (
    ARGUMENTS,
    TOOL,
    M,
    answering,
    calls_of,
    ok,
    refused,
    streamed,
)

Object = dict[str, Any]
TOOLS = [{"type": "function", "function": TOOL}]
HI: Object = {"role": "user", "content": "Hi"}
IMAGE: Object = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def body(*messages: Object, **fields: Any) -> Object:
    return {"model": "gpt-5", "messages": [*(messages or [HI])]} | fields


def prompt(*messages: Object, **fields: Any) -> str:
    """The prompt that a body makes."""
    conversation = read(body(*messages, **fields)).conversation
    assert conversation is not None
    return "".join(piece.text for piece in render(conversation))


def together(chunks: list[Object]) -> Object:
    """The whole answer that the chunks of a stream make."""
    message: Object = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[Object] = []
    finish_reason = None
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in chunks[1:]:
        assert (chunk["object"], chunk["model"]) == ("chat.completion.chunk", "ds41")
        assert chunk["id"] == chunks[0]["id"]
        for choice in chunk["choices"]:
            assert finish_reason is None
            finish_reason = choice["finish_reason"]
            delta = choice["delta"]
            assert len(delta) == (finish_reason is None)
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key, "")
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(calls)
                    calls.append({key: part[key] for key in ("id", "type", "function")})
                else:
                    assert part["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    if not message["reasoning_content"]:
        del message["reasoning_content"]
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return {"message": message, "finish_reason": finish_reason}


def without_ids(choice: Object) -> Object:
    """A choice but for what differs between two answers."""
    for call in choice["message"].get("tool_calls", ()):
        assert call.pop("id", "call_").startswith("call_")
    return {key: choice[key] for key in ("message", "finish_reason")}


@pytest.mark.parametrize(
    ("said", "fields", "message", "finish_reason"),
    [
        ("why</think>so é", {}, {"content": "so é", "reasoning_content": "why"}, "stop"),
        ("so", {"thinking": {"type": "disabled"}}, {"content": "so"}, "stop"),
        (
            "why</think>so",
            {"max_tokens": 5},
            {"content": "s", "reasoning_content": "why"},
            "length",
        ),
        ("</think>one STOP two", {"stop": "STOP"}, {"content": "one "}, "stop"),
        ("", {}, {"content": ""}, "stop"),
        (
            f"why</think>so{calls_of('f')}",
            {"tools": TOOLS},
            {"content": "so", "reasoning_content": "why", "tool_calls": ["f"]},
            "tool_calls",
        ),
        (
            f"why{calls_of('f', 'f')}",
            {"tools": TOOLS},
            {"content": None, "reasoning_content": "why", "tool_calls": ["f", "f"]},
            "tool_calls",
        ),
        (
            f"</think>{calls_of('f')}",
            {"tools": TOOLS, "tool_choice": "none"},
            {"content": ""},
            "stop",
        ),
        (
            f"</think>say <{M} calls>",
            {"tools": TOOLS},
            {"content": f"say <{M} calls>"},
            "stop",
        ),
    ],
)
def test_an_answer_whole_and_streamed(
    said: str, fields: Object, message: Object, finish_reason: str
):
    wanted: Object = {"role": "assistant"} | message
    if "tool_calls" in message:
        wanted["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
            for name in message["tool_calls"]
        ]
    with answering(said) as server:
        answer = ok(server, PATH, body(**fields))
        (choice,) = answer["choices"]
        assert without_ids(choice) == {"message": wanted, "finish_reason": finish_reason}
        assert (answer["object"], answer["model"]) == ("chat.completion", "ds41")
        chunks = streamed(server, PATH, body(**fields))
        assert without_ids(together(chunks)) == without_ids(choice)
        assert all("usage" not in chunk for chunk in chunks)


def test_cut_anywhere_in_a_call_both_forms_agree():
    said = f"</think>so{calls_of('f')}"
    for n in range(1, len(with_special_tokens(said, tiny_tokenizer())), 7):
        with answering(said) as server:
            request = body(tools=TOOLS, max_tokens=n)
            choice = without_ids(ok(server, PATH, request)["choices"][0])
            assert choice["finish_reason"] == "length"
            assert without_ids(together(streamed(server, PATH, request))) == choice
            for call in choice["message"].get("tool_calls", ()):
                json.loads(call["function"]["arguments"])


def test_the_account_of_tokens():
    with answering("why</think>so") as server:
        first = ok(server, PATH, body())["usage"]
        n = len(server.engine.courses[0].call.token_ids)
        assert first == {
            "prompt_tokens": n,
            "completion_tokens": 6,
            "total_tokens": n + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 4},
            "prompt_cache_hit_tokens": 0,
            "prompt_cache_miss_tokens": n,
        }
        *chunks, last = streamed(server, PATH, body(stream_options={"include_usage": True}))
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": n - 1}
        assert last["usage"]["total_tokens"] == n + 6


def test_the_next_turn_goes_on_from_the_last():
    """Calls spelled otherwise and a reasoning that does not return leave the prefix as it was."""
    with answering(f"why\n</think>so{calls_of('f')}", "</think>done") as server:
        first = ok(server, PATH, body(tools=TOOLS))
        message = first["choices"][0]["message"]
        del message["reasoning_content"]
        function = message["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(json.loads(function["arguments"]))
        result = {
            "role": "tool",
            "tool_call_id": message["tool_calls"][0]["id"],
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        }
        second = ok(server, PATH, body(HI, message, result, tools=TOOLS))
        before = first["usage"]["total_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == before


def test_what_a_body_says_reaches_the_engine():
    fields = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "seed": 7, "stop": ["a", "b"]}
    request = read(body(**fields, max_completion_tokens=9, max_tokens=99))
    assert request.sampling == Sampling(0.5, 0.9, 0.1, 7)
    assert (request.max_tokens, list(request.stop)) == (9, ["a", "b"])
    assert read(body(max_tokens=8)).max_tokens == 8
    plain = read(body())
    assert (plain.sampling, plain.max_tokens, plain.stop) == (Sampling(), None, [])
    assert read(body(temperature=None, seed=None, stop=None, tools=None)) is not None


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, 75),
        ({"reasoning_effort": "low"}, 50),
        ({"reasoning_effort": "minimal"}, 50),
        ({"reasoning": {"effort": "max"}}, 100),
        ({"reasoning_effort": "unheard-of"}, 75),
        ({"reasoning_effort": "none"}, None),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "max"}, None),
    ],
)
def test_the_effort_of_a_request(fields: Object, number: int | None):
    text = prompt(**fields)
    if number is None:
        assert "Reasoning Effort" not in text and text.endswith("</think>")
    else:
        assert f"Reasoning Effort: {number} " in text and text.endswith("<think>")


@pytest.mark.parametrize("schema", [None, {}, {"properties": {"a": {}}}, {"type": None}])
def test_parameters_without_a_type_are_an_object(schema: Object | None):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    request = read(body(tools=[tool])).conversation
    assert request is not None
    (declared,) = request.tools
    rest = {k: v for k, v in (schema or {}).items() if k != "type"}
    assert declared.parameters == (rest if schema is None else {"type": "object"} | rest)


def test_one_call_at_a_time():
    with answering(f"</think>{calls_of('f', 'f')}") as server:
        for wanted, n in ((None, 2), (True, 2), (False, 1)):
            request = body(tools=TOOLS, parallel_tool_calls=wanted)
            assert len(ok(server, PATH, request)["choices"][0]["message"]["tool_calls"]) == n


def test_the_chunks_of_a_stream():
    with answering(f"y</think>s{calls_of('f')}") as server:
        deltas = [
            chunk["choices"][0]["delta"] for chunk in streamed(server, PATH, body(tools=TOOLS))
        ]
    id = deltas[3]["tool_calls"][0]["id"]
    head = {"id": id, "type": "function", "function": {"name": "f", "arguments": ""}}
    assert deltas[:4] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "y"},
        {"content": "s"},
        {"tool_calls": [{"index": 0} | head]},
    ]
    fragments = ['{"path": "', "a", " ", '\\"', "b", '\\"', "\\n", '"', ', "n": 1.50', "}"]
    parts = [[{"index": 0, "function": {"arguments": fragment}}] for fragment in fragments]
    assert deltas[4:] == [*({"tool_calls": part} for part in parts), {}]


def test_developer_messages_stay_where_they_are():
    texts = ("First.", "Hi", "Second.")
    roles = ("developer", "user", "developer")
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    text = prompt(*messages)
    assert [text.index(each) for each in texts] == sorted(text.index(each) for each in texts)
    assert text.count(SPELLINGS["system"]) == 2


def test_a_last_answer_is_continued():
    begun = {"role": "assistant", "content": "Once "}
    with answering("upon") as server:
        request = body(HI, begun, thinking={"type": "disabled"})
        assert ok(server, PATH, request)["choices"][0]["message"]["content"] == "upon"
    assert prompt(HI, begun).endswith("</think>Once ")


@pytest.mark.parametrize(
    ("choice", "opened"),
    [
        ("required", ANY_TOOL),
        ({"type": "function", "function": {"name": "f"}}, "f"),
        ({"type": "function", "name": "f"}, "f"),
        ("auto", None),
        (None, None),
    ],
)
def test_a_call_can_be_asked_for(choice: Any, opened: str | None):
    request = read(body(tools=TOOLS, tool_choice=choice, reasoning_effort="max"))
    assert request.starts_in_call == opened
    assert request.conversation is not None
    assert request.conversation.thinking_mode == (opened is None)
    said = calls_of("f").split("calls>\n" if opened == ANY_TOOL else 'name="f">\n', 1)[1]
    with answering(said) as server:
        choices = ok(server, PATH, body(tools=TOOLS, tool_choice=choice))["choices"]
        assert choices[0]["finish_reason"] == ("tool_calls" if opened else "stop")


def test_images_of_earlier_turns_become_a_line():
    parts = [{"type": "text", "text": "See:"}, IMAGE]
    earlier = {"role": "user", "content": parts}
    text = prompt(earlier, {"role": "assistant", "content": "I see."}, HI)
    assert f"See:\n\n{IMAGE_NOTE}" in text
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": [IMAGE]}
    called: Object = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert f"<tool_result>{IMAGE_NOTE}</tool_result>" in prompt(HI, called, result)
    # A program that cannot put an image into a result puts it behind it.
    result |= {"content": "see below"}
    assert prompt(HI, called, result, {"role": "user", "content": parts}).count(IMAGE_NOTE) == 1
    # The image was asked about before the model called for more.
    assert prompt({"role": "user", "content": parts}, called, result).count(IMAGE_NOTE) == 1


CALLS = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
CUSTOM: Object = {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}


@pytest.mark.parametrize("kind", [None, ""])
def test_a_call_that_comes_back_needs_no_type(kind: str | None):
    """As clients send it that put a stream together and forget what only its start says."""
    call: Object = {"id": "1", "type": kind, "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "done"}
    text, plain = (
        prompt(HI, {"role": "assistant", "content": None, "tool_calls": [each]}, result)
        for each in (call, call | {"type": "function"})
    )
    assert text == plain


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"messages": None}, "messages: it is a list"),
        ({"messages": []}, "Empty input messages"),
        ({"messages": ["Hi"]}, "messages.0: it is an object"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "it is 'function'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: it is a string or a list"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "not Unicode"),
        ({"messages": [HI, CALLS]}, "last message calls a tool"),
        ({"messages": [HI, CUSTOM]}, "messages.1.tool_calls.0.type: calls of functions"),
        ({"messages": [HI, CALLS, HI]}, "must be followed by tool messages"),
        ({"messages": [HI, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0: functions"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": TOOLS + TOOLS}, "must be unique"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "'g', is not among"),
        ({"tool_choice": "required"}, "without any tool"),
        ({"n": 2}, "n: one answer"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "declare tools"),
        ({"temperature": "hot"}, "temperature: it is a number"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"seed": 1.5}, "seed: it is a whole number"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens: it is a whole number"),
        ({"stop": [1]}, "stop: it is missing, or no string"),
        ({"stop": [""]}, "a stop string is empty"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls: it is true or false"),
        ({"stream": "yes"}, "stream: it is true or false"),
        ({"stream_options": 1}, "stream_options: it is an object"),
        ({"thinking": {"type": 1}}, "thinking.type: it is a string"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(changed: Object, sentence: str):
    with answering("so") as server:
        data = json.dumps(body() | changed).encode()
        response = server.ask("POST", PATH, content=data)
        assert response.status_code == 400
        assert sentence in response.json()["error"]["message"]
        assert server.engine.courses == []


def test_too_long_a_prompt_has_the_code_that_clients_know():
    with answering("so", context_tokens=20) as server:
        assert refused(server, PATH, body())["code"] == "context_length_exceeded"


def test_a_fault_of_the_engine_ends_the_stream_with_an_error():
    with answering(DeviceError("the device is lost"), "</think>so") as server:
        response = server.ask("POST", PATH, json=body(stream=True))
        last = response.text.strip().split("\n\n")[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert "[DONE]" not in response.text
        assert ok(server, PATH, body())["choices"][0]["message"]["content"] == "so"
