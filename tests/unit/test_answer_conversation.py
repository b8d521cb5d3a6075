"""Whole conversations answered: tools, turns that return, calls that were asked for, chunks."""

from collections.abc import Sequence
from typing import Any

import deepseek_recipe as recipe
import pytest

from mlx_engine.answer import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from mlx_engine.errors import BadRequest, ContextTooLong
from mlx_engine.respond import End, Event, Progress, Request, respond
from mlx_engine.tokenizer import SPELLINGS
from mlx_engine.tool_calls import ANY_TOOL
from tests.fake_engine import tiny_tokenizer, with_special_tokens
from tests.scripted_engine import Course, ScriptedEngine

M = SPELLINGS["dsml"]
EOS = SPELLINGS["eos"]
TOOLS = [recipe.ToolDefinition(name, "", {"type": "object"}) for name in ("f", "g")]
PARAMETER = f'<{M} parameter name="n" string="false">1.50</{M} parameter>'
CALL = f'<{M} invoke name="f">\n{PARAMETER}\n</{M} invoke>'
F = f"\n\n<{M} calls>\n{CALL}\n</{M} calls>"
HI = recipe.UserMessage("Hi")


def conversation(*messages: recipe.Message, **options: Any) -> recipe.Conversation:
    options.setdefault("tools", TOOLS)
    return recipe.Conversation(messages or [HI], **options)


def run(engine: ScriptedEngine, request: Request, **options: Any) -> tuple[list[Event], End]:
    *events, end = respond(engine, request, **options)
    assert isinstance(end, End)
    assert engine.courses[-1].is_closed
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    text = "".join(e.text for e in events if isinstance(e, TextDelta))
    assert (reasoning, text) == (end.reasoning, end.text)
    starts = [(e.id, e.name) for e in events if isinstance(e, ToolCallStart)]
    assert starts == [(call.id, call.name) for call in end.tool_calls]
    fragments = "".join(e.json for e in events if isinstance(e, ToolCallDelta))
    assert fragments == "".join(call.arguments for call in end.tool_calls)
    assert sum(isinstance(e, ToolCallEnd) for e in events) == len(starts)
    return events, end


def test_an_answer_with_calls():
    engine = ScriptedEngine(f"why</think>so{F}{EOS}")
    _, end = run(engine, Request(conversation=conversation()))
    assert (end.reasoning, end.text, end.finish_reason) == ("why", "so", "tool_calls")
    (call,) = end.tool_calls
    assert (call.name, call.arguments) == ("f", '{"n": 1.50}')
    # The answer ends with its block: nothing that may follow is waited for.
    assert engine.courses[0].said == with_special_tokens(f"why</think>so{F}", engine.tokenizer)
    assert end.completion_tokens == len(engine.courses[0].said)
    assert end.reasoning_tokens == 4


def next_prompt(engine: ScriptedEngine, end: End, **call: Any) -> list[int]:
    """The tokens of the answer's turn as they stand in the prompt with the tool's result."""
    calls = [
        recipe.ToolCall(c.id, c.name, call.get("arguments", c.arguments)) for c in end.tool_calls
    ]
    reasoning = call.get("reasoning", end.reasoning)
    turn = recipe.AssistantMessage(end.text, reasoning, calls)
    results = [recipe.ToolMessage("done", c.id) for c in end.tool_calls]
    request = Request(conversation=conversation(HI, turn, *results))
    token_ids = list(request.encode(engine.tokenizer, engine.turns).token_ids)
    n = len(engine.courses[0].call.token_ids)
    assert token_ids[:n] == list(engine.courses[0].call.token_ids)
    return token_ids[n : token_ids.index(engine.tokenizer.special.eos)]


@pytest.mark.parametrize("said", [f"why</think>so\n{F}", f"why\n\n{F}", f"</think>{F}{F}"])
def test_a_turn_with_calls_returns_as_it_was_said(said: str):
    engine = ScriptedEngine(said)
    _, end = run(engine, Request(conversation=conversation()))
    for changed in ({}, {"arguments": '{"n":1.5}'}, {"reasoning": None}):
        assert next_prompt(engine, end, **changed) == engine.courses[0].said


def test_a_call_that_was_closed_for_the_model_returns_rendered():
    engine = ScriptedEngine(f"</think>{F[: F.index('</')]}")
    _, end = run(engine, Request(conversation=conversation()))
    assert [call.arguments for call in end.tool_calls] == ["{}"]
    assert end.finish_reason == "tool_calls"
    assert engine.turns.n_bytes == 0
    turn = next_prompt(engine, end)
    assert turn[-len(" calls>") :] == engine.tokenizer.encode_text(" calls>")


