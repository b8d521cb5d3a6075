"""Tokens to events: tool calls beside reasoning, answer and stop strings."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_engine.answer import (
    AnswerEvent,
    AnswerReader,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_engine.tokenizer import SPELLINGS
from mlx_engine.tool_calls import ANY_TOOL
from tests.fake_engine import released_tokenizer, tiny_tokenizer, with_special_tokens

M = SPELLINGS["dsml"]
CALL = (
    f'<{M} invoke name="f">\n<{M} parameter name="a" string="true">x</{M} parameter>\n</{M} invoke>'
)
F = f"<{M} calls>\n{CALL}\n</{M} calls>"
ARGUMENTS = '{"a": "x"}'
Answer = tuple[str, str, list[str]]


def read(said: str | Sequence[int], *, is_cut: bool = False, **options: Any) -> Answer:
    """Reasoning, text and arguments put together from the events, which must agree with the end."""
    token_ids = with_special_tokens(said, tiny_tokenizer()) if isinstance(said, str) else said
    options = {"starts_in_reasoning": True, "tools": {"f"}} | options
    reader = AnswerReader(tiny_tokenizer(), **options)
    events: list[AnswerEvent] = []
    for token_id in token_ids:
        events += reader.push(token_id)
        if reader.is_finished:
            break
    events += reader.finish(is_cut=is_cut and not reader.is_finished)
    reasoning, text, calls = put_together(events)
    assert (reasoning, text) == (reader.reasoning, reader.text)
    assert calls == [call.arguments for call in reader.calls]
    return reasoning, text, calls


def put_together(events: Sequence[AnswerEvent]) -> Answer:
    reasoning = text = ""
    calls: list[str] = []
    for event in events:
        match event:
            case ReasoningDelta(piece):
                assert not calls
                reasoning += piece
            case TextDelta(piece):
                assert not calls
                text += piece
            case ToolCallStart():
                calls.append("")
            case ToolCallDelta(fragment):
                calls[-1] += fragment
            case ToolCallEnd():
                json.loads(calls[-1])
    return reasoning, text, calls


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (f"why</think>so\n\n{F}", ("why", "so", [ARGUMENTS])),
        (f"why</think>\n\n{F}", ("why", "", [ARGUMENTS])),
        (f"why\n</think>\n\nso\n\n\nyes\n\n{CALL}", ("why", "so\n\n\nyes", [ARGUMENTS])),
        # The reasoning was not ended.
        (f"why\n\n{F}", ("why", "", [ARGUMENTS])),
        (f"why {F}</think>so", ("why ", "", [ARGUMENTS])),
        # It goes on within the answer.
        (f"why</think>so\n<think>\nwhat</think>{F}", ("why\n\nwhat", "so\n", [ARGUMENTS])),
        (f"why</think>so<think>what\n\n{F}", ("why\n\nwhat", "so", [ARGUMENTS])),
        (f"</think>{F.replace('x', '<think>x</think>')}", ("", "", [ARGUMENTS])),
    ],
)
def test_calls_are_told_from_reasoning_and_answer(said: str, expected: Answer):
    assert read(said) == expected


def test_a_mention_stays_where_it_was_made():
    said = f"say <{M} calls>\n\n</think>\n\n<{M} calls>\n\nso\n"
    assert read(said) == (f"say <{M} calls>", f"<{M} calls>\n\nso\n", [])
    assert read(f"say <{M}</think>so <{M} cal") == (f"say <{M}", f"so <{M} cal", [])
    assert read(f"say <{M}") == (f"say <{M}", "", [])


def test_an_unknown_tool_comes_back_as_text():
    unknown = F.replace('"f"', '"g"')
    assert read(f"why</think>so\n\n{unknown}\n") == ("why", f"so\n\n{unknown}\n", [])
    assert read(f"why\n{unknown}</think>so") == (f"why\n{unknown}", "so", [])


def test_without_tools_the_markup_is_text():
    assert read(f"why</think>so\n\n{F}\n", tools=()) == ("why", f"so\n\n{F}\n", [])


def test_calls_that_nobody_wanted_are_left_out():
    unknown = F.replace('"f"', '"g"')
    for markup in (F, unknown):
        said = f"why</think>so\n\n{markup}"
        assert read(said, tools=(), drops_calls=True) == ("why", "so", [])
    assert read(f"why\n{F}", tools=(), drops_calls=True) == ("why", "", [])
    assert read(f"say <{M} calls>", tools=(), drops_calls=True) == (f"say <{M} calls>", "", [])


@pytest.mark.parametrize(
    ("said", "stop", "text", "n_calls"),
    [
        (f"one STOP\n\n{F}", "STOP", "one ", 0),
        (f"one STO\n\n{F}", "STOP", "one STO", 1),
        (f"one\n\n{F}", "\n\n", "one", 1),
        ("one\n\n", "\n\n", "one", 0),
        (F, "x", "", 1),
        (F, "invoke", "", 1),
        (f"<{M} calls>so", "calls", f"<{M} ", 0),
    ],
)
def test_stop_strings_end_the_text_and_no_call(said: str, stop: str, text: str, n_calls: int):
    wanted = ("", text, [ARGUMENTS] * n_calls)
    assert read(said, starts_in_reasoning=False, stop=[stop]) == wanted


def test_where_the_answer_ends():
    tokenizer = tiny_tokenizer()
    reader = AnswerReader(tokenizer, starts_in_reasoning=False, stop=["a", "STOP"], tools=["f"])
    for token_id in with_special_tokens("so STOP", tokenizer):
        assert not reader.is_finished
        list(reader.push(token_id))
    assert (reader.is_finished, reader.stop_string, reader.shows_all) == (True, "STOP", False)
    reader = AnswerReader(tokenizer, starts_in_reasoning=False, tools=["f"])
    for token_id in with_special_tokens(F, tokenizer):
        assert not reader.is_finished
        list(reader.push(token_id))
    assert (reader.is_finished, reader.stop_string, reader.shows_all) == (True, None, True)


def test_tokens_of_the_reasoning_are_counted():
    tokenizer = tiny_tokenizer()
    for said, n in ((f"why</think>so{F}", 4), ("why", 3), (f"why<{M} x", 7)):
        reader = AnswerReader(tokenizer, starts_in_reasoning=True, tools=["f"])
        for token_id in with_special_tokens(said, tokenizer):
            list(reader.push(token_id))
        assert reader.reasoning_tokens == n


@pytest.mark.parametrize("tool", ["f", ANY_TOOL])
def test_an_answer_that_starts_in_a_call(tool: str):
    said = f"{CALL}\n</{M} calls>" if tool == ANY_TOOL else CALL[CALL.index("\n") :]
    options: dict[str, Any] = {"starts_in_reasoning": False, "starts_in_call": tool}
    assert read(said, **options) == ("", "", [ARGUMENTS])
    assert read("", **options) == ("", "", [])
    prose: Answer = ("", "Rather not.", []) if tool == ANY_TOOL else ("", "", ["{}"])
    assert read("Rather not.", **options) == prose


def test_half_a_character_ends_where_a_tag_begins():
    tokenizer = tiny_tokenizer()
    smile = tokenizer.encode_text("\U0001f600")
    opening, closing = (
        with_special_tokens(part, tokenizer) for part in (CALL.split("x")[0], CALL.split("x")[1])
    )
    _, text, calls = read(
        [*smile[:2], *opening, *smile, *smile[:3], *closing], starts_in_reasoning=False
    )
    assert text == "\ufffd"
    assert calls == ['{"a": "\U0001f600\ufffd"}']
    mention = [*smile[:2], tokenizer.special.dsml, *smile]
    assert read(mention, starts_in_reasoning=False) == ("", f"\ufffd{M}\U0001f600", [])


@pytest.mark.parametrize(
    "said", [f"why\n</think>so é\n\n{F}", f"why\n\n{F}", f"say <{M} calls> and</think>{F}"]
)
def test_cut_at_every_byte(said: str):
    token_ids = with_special_tokens(said, tiny_tokenizer())
    reasoning, text, calls = read(token_ids)
    mention = f"<{M} calls> and"
    for end in range(len(token_ids)):
        part = read(token_ids[:end], is_cut=True)
        assert reasoning.startswith(part[0].rstrip("\n<"))
        assert text.startswith(part[1].rstrip("\n<\ufffd"))
        assert M not in part[1]
        assert M not in part[0] or mention.startswith(part[0][len("say ") :])
        assert len(part[2]) <= len(calls)


WORDS = [
    "<think>",
    "</think>",
    M,
    "<",
    "</",
    "\n",
    "so",
    "é",
    F,
    CALL,
    CALL[:30],
    "STOP",
    '"',
    "\\",
]


def test_random_tokens_and_their_cuts_give_one_answer():
    """The released vocabulary joins characters that the tiny one has apart; both say the same."""
    choose = random.Random(7)
    vocabularies = (tiny_tokenizer(), released_tokenizer())
    n_calls = 0
    for _ in range(2000):
        said = "".join(choose.choices(WORDS, k=choose.randrange(1, 9)))
        answers: list[Answer] = []
        for tokenizer in vocabularies:
            reader = AnswerReader(
                tokenizer, starts_in_reasoning=True, tools=["f"], stop=["STOP", "so\n"]
            )
            events: list[AnswerEvent] = []
            for token_id in with_special_tokens(said, tokenizer):
                events += reader.push(token_id)
                if reader.is_finished:
                    break
            answers.append(put_together([*events, *reader.finish()]))
        assert answers[0] == answers[1]
        n_calls += bool(answers[0][2])
    assert n_calls > 300


@pytest.mark.parametrize(
    ("said", "reasoning", "text"),
    [
        ("why</think>so it is", "why", "so it is"),
        ("\n\nwhy\n\nnot\n\n</think>\n\nso\n\nit is\n\n", "why\n\nnot", "so\n\nit is\n\n"),
        ("é\U0001f600</think>\u4f60", "é\U0001f600", "\u4f60"),
        (f"why</think>so\n\n{F}", "why", "so"),
        (f"why</think>so <{M} x", "why", f"so <{M} x"),
        ("why</think>so STOP more", "why", "so "),
    ],
)
def test_each_delta_has_the_scores_of_its_tokens(said: str, reasoning: str, text: str):
    tokenizer = tiny_tokenizer()
    reader = AnswerReader(tokenizer, starts_in_reasoning=True, tools={"f"}, stop=["STOP"])
    events: list[AnswerEvent] = []
    for i, token_id in enumerate(with_special_tokens(said, tokenizer)):
        events += reader.push(token_id, TokenLogprob(tokenizer.spelling(token_id), -float(i), ()))
        if reader.is_finished:
            break
    events += reader.finish()
    assert (reader.reasoning, reader.text) == (reasoning, text)
    deltas = [event for event in events if isinstance(event, ReasoningDelta | TextDelta)]
    # In their order, and none twice.
    order = [-scored.logprob for delta in deltas for scored in delta.logprobs]
    assert order == sorted(set(order))
    for kind, whole in ((ReasoningDelta, reasoning), (TextDelta, text)):
        of_kind = [delta for delta in deltas if type(delta) is kind]
        tokens = [scored.token for delta in of_kind for scored in delta.logprobs]
        assert b"".join(tokens).decode() == whole
