"""What of a request has no effect is said in the log, wherever in the body it stands."""

from typing import Any

import pytest

from mlx_engine.server import body
from tests.scripted_engine import ScriptedEngine
from tests.server.support import serving

Object = dict[str, Any]

HI: Object = {"role": "user", "content": "Hi"}
SCHEMA: Object = {"type": "object"}
MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"


def of_messages(**fields: Any) -> Object:
    return {"max_tokens": 9, "messages": [HI]} | fields


def of_tool(**fields: Any) -> Object:
    return of_messages(tools=[{"name": "f", "input_schema": SCHEMA} | fields])


def of_function(**fields: Any) -> Object:
    function = {"name": "f", "parameters": SCHEMA} | fields
    return {"messages": [HI], "tools": [{"type": "function", "function": function}]}


def of_block(**fields: Any) -> Object:
    answer = [{"type": "text", "text": "Hello"} | fields]
    return of_messages(messages=[HI, {"role": "assistant", "content": answer}, HI])


NOTED: Object = {"type": "text", "text": "Be brief.", "citations": [{}]}
CALL: Object = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT: Object = {"type": "tool_result", "tool_use_id": "t", "content": [NOTED]}
CALLED = [HI, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}]
PATCH: Object = {"type": "custom", "name": "apply_patch", "description": "d"}


@pytest.mark.parametrize(
    ("path", "sent", "noted"),
    [
        (MESSAGES, of_tool(defer_loading=True), "tool: the field 'defer_loading'"),
        (MESSAGES, of_tool(input_examples=[{}]), "tool: the field 'input_examples'"),
        (MESSAGES, of_tool(strict=True), "strict of a tool is not enforced"),
        (MESSAGES, of_messages(messages=[HI | {"name": "n"}]), "message: the field 'name'"),
        (MESSAGES, of_block(citations=[{}]), "block: the field 'citations'"),
        (MESSAGES, of_messages(system=[NOTED]), "block: the field 'citations'"),
        (MESSAGES, of_messages(messages=CALLED), "block: the field 'citations'"),
        (CHAT, of_function(strict=True), "strict of a tool is not enforced"),
        (CHAT, of_function(examples=[1]), "function: the field 'examples'"),
        (CHAT, {"messages": [HI | {"name": "n"}]}, "message: the field 'name'"),
        (CHAT, {"messages": [HI], "reasoning": {"summary": "auto"}}, "the field 'summary'"),
        (CHAT, {"messages": [HI], "thinking": {"type": "enabled", "budget": 1}}, "'budget'"),
        (RESPONSES, {"input": [HI | {"name": "n"}]}, "item: the field 'name'"),
        (RESPONSES, {"input": "Hi", "reasoning": {"summary": "auto"}}, "the field 'summary'"),
        (RESPONSES, {"input": "Hi", "include": ["web_search_call.results"]}, "web_search_call"),
        (
            RESPONSES,
            {"input": "Hi", "tools": [{"type": "function", "name": "f", "strict": True}]},
            "strict of a tool is not enforced",
        ),
        (
            RESPONSES,
            {"input": "Hi", "tools": [PATCH | {"format": {"type": "grammar"}}]},
            "format of a tool is not enforced",
        ),
    ],
)
def test_what_has_no_effect_is_noted_once(
    path: str,
    sent: Object,
    noted: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(body, "_NOTES", body._Notes())  # pyright: ignore[reportPrivateUsage]
    with serving(ScriptedEngine("</think>Hello")) as server, caplog.at_level("INFO"):
        for _ in range(2):
            response = server.ask("POST", path, json=sent)
            assert response.status_code == 200, response.text
    notes = [r.getMessage() for r in caplog.records if r.name == body.__name__]
    assert len(notes) == 1 and notes[0].startswith(path) and noted in notes[0]


def test_what_agents_send_by_the_way_is_nothing_to_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Marks for a cache, an answer's own parts that come back, and null."""
    monkeypatch.setattr(body, "_NOTES", body._Notes())  # pyright: ignore[reportPrivateUsage]
    marked = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    with serving(ScriptedEngine("</think>Hello")) as server, caplog.at_level("INFO"):
        bodies: list[tuple[str, Object]] = [
            (MESSAGES, of_messages(messages=[HI | {"content": marked}])),
            (MESSAGES, of_tool(cache_control={"type": "ephemeral"}, strict=False)),
            (MESSAGES, of_block(citations=None)),
            (CHAT, {"messages": [HI | {"name": None}], "reasoning": {"effort": "low"}}),
        ]
        included = ["reasoning.encrypted_content", "message.output_text.logprobs"]
        bodies.append((RESPONSES, {"input": "Hi", "include": included}))
        output = server.ask("POST", RESPONSES, json={"input": "Hi"}).json()["output"]
        bodies.append((RESPONSES, {"input": [HI, *output, HI]}))
        for path, sent in bodies:
            assert server.ask("POST", path, json=sent).status_code == 200
    assert [r.getMessage() for r in caplog.records if r.name == body.__name__] == []