def test_cut_by_length_the_call_is_closed():
    said = f"</think>so{F}"
    n_tokens = len(with_special_tokens(said, tiny_tokenizer()))
    for n in range(3, n_tokens):
        engine = ScriptedEngine(said)
        _, end = run(engine, Request(conversation=conversation(), max_tokens=n))
        assert (end.finish_reason, end.completion_tokens) == ("length", n)
        assert end.text.rstrip("\n<") == "so"
        assert [call.arguments for call in end.tool_calls] in ([], ["{}"], ['{"n": 1.50}'])
        assert M not in end.text
        # A turn that ends within a tag would leave it open in the next prompt.
        is_whole = engine.tokenizer.special.dsml not in engine.courses[0].said
        assert (engine.turns.n_bytes > 0) == is_whole
    _, end = run(ScriptedEngine(said), Request(conversation=conversation(), max_tokens=n_tokens))
    assert (end.finish_reason, len(end.tool_calls)) == ("tool_calls", 1)


def test_one_call_where_several_are_not_wanted():
    said = f"</think>so\n\n<{M} calls>\n{CALL}\n{CALL}\n</{M} calls>"
    for wanted, n in ((True, 2), (False, 1)):
        engine = ScriptedEngine(said)
        _, end = run(engine, Request(conversation=conversation(), parallel_calls=wanted))
        assert (len(end.tool_calls), end.finish_reason) == (n, "tool_calls")
        rest = said[said.index(CALL) + len(CALL) :] if not wanted else ""
        whole = with_special_tokens(said.removesuffix(rest), engine.tokenizer)
        assert engine.courses[0].said == whole
        assert (engine.turns.n_bytes > 0) == wanted


def test_tool_choice_none_hides_the_tools_and_drops_calls():
    engine = ScriptedEngine(f"why</think>so{F}")
    request = Request(conversation=conversation(tool_choice="none"))
    _, end = run(engine, request)
    assert (end.reasoning, end.text, end.tool_calls) == ("why", "so", ())
    assert (end.finish_reason, engine.turns.n_bytes) == ("stop", 0)
    assert engine.tokenizer.special.dsml not in engine.courses[0].call.token_ids
    _, end = run(engine, Request(conversation=conversation(), parses_tools=False))
    assert end.text == f"so{F}"


@pytest.mark.parametrize("tool", ["f", ANY_TOOL])
def test_a_call_that_was_asked_for(tool: str):
    said = F.split("calls>\n", 1)[1] if tool == ANY_TOOL else CALL[CALL.index("\n") + 1 :]
    engine = ScriptedEngine(said)
    asked = conversation(thinking_mode=False)
    _, end = run(engine, Request(conversation=asked, starts_in_call=tool))
    assert [call.arguments for call in end.tool_calls] == ['{"n": 1.50}']
    assert (end.text, end.finish_reason) == ("", "tool_calls")
    prompt = engine.courses[0].call.token_ids
    plain = Request(conversation=asked).encode(engine.tokenizer).token_ids
    assert prompt[: len(plain)] == plain
    opening = F[: F.index(said)]
    assert list(prompt[len(plain) :]) == with_special_tokens(opening, engine.tokenizer)
    # In the next prompt the turn begins with what the prompt had opened.
    calls = [recipe.ToolCall(c.id, c.name, "{}") for c in end.tool_calls]
    turn = recipe.AssistantMessage("", None, calls)
    result = recipe.ToolMessage("done", calls[0].id)
    following = Request(conversation=conversation(HI, turn, result, thinking_mode=False))
    token_ids = following.encode(engine.tokenizer, engine.turns).token_ids
    whole = (*prompt, *engine.courses[0].said, engine.tokenizer.special.eos)
    assert token_ids[: len(whole)] == whole


def test_the_opening_is_the_vendors():
    asked = conversation(thinking_mode=False)
    ours = Request(conversation=asked, starts_in_call=ANY_TOOL).encode(tiny_tokenizer())
    encoding = recipe.DeepseekV41Encoding()
    rendered = encoding.render_conversation(
        conversation(thinking_mode=False, tool_choice="required")
    )
    assert list(ours.token_ids) == with_special_tokens(rendered.prompt, tiny_tokenizer())


