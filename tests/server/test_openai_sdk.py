"""The vendor's own client, over a socket of this machine, at the three OpenAI endpoints."""

import json
import threading
from typing import Any, cast

import openai
import pytest
from openai.types.responses import ResponseInProgressEvent

from mlx_engine.errors import DeviceError
from tests.scripted_engine import ScriptedEngine
from tests.server.openai_events import ARGUMENTS, TOOL, answering, calls_of, openai_client
from tests.server.support import PATIENCE_S, Server, serving

SAID = f"why</think>so{calls_of('f')}"
MESSAGES = cast(Any, [{"role": "user", "content": "Hi"}])


def test_chat():
    tools = cast(Any, [{"type": "function", "function": TOOL}])
    with answering(SAID, SAID, DeviceError("lost")) as server, openai_client(server) as client:
        whole = client.chat.completions.create(model="any", messages=MESSAGES, tools=tools)
        message = whole.choices[0].message
        assert message.content == "so" and message.tool_calls is not None
        assert (message.model_extra or {})["reasoning_content"] == "why"
        assert whole.choices[0].finish_reason == "tool_calls"
        assert cast(Any, message.tool_calls[0]).function.arguments == ARGUMENTS
        text = arguments = ""
        last = None
        stream = client.chat.completions.create(
            model="any",
            messages=MESSAGES,
            tools=tools,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            last = chunk
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    assert call.function is not None
                    arguments += call.function.arguments or ""
        assert (text, arguments) == ("so", ARGUMENTS)
        assert last is not None and last.usage is not None and whole.usage is not None
        assert last.usage.total_tokens == whole.usage.total_tokens
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(model="any", messages=MESSAGES, stream=True))
        with pytest.raises(openai.BadRequestError, match="one answer at a time"):
            client.chat.completions.create(model="any", messages=MESSAGES, n=2)


def test_completions():
    with answering("upon a time") as server, openai_client(server) as client:
        whole = client.completions.create(model="any", prompt="Once ", max_tokens=4)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("upon", "length")
        stream = client.completions.create(model="any", prompt="Once ", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "upon a time"


def test_responses():
    tools = cast(Any, [{"type": "function"} | TOOL])
    with answering(SAID) as server, openai_client(server) as client:
        whole = client.responses.create(model="any", input="Hi", tools=tools)
        assert whole.output_text == "so"
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        assert cast(Any, whole.output[2]).arguments == ARGUMENTS
        text = arguments = ""
        with client.responses.stream(model="any", input="Hi", tools=tools) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.function_call_arguments.delta":
                    arguments += event.delta
            final = stream.get_final_response()
        assert (text, arguments) == ("so", ARGUMENTS)
        assert final.output_text == "so"
        assert final.usage is not None and whole.usage is not None
        assert final.usage.total_tokens == whole.usage.total_tokens


RESULT = "forty-two"


def test_chat_goes_on_from_the_result_of_a_tool():
    tools = cast(Any, [{"type": "function", "function": TOOL}])
    with answering(SAID, "</think>done") as server, openai_client(server) as client:
        first = client.chat.completions.create(model="any", messages=MESSAGES, tools=tools)
        message = first.choices[0].message
        assert message.tool_calls is not None
        # As the client's users do: the answer itself, with all that it holds.
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
        conversation = cast(Any, [*MESSAGES, message, result])
        second = client.chat.completions.create(model="any", messages=conversation, tools=tools)
        assert second.choices[0].message.content == "done"
        goes_on_from_a_result(server)


def test_responses_go_on_from_the_result_of_a_tool():
    tools = cast(Any, [{"type": "function"} | TOOL])
    with answering(SAID, "</think>done") as server, openai_client(server) as client:
        first = client.responses.create(model="any", input="Hi", tools=tools)
        call_id = cast(Any, first.output[-1]).call_id
        result = {"type": "function_call_output", "call_id": call_id, "output": RESULT}
        conversation = cast(Any, [*MESSAGES, *first.output, result])
        second = client.responses.create(model="any", input=conversation, tools=tools)
        assert second.output_text == "done"
        goes_on_from_a_result(server)


def goes_on_from_a_result(server: Server) -> None:
    """The second prompt is the first with its answer, and the result behind it."""
    first, second = server.engine.courses
    so_far = [*first.call.token_ids, *first.said]
    assert list(second.call.token_ids[: len(so_far)]) == so_far
    assert second.cached_tokens == len(so_far)
    new = b"".join(map(server.engine.tokenizer.token_bytes, second.call.token_ids[len(so_far) :]))
    assert f"<tool_result>{RESULT}</tool_result>" in new.decode()


def test_a_sign_of_life_is_a_small_response():
    """Its size does not go by what the request says, and all that the client asks for is in it."""
    tools = cast(Any, [{"type": "function", **TOOL, "name": f"f{i}"} for i in range(20)])
    go = threading.Event()

    def wait(course: Any) -> None:
        assert go.wait(PATIENCE_S)

    engine = ScriptedEngine("why</think>so", before_step=wait)
    signs: list[dict[str, Any]] = []
    with serving(engine, keep_alive_s=0.01) as server, openai_client(server) as client:
        try:
            with client.responses.stream(model="any", input="Hi", tools=tools) as stream:
                for event in stream:
                    if event.type == "response.in_progress":
                        signs.append(json.loads(event.to_json()))
                        if len(signs) == 4:
                            go.set()
                final = stream.get_final_response()
        finally:
            go.set()
    assert final.output_text == "so" and len(final.tools) == 20
    first, *others = signs
    assert len(first["response"]["tools"]) == 20
    for each in others:
        checked = ResponseInProgressEvent.model_validate(each)
        assert checked.response.id == final.id and checked.response.status == "in_progress"
        assert len(json.dumps(each)) < 1000 < len(json.dumps(first))
