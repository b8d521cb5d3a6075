"""Anthropic's own Python package as the client, over real connections."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from tests.scripted_engine import ScriptedEngine
from tests.server.support import Server, on_port, serving
from tests.server.test_messages import calls

TOOL: ToolParam = {
    "name": "Read",
    "description": "Read a file",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
QUESTION: MessageParam = {"role": "user", "content": "What is in /a and /b?"}
TWO_CALLS = "Both.</think>I look.\n\n" + calls(
    ("Read", {"path": '"/a"'}), ("Read", {"path": '"/b"'})
)


@contextmanager
def client_of(*answers: Any, **options: Any) -> Generator[tuple[anthropic.Anthropic, Server]]:
    with (
        serving(ScriptedEngine(*answers, **options)) as server,
        on_port(server.app) as address,
        # Without a proxy, and without certificates to load.
        anthropic.DefaultHttpxClient(verify=False, trust_env=False) as http,
    ):
        yield (
            anthropic.Anthropic(
                base_url=address, api_key="any", max_retries=0, http_client=http, timeout=60
            ),
            server,
        )


def test_an_agent_turn_streamed_and_whole_and_its_history() -> None:
    with client_of(TWO_CALLS, "</think>Same.", TWO_CALLS) as (client, server):
        with client.messages.stream(
            model="ds41", max_tokens=2000, tools=[TOOL], messages=[QUESTION]
        ) as stream:
            kinds = {event.type for event in stream}
            first = stream.get_final_message()
        assert kinds >= {"thinking", "text", "input_json", "content_block_stop", "message_stop"}
        assert first.stop_reason == "tool_use"
        thinking, text, *tools = first.content
        assert thinking.type == "thinking" and thinking.thinking == "Both." and thinking.signature
        assert text.type == "text" and text.text == "I look."
        assert [t.input for t in tools if t.type == "tool_use"] == [{"path": "/a"}, {"path": "/b"}]
        ids = [tool.id for tool in tools if tool.type == "tool_use"]
        assert len(set(ids)) == 2

        history: list[MessageParam] = [
            QUESTION,
            {"role": "assistant", "content": cast(Any, first.content)},
            {
                "role": "user",
                # Results may come in any order.
                "content": [
                    {"type": "tool_result", "tool_use_id": id, "content": f"contents of {i}"}
                    for i, id in reversed([*enumerate(ids)])
                ],
            },
        ]
        second = client.messages.create(
            model="ds41", max_tokens=100, tools=[TOOL], messages=history
        )
        assert [block.type for block in second.content] == ["text"]
        assert second.stop_reason == "end_turn"
        counted = client.messages.count_tokens(model="ds41", tools=[TOOL], messages=history)
        usage = second.usage
        read = usage.cache_read_input_tokens or 0
        total = usage.input_tokens + read + (usage.cache_creation_input_tokens or 0)
        assert counted.input_tokens == total
        course = server.engine.courses[0]
        assert read == len(course.call.token_ids) + len(course.said)

        whole = client.messages.create(
            model="ds41", max_tokens=2000, tools=[TOOL], messages=[QUESTION]
        )
        dumps = [
            [block.model_dump(exclude={"id", "signature"}) for block in message.content]
            for message in (first, whole)
        ]
        assert dumps[0] == dumps[1]


def test_models_are_found() -> None:
    with client_of("") as (client, _):
        (model,) = client.models.list(limit=1000)
        assert client.models.retrieve("claude-anything").id == model.id == "ds41"


def test_errors_are_those_of_the_protocol() -> None:
    with client_of("</think>Hello", RuntimeError("device"), context_tokens=300) as (client, _):
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: .* > 299 maximum"
        ):
            client.messages.create(
                model="ds41", max_tokens=9, messages=[{"role": "user", "content": "x" * 400}]
            )
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.post("/v1/messages/batches", cast_to=object, body={})
        assert missing.value.request_id is not None
        assert client.messages.create(model="ds41", max_tokens=9, messages=[QUESTION]).content
        with (
            pytest.raises(anthropic.APIStatusError, match="the engine failed"),
            client.messages.stream(model="ds41", max_tokens=9, messages=[QUESTION]) as stream,
        ):
            stream.until_done()


def test_stop_sequences_prefill_and_thinking_off() -> None:
    with client_of("one two three") as (client, _):
        message = client.messages.create(
            model="ds41",
            max_tokens=100,
            thinking={"type": "disabled"},
            stop_sequences=["three"],
            messages=[QUESTION, {"role": "assistant", "content": "zero"}],
        )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "three")
    assert [block.model_dump()["text"] for block in message.content] == ["one two "]
