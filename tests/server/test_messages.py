"""/v1/messages: what a body means, what an answer looks like, and that both forms agree."""

import json
import re
import secrets
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.errors import DeviceError
from mlx_engine.server.body import IMAGE_NOTE
from mlx_engine.tokenizer import SPELLINGS
from tests.scripted_engine import ScriptedEngine
from tests.server.support import Server, messages_body, sent_events, serving

TOOL: dict[str, Any] = {
    "name": "Read",
    "description": "Read a file",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def calls(*invokes: tuple[str, dict[str, str]]) -> str:
    """The model's markup for calls, whose arguments are given as JSON."""
    lines = ["<｜DSML｜ calls>"]
    for name, arguments in invokes:
        lines.append(f'<｜DSML｜ invoke name="{name}">')
        for key, value in arguments.items():
            tag = f'<｜DSML｜ parameter name="{key}" string="false">'
            lines.append(f"{tag}{value}</｜DSML｜ parameter>")
        lines.append("</｜DSML｜ invoke>")
    return "\n".join([*lines, "</｜DSML｜ calls>"])


ANSWERS = {
    "plain": "Let me see.</think>Hello",
    "one call": "Hm</think>Sure.\n\n" + calls(("Read", {"path": '"/a"', "n": "[1, 2.50]"})),
    "two calls": "</think>" + calls(("Read", {"path": '"/a"'}), ("Read", {})),
    "reasoning not ended": "I will read.\n" + calls(("Read", {"path": '"/a"'})),
    "empty": "</think>",
    "only reasoning": "and so on",
    "stop sequence": "</think>one two STOP three",
    "emoji": "é😀</think>漢字 ｜DSML｜",
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def prompt_of(server: Server, **body: Any) -> str:
    """The prompt that a body becomes, as text."""
    server.message(**body)
    return last_prompt(server)


def last_prompt(server: Server) -> str:
    """The prompt of the last answer, as text."""
    tokenizer = server.engine.tokenizer
    special = {tokenizer.special_id(text): text for text in SPELLINGS.values()}
    token_ids = server.engine.courses[-1].call.token_ids
    return b"".join(
        special[id].encode() if id in special else tokenizer.token_bytes(id) for id in token_ids
    ).decode()


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream; checks its grammar on the way."""
    first, *rest, delta, last = [event for event in events if event["type"] != "ping"]
    assert (first["type"], delta["type"], last["type"]) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    message = first["message"]
    is_open, fragments = False, ""
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                is_open, fragments = True, ""
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                block, piece = message["content"][-1], event["delta"]
                match piece["type"]:
                    case "text_delta":
                        block["text"] += piece["text"]
                    case "thinking_delta":
                        block["thinking"] += piece["thinking"]
                    case "signature_delta":
                        block["signature"] += piece["signature"]
                    case "input_json_delta":
                        fragments += piece["partial_json"]
                    case other:
                        raise AssertionError(other)
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(fragments)
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {k: v for k, v in block.items() if k not in ("id", "signature")}
        for block in message["content"]
    ]
    return message | {"id": "", "content": blocks}


def test_the_events_of_an_answer_with_reasoning_text_and_a_call() -> None:
    with serving(ScriptedEngine("Hm</think>Ok\n\n" + calls(("Read", {"n": "1"})))) as server:
        events = server.events(tools=[TOOL], max_tokens=1000)
    start = events[0]["message"]
    prompt_tokens = start["usage"]["input_tokens"]
    id, signature = start["id"], events[5]["delta"]["signature"]
    call_id = next(e["content_block"]["id"] for e in events if e.get("index") == 2)
    json_deltas = [e["delta"] for e in events if e.get("index") == 2 and "delta" in e]
    assert "".join(delta["partial_json"] for delta in json_deltas) == '{"n": 1}'
    assert id.startswith("msg_") and len(signature) > 20

    def delta(index: int, kind: str, **content: str) -> dict[str, Any]:
        return {
            "type": "content_block_delta",
            "index": index,
            "delta": {"type": kind, **content},
        }

    def begin(index: int, **block: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert events == [
        {
            "type": "message_start",
            "message": {
                "id": id,
                "type": "message",
                "role": "assistant",
                "model": "ds41",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": prompt_tokens, **usage, "output_tokens": 0},
            },
        },
        {"type": "ping"},
        begin(0, type="thinking", thinking="", signature=""),
        delta(0, "thinking_delta", thinking="H"),
        delta(0, "thinking_delta", thinking="m"),
        delta(0, "signature_delta", signature=signature),
        {"type": "content_block_stop", "index": 0},
        begin(1, type="text", text=""),
        delta(1, "text_delta", text="O"),
        delta(1, "text_delta", text="k"),
        {"type": "content_block_stop", "index": 1},
        begin(2, type="tool_use", id=call_id, name="Read", input={}),
        *({"type": "content_block_delta", "index": 2, "delta": d} for d in json_deltas),
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {
                "input_tokens": 2,  # the header of the answer
                "cache_creation_input_tokens": prompt_tokens - 2,
                "cache_read_input_tokens": 0,
                "output_tokens": len(server.engine.courses[0].said),
                "output_tokens_details": {"thinking_tokens": len("Hm") + 1},
            },
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("max_tokens", [1, 4, 40, 90, 1000])
def test_a_stream_put_together_is_the_whole_message(name: str, max_tokens: int) -> None:
    body = messages_body(tools=[TOOL], max_tokens=max_tokens, stop_sequences=["STOP"])
    with serving(ScriptedEngine(ANSWERS[name])) as server:
        streamed = put_together(server.events(**body))
    with serving(ScriptedEngine(ANSWERS[name])) as server:
        message = server.message(**body)
    assert without_ids(streamed) == without_ids(message)
    reasons = {"end_turn", "tool_use", "max_tokens", "stop_sequence"}
    assert message["stop_reason"] in reasons
    assert "DSML｜ " not in json.dumps(message["content"], ensure_ascii=False)


def test_stop_reasons() -> None:
    wanted = {
        "plain": ("end_turn", None),
        "one call": ("tool_use", None),
        "stop sequence": ("stop_sequence", "STOP"),
    }
    for name, reason in wanted.items():
        with serving(ScriptedEngine(ANSWERS[name])) as server:
            message = server.message(tools=[TOOL], max_tokens=900, stop_sequences=["x", "STOP"])
            assert (message["stop_reason"], message["stop_sequence"]) == reason
    with serving(ScriptedEngine(ANSWERS["plain"])) as server:
        message = server.message(max_tokens=15)
    assert message["stop_reason"] == "max_tokens" and message["usage"]["output_tokens"] == 15


def test_a_turn_that_comes_back_stands_as_it_was_sampled() -> None:
    odd = "Hm \n</think>\n\nSure\n\n" + calls(("Read", {"n": "1.50", "path": '"/a"'}))
    with serving(ScriptedEngine(odd, "</think>Done")) as server:
        first = server.message(tools=[TOOL], max_tokens=900)
        said = server.engine.courses[0].said
        (call,) = [block for block in first["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}
        history = [user("Hi"), {"role": "assistant", "content": first["content"]}, user([result])]
        second = server.message(tools=[TOOL], messages=history)
        assert (
            tuple(said)
            == server.engine.courses[1].call.token_ids[
                len(server.engine.courses[0].call.token_ids) :
            ][: len(said)]
        )
        known = len(server.engine.courses[0].call.token_ids) + len(said)
        assert second["usage"]["cache_read_input_tokens"] == known


def test_a_signature_finds_a_turn_behind_another_prompt() -> None:
    with serving(ScriptedEngine("Hm \n</think>\n\nWell", "</think>Done")) as server:
        first = server.message(tools=[TOOL], messages=[user("Hi")])
        answer: dict[str, Any] = {"role": "assistant", "content": first["content"]}
        server.message(tools=[TOOL], messages=[user("Hi, edited"), answer, user("and?")])
        assert "Hm \n</think>\n\nWell" in last_prompt(server)
        unsigned = {"type": "thinking", "thinking": "", "signature": ""}
        blocks = [unsigned, *first["content"]]
        parts = [{"role": "assistant", "content": [block]} for block in blocks]
        server.message(tools=[TOOL], messages=[user("Hi, edited"), *parts, user("and?")])
        assert "Hm \n</think>\n\nWell" in last_prompt(server)
        answer["content"][0]["signature"] = "of another"
        server.message(tools=[TOOL], messages=[user("Hi, edited"), answer, user("and?")])
        assert "Hm </think>Well" in last_prompt(server)


def test_the_last_prompt_that_fits_leaves_room_for_one_token() -> None:
    with serving(ScriptedEngine("x")) as server:
        body = messages_body()
        counted = server.ask("POST", "/v1/messages/count_tokens", json=body).json()
    n = counted["input_tokens"]
    with serving(ScriptedEngine("x", context_tokens=n + 1)) as server:
        assert server.message()["usage"]["output_tokens"] == 1
    with serving(ScriptedEngine("x", context_tokens=n)) as server:
        response = server.ask("POST", "/v1/messages", json=body)
        assert response.status_code == 400
        assert f"{n} tokens > {n - 1} maximum" in response.text


BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [TOOL]},
    "off": {"thinking": {"type": "disabled"}, "system": "Be brief."},
    "named": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "Read"}},
    "continued": {"messages": [user("Hi"), {"role": "assistant", "content": "So"}]},
    "long": {"messages": [user("word " * 300)], "output_config": {"effort": "low"}},
}


@pytest.mark.parametrize("name", BODIES)
def test_a_count_is_the_sum_of_what_the_answer_reports(name: str) -> None:
    body = messages_body(**BODIES[name])
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    read: list[float] = []
    with serving(ScriptedEngine("</think>Hello")) as server:
        for _ in range(2):
            counted = server.ask("POST", "/v1/messages/count_tokens", json=body).json()
            usage = server.message(**body)["usage"]
            assert counted == {"input_tokens": sum(usage[part] for part in parts)}
            assert usage["input_tokens"] > 0
            read.append(usage["cache_read_input_tokens"] / counted["input_tokens"])
    assert read[0] == 0 and read[1] > 0.9


def test_the_attribution_is_left_out_of_the_system_text_alone() -> None:
    def line(n: int) -> str:
        return f"x-anthropic-billing-header: cc_version=2.1.{n}; cch={n:05};"

    with serving(ScriptedEngine("</think>Hello")) as server:
        systems = [
            [{"type": "text", "text": line(1)}, {"type": "text", "text": "Be brief."}],
            [{"type": "text", "text": line(2)}, {"type": "text", "text": "Be brief."}],
            f"{line(3)}\nBe brief.",
            "Be brief.",
        ]
        prompts = {prompt_of(server, system=system) for system in systems}
        assert len(prompts) == 1
        assert "billing" not in prompts.pop()
        quoted = prompt_of(server, messages=[user(f"{line(4)} what is this?")])
        assert line(4) in quoted


def cached_share(message: dict[str, Any]) -> float:
    """Which part of the prompt was known."""
    usage = message["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return usage["cache_read_input_tokens"] / sum(usage[part] for part in parts)


def test_another_attribution_computes_nothing_anew() -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        shares: list[float] = []
        for n in range(3):
            line = f"x-anthropic-billing-header: cc_version=2.1.{n}; cch={n:05};"
            system = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]
            shares.append(cached_share(server.message(system=system)))
    assert shares[0] == 0 and min(shares[1:]) > 0.95


def test_with_system_entries_anywhere_a_turn_goes_on_from_the_one_before() -> None:
    """At positions 1, 3 and last, and an empty one; blocks at first, a string in the next turn."""
    blocks = [{"type": "text", "text": "agents", "cache_control": {"type": "ephemeral"}}]
    messages = [user("one"), {"role": "system", "content": blocks}, user("two")]
    messages += [{"role": "system", "content": "skills"}, user("three")]
    messages += [{"role": "system", "content": ""}, {"role": "system", "content": "left: 5"}]
    with serving(ScriptedEngine("Hm</think>Hello")) as server:
        first = server.message(messages=messages, tools=[TOOL])
        before = server.engine.courses[0]
        messages[1] = {"role": "system", "content": "agents"}
        answer = {"role": "assistant", "content": first["content"]}
        second = server.message(messages=[*messages, answer, user("four")], tools=[TOOL])
    known = len(before.call.token_ids) + len(before.said)
    assert second["usage"]["cache_read_input_tokens"] == known


def test_a_system_entry_stays_in_its_place_in_either_form() -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:

        def prompt(*entries: Any, closing: Any = None) -> str:
            messages = [user("one")]
            for i, entry in enumerate(entries):
                messages += [{"role": "system", "content": entry}, user(f"turn {i}")]
                messages += [{"role": "assistant", "content": f"answer {i}"}]
            last = [{"role": "system", "content": closing}] if closing is not None else []
            return prompt_of(server, messages=[*messages, user("end"), *last], system="Head")

        blocks = [{"type": "text", "text": "agents", "cache_control": {"type": "ephemeral"}}]
        text = prompt("agents", "skills", closing="left: 5")
        assert text == prompt(blocks, "skills", closing=[{"type": "text", "text": "left: 5"}])
        assert text.index("one") < text.index("agents") < text.index("turn 0")
        assert text.index("end") < text.index("left: 5")
        assert prompt("", []) == prompt([{"type": "text", "text": ""}], None)
        assert prompt("").count("<｜System｜>") == 1  # of the head


def test_a_system_entry_between_a_call_and_its_result_goes_behind_it() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "Read", "input": {"path": "/a"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "contents"}
    messages = [
        user("Hi"),
        {"role": "assistant", "content": [call]},
        {"role": "system", "content": "note"},
        user("meanwhile"),
        user([result]),
    ]
    with serving(ScriptedEngine("</think>Hello")) as server:
        prompt = prompt_of(server, messages=messages, tools=[TOOL])
    assert prompt.index("contents") < prompt.index("meanwhile") < prompt.index("note")


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_start_a_compaction() -> None:
    with serving(ScriptedEngine("</think>Hello", context_tokens=500)) as server:
        body = messages_body(messages=[user("x" * 700)], stream=True)
        counted = server.ask("POST", "/v1/messages/count_tokens", json=body).json()
        response = server.ask("POST", "/v1/messages", json=body)
        assert response.status_code == 400
        error = response.json()
        n = counted["input_tokens"]
        assert error["error"] == {
            "type": "invalid_request_error",
            "message": f"prompt is too long: {n} tokens > 499 maximum",
        }
        assert error["request_id"] == response.headers["request-id"]
        # What passes the context many times is not counted to its end, for an answer.
        body = messages_body(messages=[user("word " * 100_000)])
        message = server.ask("POST", "/v1/messages", json=body).json()["error"]["message"]
        match = re.fullmatch(r"prompt is too long: (\d+) tokens > 499 maximum", message)
        assert match is not None and 1000 < int(match[1]) < 500_000
        counted = server.ask("POST", "/v1/messages/count_tokens", json=body).json()
        assert counted["input_tokens"] > 500_000
        # More than there is room for is asked for by every client, and lowered.
        server.message(max_tokens=32_000)
        call = server.engine.courses[-1].call
        assert call.max_tokens == 500 - len(call.token_ids)


def test_an_image_is_refused_only_where_it_is_asked_about() -> None:
    call: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [IMAGE]}
    seen = [user([IMAGE, {"type": "text", "text": "what?"}]), {"role": "assistant", "content": "?"}]
    with serving(ScriptedEngine("</think>Hello")) as server:
        refused = server.ask("POST", "/v1/messages", json=messages_body(messages=[*seen[:1]]))
        assert refused.status_code == 400 and "text only" in refused.json()["error"]["message"]
        assert prompt_of(server, messages=[*seen, user("and now?")]).count(IMAGE_NOTE) == 1
        turns = [user("Hi"), {"role": "assistant", "content": [call]}, user([result])]
        assert prompt_of(server, messages=turns, tools=[TOOL]).count(IMAGE_NOTE) == 1


def test_what_a_program_puts_beside_its_results_is_no_question() -> None:
    """A document that was read comes behind the result, in the same message or the next."""
    call: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "a document"}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
    begun = [user("Hi"), {"role": "assistant", "content": [call]}]
    with serving(ScriptedEngine("</think>Hello")) as server:
        for turns in ([user([result, pdf, IMAGE])], [user([result]), user([pdf, IMAGE])]):
            prompt = prompt_of(server, messages=[*begun, *turns], tools=[TOOL])
            assert "[document not shown" in prompt and IMAGE_NOTE in prompt


@pytest.mark.parametrize("kind", ["auto", "any"])
def test_one_call_at_a_time(kind: str) -> None:
    both = calls(("Read", {"path": '"/a"'}), ("Read", {"path": '"/b"'}))
    said = f"</think>{both}" if kind == "auto" else both.partition("calls>\n")[2]
    with serving(ScriptedEngine(said)) as server:
        for is_disabled, n in ((None, 2), (False, 2), (True, 1)):
            choice = {"type": kind, "disable_parallel_tool_use": is_disabled}
            message = server.message(tools=[TOOL], tool_choice=choice, max_tokens=900)
            assert len(message["content"]) == n and message["stop_reason"] == "tool_use"


def test_a_tool_choice_begins_a_call_without_thinking() -> None:
    parameter = '<｜DSML｜ parameter name="path" string="true">/a</｜DSML｜ parameter>\n'
    closing = "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    any_tool = f'<｜DSML｜ invoke name="Read">\n{parameter}{closing}'
    answers = {"any": any_tool, "tool": parameter + closing}
    for kind, answer in answers.items():
        with serving(ScriptedEngine(answer)) as server:
            message = server.message(
                tools=[TOOL],
                tool_choice={"type": kind, "name": "Read"},
                thinking={"type": "enabled", "budget_tokens": 2000},
                max_tokens=500,
            )
        (block,) = message["content"]
        assert (block["type"], block["name"]) == ("tool_use", "Read")
        assert block["input"] == {"path": "/a"}
        assert message["stop_reason"] == "tool_use"


def test_no_tools_no_calls() -> None:
    with serving(ScriptedEngine("Hm</think>Well " + calls(("Read", {})))) as server:
        prompt = prompt_of(server, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=900)
        message = server.message(tools=[TOOL], tool_choice={"type": "none"}, max_tokens=900)
    assert "Read a file" not in prompt
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][1]["text"].strip() == "Well"


def test_a_trailing_answer_is_continued() -> None:
    messages = [user("Capital of France?"), {"role": "assistant", "content": "It is"}]
    for thinking in ({"type": "disabled"}, {"type": "adaptive"}):
        with serving(ScriptedEngine("\n Paris")) as server:
            prompt = prompt_of(server, messages=messages, thinking=thinking)
            message = server.message(messages=messages, thinking=thinking)
        assert prompt.endswith("</think>It is")
        assert message["content"] == [{"type": "text", "text": "\n Paris"}]


def test_what_a_request_says_of_sampling_is_obeyed() -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        server.message(temperature=0.25, top_p=0.5, seed=7)
        sampling = server.engine.courses[-1].call.sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.25, 0.5, 7)
        server.message()
        sampling = server.engine.courses[-1].call.sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (1.0, 1.0, None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "input_schema"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [TOOL, TOOL]}, "unique"),
        ({"tool_choice": {"type": "any"}}, "tool"),
        ({"tool_choice": "auto"}, "tool_choice: it is an object"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "it is true or false"),
        ({"output_format": {"type": "json_schema"}}, "output_config.format"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "Other"}}, "Other"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [user([{"type": "tool_result", "tool_use_id": "no"}])]}, "tool_use"),
        ({"messages": [user([{"text": "no type"}])]}, "messages.0.content.0"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:
        response = server.ask("POST", "/v1/messages", json=messages_body(**body))
        assert response.status_code == 400
        error = response.json()
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert words in error["error"]["message"]
        assert server.engine.courses == []


def test_what_clients_send_beside_is_accepted_and_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    field = f"field_of_{secrets.token_hex(4)}"
    extra: dict[str, Any] = {
        field: {"a": 1},
        "metadata": {"user_id": "{}"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "high", "task_budget": 3},
        "tools": [
            {**TOOL, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"name": "Deferred", "input_schema": {}, "defer_loading": True},
        ],
        "messages": [
            user("Hi"),
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "xx"},
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "text", "text": "Hello", "citations": None},
                ],
            },
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "xx"}]},
            user([{"type": "container_upload", "file_id": "f"}, {"type": "text", "text": "go"}]),
        ],
    }
    headers = {"anthropic-beta": "made-up-2030-01-01", "anthropic-version": "2023-06-01"}
    with serving(ScriptedEngine("Hm</think>Hello")) as server, caplog.at_level("INFO"):
        for _ in range(2):
            response = server.ask(
                "POST", "/v1/messages?beta=true", json=messages_body(**extra), headers=headers
            )
            assert response.status_code == 200, response.text
            # The reasoning is shown even where the client does not: it sends it back.
            assert response.json()["content"][0]["thinking"] == "Hm"
        prompt = last_prompt(server)
    # Other tests may have sent the same beta.
    assert caplog.text.count(field) == 1 and caplog.text.count("made-up-2030-01-01") <= 1
    assert '"name": "Deferred"' in prompt and "web_search" not in prompt


def test_a_fault_in_the_engine_ends_the_stream_with_an_error_event() -> None:
    fault = DeviceError("the device has no memory left: use a smaller context")
    with serving(ScriptedEngine(fault, "</think>Hello")) as server:
        *_, last = server.events()
        assert last["type"] == "error" and last["error"]["type"] == "api_error"
        assert last["error"]["message"] == str(fault)
        assert put_together(server.events())["stop_reason"] == "end_turn"
    with serving(ScriptedEngine(ValueError("words of a prompt"))) as server:
        response = server.ask("POST", "/v1/messages", json=messages_body())
        assert response.status_code == 500
        assert "words of a prompt" not in response.text


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "id", "source"]),
            inner | st.sampled_from(["text", "user", "assistant", "system", "tool_result"]),
            max_size=4,
        )
    ),
    max_leaves=8,
)
FIELDS = sorted(
    "max_tokens messages output_config stop_sequences stream system temperature thinking "
    "tool_choice tools top_p seed".split()
)
WHOLE_BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "words"},
    {"type": "text", "text": ""},
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "tool_use", "id": "a", "name": "Read", "input": {"path": [1.5, None]}},
    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "r"}, IMAGE]},
    {"type": "tool_result", "tool_use_id": "a"},
    {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"},
    {"type": "search_result", "title": "t", "source": "s", "content": []},
    {"type": "tool_reference", "tool_name": "Read"},
    {"type": "server_tool_use", "id": "b", "name": "web_search", "input": {}},
    {"type": "unheard_of", "data": {"x": 1}},
    IMAGE,
]
KEYS = sorted({key for block in WHOLE_BLOCKS for key in block})


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    """A block, whole or with something wrong in it."""
    block: dict[str, Any] = dict(draw(st.sampled_from(WHOLE_BLOCKS)))
    if draw(st.booleans()):
        block[draw(st.sampled_from(KEYS))] = draw(JSON)
    return block


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages of any role in any order."""
    messages: list[dict[str, Any]] = []
    for role in draw(st.lists(st.sampled_from(["user", "assistant", "system"]), max_size=6)):
        content: Any = draw(st.lists(blocks(), max_size=4)) if draw(st.booleans()) else "words"
        messages.append({"role": role, "content": content})
    return messages


def assert_answered_or_refused(server: Server, body: dict[str, Any]) -> int:
    response = server.ask("POST", "/v1/messages", content=json.dumps(messages_body(**body)))
    assert response.status_code in (200, 400), response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        put_together(sent_events(response.text))
    return response.status_code


def test_no_body_is_more_than_a_bad_request() -> None:
    with serving(ScriptedEngine("</think>Hello")) as server:

        @settings(deadline=None)
        @given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
        def check(changed: dict[str, Any]) -> None:
            assert_answered_or_refused(server, changed)

        check()


def test_no_history_is_more_than_a_bad_request() -> None:
    statuses: set[int] = set()
    with serving(ScriptedEngine("Hm</think>Hello " + calls(("Read", {})))) as server:

        @settings(deadline=None, max_examples=150)
        @given(histories(), st.booleans())
        def check(messages: list[dict[str, Any]], stream: bool) -> None:
            body = {"messages": messages, "stream": stream, "tools": [TOOL], "max_tokens": 900}
            statuses.add(assert_answered_or_refused(server, body))

        check()
    assert statuses == {200, 400}
