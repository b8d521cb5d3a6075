"""OpenAI's Responses: items, and the grammar of their stream."""

import json
from typing import Any

import pytest

from mlx_engine.errors import DeviceError
from mlx_engine.prompt import render
from mlx_engine.request import ANY_TOOL
from mlx_engine.sampling import Sampling
from mlx_engine.server.body import IMAGE_NOTE
from mlx_engine.server.responses_in import PATH, read
from mlx_engine.tokenizer import SPELLINGS
from tests.fake_engine import tiny_tokenizer, with_special_tokens
from tests.server.openai_events import (
    ARGUMENTS,
    TOOL,
    answering,
    calls_of,
    ok,
    refused,
)
from tests.server.support import Server, sent_events

Object = dict[str, Any]
TOOLS: list[Object] = [{"type": "function"} | TOOL]
HI: Object = {"role": "user", "content": "Hi"}
IMAGE: Object = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
PATCH: list[Object] = [{"type": "custom", "name": "apply_patch"}]
SPACE: list[Object] = [{"type": "namespace", "name": "ns", "description": "d", "tools": TOOLS}]


def body(*items: Object, **fields: Any) -> Object:
    return {"model": "gpt-5", "input": list(items) or "Hi"} | fields


def prompt(*items: Object, **fields: Any) -> str:
    """The prompt that a body makes."""
    conversation = read(body(*items, **fields)).request.conversation
    assert conversation is not None
    return "".join(piece.text for piece in render(conversation))


def streamed(server: Server, request: Object) -> list[Object]:
    response = server.ask("POST", PATH, json=request | {"stream": True})
    assert response.status_code == 200, response.text
    said = "\n\n".join(part for part in response.text.split("\n\n") if not part.startswith(":"))
    return sent_events(said)


