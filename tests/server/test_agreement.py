"""Whatever the model writes: stream and whole agree, and all protocols say the same."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.server import chat, responses_in
from mlx_engine.tokenizer import SPELLINGS
from tests.fake_engine import tiny_tokenizer, with_special_tokens
from tests.scripted_engine import ScriptedEngine
from tests.server import test_chat, test_messages, test_responses
from tests.server.openai_events import chunks_of
from tests.server.support import Server, sent_events, serving
from tests.server.test_golden import INVOKE, M, block

Object = dict[str, Any]

PIECES = [
    SPELLINGS["think_start"],
    SPELLINGS["think_end"],
    SPELLINGS["eos"],
    SPELLINGS["user"],
    M,
    "<",
    "</",
    "so ",
    "é😀",
    "\n\n",
    "ST",
    "STOP",
    '"',
    "\\",
    f"<{M} calls>\n",
    f'<{M} invoke name="f">\n',
    f'<{M} invoke name="unknown">\n',
    f'<{M} parameter name="a" string="true">',
    f'<{M} parameter name="b" string="false">',
    '{"x": [1.50,',
    "null",
    f"</{M} parameter>\n",
    f"</{M} invoke>\n",
    f"</{M} calls>",
    block(INVOKE),
    block(INVOKE, INVOKE),
]


@dataclass
class Said:
    """An answer as a client has it: what every protocol can tell."""

    thinking: str = ""
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    is_cut: bool = False


def answers(server: Server, path: str, body: Object) -> tuple[Object, str]:
    """The same request whole and streamed."""
    whole = server.ask("POST", path, json=body)
    stream = server.ask("POST", path, json=body | {"stream": True})
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text + stream.text
    return whole.json(), stream.text


def of_messages(server: Server, max_tokens: int, is_parallel: bool) -> Said:
    choice = {"type": "auto", "disable_parallel_tool_use": not is_parallel}
    body = test_messages.messages_body(
        max_tokens=max_tokens,
        tools=[test_messages.TOOL | {"name": "f"}],
        tool_choice=choice,
    )
    whole, text = answers(server, "/v1/messages", body)
    streamed = test_messages.put_together(sent_events(text))
    whole["usage"] = streamed["usage"] = {}  # the second finds what the first computed
    assert test_messages.without_ids(streamed) == test_messages.without_ids(whole)
    said = Said(is_cut=whole["stop_reason"] == "max_tokens")
    for content in whole["content"]:
        match content["type"]:
            case "thinking":
                said.thinking += content["thinking"]
            case "text":
                said.text += content["text"]
            case _:
                said.calls.append((content["name"], json.dumps(content["input"])))
    return said


def of_chat(server: Server, max_tokens: int, is_parallel: bool) -> Said:
    fields = {"max_tokens": max_tokens, "parallel_tool_calls": is_parallel}
    whole, text = answers(server, chat.PATH, test_chat.body(tools=test_chat.TOOLS, **fields))
    (choice,) = whole["choices"]
    streamed = test_chat.together(chunks_of(text))
    assert test_chat.without_ids(streamed) == test_chat.without_ids(choice)
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return Said(
        message.get("reasoning_content", ""),
        message["content"] or "",
        [(f["name"], json.dumps(json.loads(f["arguments"]))) for f in functions],
        choice["finish_reason"] == "length",
    )


def of_responses(server: Server, max_tokens: int, is_parallel: bool) -> Said:
    fields = {"max_output_tokens": max_tokens, "parallel_tool_calls": is_parallel}
    body = test_responses.body(tools=test_responses.TOOLS, **fields)
    whole, text = answers(server, responses_in.PATH, body)
    streamed = test_responses.together(sent_events(text))
    assert test_responses.without_ids(streamed) == test_responses.without_ids(whole)
    assert streamed["status"] == whole["status"]
    said = Said(is_cut=whole["status"] == "incomplete")
    for item in whole["output"]:
        match item["type"]:
            case "reasoning":
                said.thinking += item["content"][0]["text"]
            case "message":
                said.text += item["content"][0]["text"]
            case _:
                said.calls.append((item["name"], json.dumps(json.loads(item["arguments"]))))
    return said


def say(said: str, max_tokens: int = 1000, is_parallel: bool = True) -> Said:
    """What all protocols say of an output."""
    with serving(ScriptedEngine(said)) as server:
        first, *others = (
            of(server, max_tokens, is_parallel) for of in (of_messages, of_chat, of_responses)
        )
    assert others == [first] * 2
    return first


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.integers(1, 200) | st.just(1000),
    st.booleans(),
)
def test_any_output_is_one_answer(said: str, max_tokens: int, is_parallel: bool) -> None:
    answer = say(said, max_tokens, is_parallel)
    assert is_parallel or len(answer.calls) <= 1
    assert {name for name, _ in answer.calls} <= {"f"}


def test_cut_at_every_token_of_its_calls_an_answer_has_no_markup() -> None:
    said = f"Hm</think>Hi{block(INVOKE, INVOKE)}"
    n = len(with_special_tokens(said, tiny_tokenizer()))
    whole = say(said)
    assert (whole.thinking, whole.text, whole.calls) == ("Hm", "Hi", [("f", '{"n": 1}')] * 2)
    for max_tokens in range(1, n, 3):
        cut = say(said, max_tokens)
        assert cut.is_cut
        # What may begin a call is text until it does.
        assert "Hm".startswith(cut.thinking) and "Hi".startswith(cut.text.rstrip("\n<"))
        assert len(cut.calls) <= 2
        # The last one may be the one that was cut.
        assert all(call == ("f", '{"n": 1}') for call in cut.calls[:-1])


@pytest.mark.parametrize("stop", ["STOP", "O"])
def test_a_stop_string_ends_stream_and_whole_alike(stop: str) -> None:
    with serving(ScriptedEngine("STOP here</think>one STOP two")) as server:
        body = test_messages.messages_body(stop_sequences=[stop])
        whole, text = answers(server, "/v1/messages", body)
        streamed = test_messages.put_together(sent_events(text))
        assert [b.get("text") for b in whole["content"]] == [None, f"one {'ST' * (stop == 'O')}"]
        body = test_chat.body(stop=stop)
        whole, text = answers(server, chat.PATH, body)
        assert whole["choices"][0]["message"]["content"] == streamed["content"][1]["text"]
        assert (
            test_chat.together(chunks_of(text))["message"]["content"]
            == (streamed["content"][1]["text"])
        )