@pytest.mark.parametrize(
    ("turn", "said", "expected"),
    [
        (recipe.AssistantMessage("Once ", "why", prefix=True), "\nupon", ("", "\nupon")),
        (recipe.AssistantMessage("", "why ", prefix=True), "\nnot</think>\nso", ("\nnot", "so")),
    ],
)
def test_a_turn_that_was_begun_is_continued(
    turn: recipe.Message, said: str, expected: tuple[str, str]
):
    engine = ScriptedEngine(said)
    _, end = run(engine, Request(conversation=conversation(HI, turn)))
    assert (end.reasoning, end.text) == expected
    assert engine.turns.n_bytes == 0


def test_the_signature_finds_the_turn():
    engine = ScriptedEngine("why</think> so")
    run(engine, Request(conversation=conversation(), signature="s"))
    # Elsewhere, with its reasoning: only the signature is the same.
    turn = recipe.AssistantMessage("so", "why")
    for signature, is_known in (("s", True), ("t", False)):
        messages = [recipe.UserMessage("Ho"), turn, HI]
        request = Request(conversation=conversation(*messages), signatures=[signature])
        token_ids = request.encode(engine.tokenizer, engine.turns).token_ids
        assert (bytes_of(token_ids).count(b"why so") == 1) == is_known


def bytes_of(token_ids: Sequence[int]) -> bytes:
    return b"".join(tiny_tokenizer().token_bytes(token_id) for token_id in token_ids)


def test_an_engine_may_come_back_between_chunks():
    engine = ScriptedEngine("so", chunk_tokens=40)
    request = Request("Hi", effort="off", system="x" * 90)
    events, end = run(engine, request)
    progress = [event for event in events if isinstance(event, Progress)]
    told = [(p.done_tokens, p.total_tokens) for p in progress if p.stage == "prefill"]
    n = end.prompt_tokens
    assert told == [(0, n), (0, n), (40, n), (80, n), (n, n), (n, n)]
    assert end.cached_tokens == 0
    _, end = run(engine, request)
    assert end.cached_tokens == n - 1


def test_cancelled_between_chunks():
    courses: list[Course] = []
    engine = ScriptedEngine("so", chunk_tokens=10, before_step=courses.append)
    _, end = run(engine, Request("Hi"), cancelled=lambda: len(courses) == 3)
    assert (end.finish_reason, end.completion_tokens) == ("cancelled", 0)
    assert engine.courses[0].chunks_done == 3


def test_an_answer_has_the_room_that_there_is():
    n = len(Request(conversation=conversation()).encode(tiny_tokenizer()).token_ids)
    for max_tokens in (None, 7, 1000):
        engine = ScriptedEngine("so", context_tokens=n + 9)
        run(engine, Request(conversation=conversation(), max_tokens=max_tokens))
        assert engine.courses[0].call.max_tokens == min(9, max_tokens or 9)
    for max_tokens in (None, 7):
        engine = ScriptedEngine("so", context_tokens=n - 1)
        with pytest.raises(ContextTooLong):
            list(respond(engine, Request(conversation=conversation(), max_tokens=max_tokens)))


@pytest.mark.parametrize(("options", "n"), [({}, 65536), ({"thinking_mode": False}, 8192)])
def test_the_default_length_is_the_vendors(options: dict[str, Any], n: int):
    engine = ScriptedEngine("so", context_tokens=1_000_000)
    run(engine, Request(conversation=conversation(**options)))
    assert engine.courses[0].call.max_tokens == n


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "give a prompt or a conversation"),
        ({"prompt": "Hi", "conversation": conversation()}, "give a prompt or a conversation"),
        ({"conversation": conversation(), "system": "x"}, "leave out system and raw"),
        ({"conversation": recipe.Conversation([])}, "must end with a message of the user"),
        (
            {"conversation": conversation(HI, recipe.AssistantMessage("x"))},
            "must end with a message of the user",
        ),
        ({"conversation": conversation(), "signatures": ["s"]}, "1 signatures for 0 messages"),
        ({"conversation": conversation(tool_choice="required")}, "is said by starts_in_call"),
        ({"conversation": conversation(), "starts_in_call": "f"}, "turn thinking off"),
        (
            {
                "conversation": conversation(thinking_mode=False, tool_choice="none"),
                "starts_in_call": "f",
            },
            "'f', is not among the tools",
        ),
        (
            {"conversation": conversation(thinking_mode=False), "starts_in_call": "h"},
            "'h', is not among the tools",
        ),
        (
            {
                "conversation": conversation(thinking_mode=False, tools=[]),
                "starts_in_call": ANY_TOOL,
            },
            "without any tool",
        ),
        ({"prompt": "Hi", "starts_in_call": "f"}, "is not among the tools"),
    ],
)
def test_impossible_requests_are_refused(values: dict[str, Any], sentence: str):
    with pytest.raises(BadRequest, match=sentence):
        Request(**values)