def together(events: list[Object]) -> Object:
    """The response of a stream whose grammar is right: every part adds up to its whole."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    items: list[Object] = []
    open_item: Object | None = None
    said = ""
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items)
        if kind == "output_item.added":
            assert open_item is None and event["item"]["status"] == "in_progress"
            open_item, said = event["item"], ""
            continue
        assert open_item is not None
        if kind == "output_item.done":
            assert event["item"]["id"] == open_item["id"]
            items.append(event["item"])
            open_item = None
            continue
        assert event["item_id"] == open_item["id"]
        if kind.endswith(".delta"):
            said += event["delta"]
        elif kind == "content_part.done":
            assert event["part"]["text"] == said
        elif kind != "content_part.added":
            key = {"function_call_arguments.done": "arguments"}.get(kind, "text")
            assert event["input" if "custom" in kind else key] == said
    assert open_item is None
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == items
    return response


def without_ids(response: Object) -> list[Object]:
    """The items but for what differs between two answers."""
    changing = ("id", "call_id", "encrypted_content")
    return [{k: v for k, v in item.items() if k not in changing} for item in response["output"]]


def reasoning(text: str) -> Object:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "summary": [], "content": content, "status": "completed"}


def message(text: str, status: str = "completed") -> Object:
    content: Object = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "content": [content], "status": status}


def call(**fields: Any) -> Object:
    plain = {"type": "function_call", "name": "f", "arguments": ARGUMENTS, "status": "completed"}
    return plain | fields


INPUT = json.loads(ARGUMENTS)["path"]


@pytest.mark.parametrize(
    ("said", "fields", "output", "status"),
    [
        ("why</think>so é", {}, [reasoning("why"), message("so é")], "completed"),
        ("so", {"reasoning": {"effort": "none"}}, [message("so")], "completed"),
        ("", {}, [], "completed"),
        (
            "why</think>so",
            {"max_output_tokens": 5},
            [reasoning("why"), message("s", "incomplete")],
            "incomplete",
        ),
        (
            f"why{calls_of('f', 'f')}",
            {"tools": TOOLS},
            [reasoning("why"), call(), call()],
            "completed",
        ),
        (
            f"</think>so{calls_of('ns::f')}",
            {"tools": SPACE},
            [message("so"), call(namespace="ns")],
            "completed",
        ),
        (
            f"</think>{calls_of('apply_patch')}",
            {"tools": PATCH},
            [
                {
                    "type": "custom_tool_call",
                    "name": "apply_patch",
                    "input": INPUT,
                    "status": "completed",
                }
            ],
            "completed",
        ),
        (
            f"</think>so{calls_of('f')}",
            {"tools": TOOLS, "tool_choice": "none"},
            [message("so")],
            "completed",
        ),
    ],
)
def test_an_answer_whole_and_streamed(said: str, fields: Object, output: list[Object], status: str):
    with answering(said) as server:
        answer = ok(server, PATH, body(**fields))
        assert (without_ids(answer), answer["status"]) == (output, status)
        assert (answer["object"], answer["model"]) == ("response", "ds41")
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        assert answer["incomplete_details"] == cut
        same = together(streamed(server, body(**fields)))
        assert (without_ids(same), same["status"]) == (output, status)
        assert same["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
        assert set(same) == set(answer)


def test_the_events_of_a_stream():
    with answering(f"y</think>s{calls_of('f')}") as server:
        events = streamed(server, body(tools=TOOLS))
    kinds = [event["type"].removeprefix("response.") for event in events]
    in_call = kinds.count("function_call_arguments.delta")
    assert kinds == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "output_item.added",
        *(["function_call_arguments.delta"] * in_call),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert in_call == 10


def test_cut_anywhere_in_a_call_both_forms_agree():
    said = f"</think>so{calls_of('f')}"
    for n in range(1, len(with_special_tokens(said, tiny_tokenizer())), 7):
        with answering(said) as server:
            request = body(tools=TOOLS, max_output_tokens=n)
            answer = ok(server, PATH, request)
            assert answer["status"] == "incomplete"
            assert without_ids(together(streamed(server, request))) == without_ids(answer)


def test_the_account_of_tokens():
    with answering("why</think>so") as server:
        n = ok(server, PATH, body())["usage"]["input_tokens"]
        assert n == len(server.engine.courses[0].call.token_ids)
        assert ok(server, PATH, body())["usage"] == {
            "input_tokens": n,
            "input_tokens_details": {"cached_tokens": n - 1},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 4},
            "total_tokens": n + 6,
        }


@pytest.mark.parametrize("keeps_reasoning", [True, False])
def test_the_next_turn_goes_on_from_the_last(keeps_reasoning: bool):
    with answering(f"why\n</think>so{calls_of('f')}", "</think>done") as server:
        first = ok(server, PATH, body(tools=TOOLS))
        items = [i for i in first["output"] if keeps_reasoning or i["type"] != "reasoning"]
        items[-1]["arguments"] = json.dumps(json.loads(items[-1]["arguments"]))
        output = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
        call_id = items[-1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": output}
        second = ok(server, PATH, body(HI, *items, result, tools=TOOLS))
        before = first["usage"]["total_tokens"]
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == before


def test_a_signature_finds_its_answer():
    """After another prompt only what came back with the reasoning says which answer it was."""
    with answering("why\n\n</think>so", "</think>done") as server:
        first = ok(server, PATH, body(tools=TOOLS))
        ok(server, PATH, body({"role": "user", "content": "Ho"}, *first["output"], HI, tools=TOOLS))
        said = server.engine.courses[0].said
        later = list(server.engine.courses[1].call.token_ids)
        assert any(later[i : i + len(said)] == said for i in range(len(later)))


def test_what_a_body_says_reaches_the_engine():
    request = read(body(temperature=0.5, top_p=0.9, seed=7, max_output_tokens=9)).request
    assert (request.sampling, request.max_tokens) == (Sampling(0.5, 0.9, 0, 7), 9)
    assert read(body()).request.sampling == Sampling()
    for effort, number in (("low", 50), ("high", 75), ("xhigh", 75), ("max", 100), (None, 75)):
        assert f"Reasoning Effort: {number} " in prompt(reasoning={"effort": effort})


def test_instructions_and_messages_of_the_developer():
    texts = ("Be brief.", "First.", "Hi", "Second.")
    text = prompt(
        {"role": "developer", "content": "First."},
        HI,
        {
            "type": "message",
            "role": "system",
            "content": [{"type": "input_text", "text": "Second."}],
        },
        instructions="Be brief.",
    )
    assert [text.index(each) for each in texts] == sorted(text.index(each) for each in texts)
    assert text.count(SPELLINGS["system"]) == 3


def test_a_last_answer_is_continued():
    begun = {"role": "assistant", "content": [{"type": "output_text", "text": "Once "}]}
    request = body(HI, begun, reasoning={"effort": "none"})
    with answering("upon") as server:
        assert without_ids(ok(server, PATH, request)) == [message("upon")]
    assert prompt(HI, begun).endswith("</think>Once ")


@pytest.mark.parametrize(
    ("choice", "opened"),
    [("required", ANY_TOOL), ({"type": "function", "name": "f"}, "f"), ("auto", None)],
)
def test_a_call_can_be_asked_for(choice: Any, opened: str | None):
    request = read(body(tools=TOOLS, tool_choice=choice, reasoning={"effort": "max"})).request
    assert request.starts_in_call == opened
    assert request.conversation is not None
    assert request.conversation.thinking_mode == (opened is None)


def test_parameters_without_a_type_are_an_object():
    tool: Object = {"type": "function", "name": "f", "parameters": {}}
    space: Object = {"type": "namespace", "name": "ns", "description": "d", "tools": [tool]}
    conversation = read(body(tools=[tool, space])).request.conversation
    assert conversation is not None
    assert [t.name for t in conversation.tools] == ["f", "ns::f"]
    assert all(t.parameters == {"type": "object"} for t in conversation.tools)


def test_what_cannot_be_shown_becomes_a_line_and_what_cannot_run_is_left_out():
    items: list[Object] = [
        {"role": "user", "content": [IMAGE, {"type": "input_file", "file_id": "x"}]},
        {"role": "assistant", "content": "I see."},
        {"type": "web_search_call", "id": "x"},
        HI,
    ]
    text = prompt(*items, tools=[{"type": "web_search"}, *TOOLS])
    assert IMAGE_NOTE in text and "[input_file not shown" in text
    assert "web_search" not in text
    result = {"type": "function_call_output", "call_id": "1", "output": "see below"}
    seen = prompt(HI, CALL, result, {"role": "user", "content": [IMAGE]}, tools=TOOLS)
    assert seen.count(IMAGE_NOTE) == 1
    output = {"type": "custom_tool_call_output", "call_id": "1", "output": "done"}
    patch = {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "x"}
    assert "<tool_result>done</tool_result>" in prompt(HI, patch, output, tools=PATCH)


UNTYPED = {"type": "namespace", "name": "n", "tools": [{"name": "x"}]}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"input": None}, "input: it is a list"),
        ({"input": []}, "must not be empty"),
        ({"input": [1]}, "input.0: it is an object"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role: it is one of"),
        ({"input": [{"role": "user"}]}, "input.0.content: it is a string or a list"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "reads text only"),
        ({"input": [HI, CALL]}, "No tool output found"),
        ({"input": [HI, {"type": "item_reference", "id": "x"}]}, "nothing is stored here"),
        ({"input": [HI, {"type": "function_call_output", "output": "x"}]}, "input.1.call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: it is not supported"),
        ({"background": True}, "background: it is not supported"),
        ({"prompt": {"id": "x"}}, "prompt: it is not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"tools": [*PATCH, {"type": "custom", "name": "x"}]}, "tools.1: of custom tools"),
        ({"tools": [*TOOLS, UNTYPED]}, "tools.1.tools.0.type"),
        ({"tools": [{"name": "x"}]}, "tools.0.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice: it is"),
        ({"tool_choice": "required"}, "without any tool"),
        ({"instructions": 1}, "instructions: it is a string"),
        ({"max_output_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(changed: Object, sentence: str):
    with answering("so") as server:
        assert sentence in refused(server, PATH, body() | changed)["message"]
        assert server.engine.courses == []


def test_a_fault_of_the_engine_fails_the_response():
    with answering(DeviceError("the device is lost"), "</think>so") as server:
        last = streamed(server, body())[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert without_ids(ok(server, PATH, body())) == [message("so")]
