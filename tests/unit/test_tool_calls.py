"""The markup of tool calls: what is a call, what is text, and where the markup breaks."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.prompt import render
from mlx_engine.tokenizer import SPELLINGS
from mlx_engine.tool_calls import (
    ANY_TOOL,
    CallEvent,
    CallParser,
    TagLexer,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

M = SPELLINGS["dsml"]
TOOLS = {"f", "get_weather", "ns::tool"}


@dataclass
class Parsed:
    """What a parser gave out, put together; calls as names and arguments."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    shows_all: bool = True
    is_done: bool = False


def parse(
    said: str,
    *,
    cuts: Iterable[int] = (),
    is_cut: bool = False,
    tools: set[str] | None = TOOLS,
    opened: str | None = None,
) -> Parsed:
    """Parse an output in which the marker's spelling stands for its token; cut where told."""
    lexer, parser, parsed = TagLexer(), CallParser(tools), Parsed()
    is_open = False

    def take(item: str | CallEvent) -> None:
        nonlocal is_open
        match item:
            case str():
                assert not is_open and not parsed.calls
                parsed.text += item
            case ToolCallStart(id, name):
                assert not is_open and id.startswith("call_")
                is_open = True
                parsed.calls.append((name, ""))
            case ToolCallDelta(fragment):
                assert is_open and fragment
                name, arguments = parsed.calls[-1]
                parsed.calls[-1] = (name, arguments + fragment)
            case ToolCallEnd():
                assert is_open
                is_open = False

    for event in parser.open(opened) if opened else ():
        take(event)
    for is_marker, piece in pieces(said, cuts):
        for item in lexer.marker() if is_marker else lexer.text(piece):
            for event in parser.push(item):
                take(event)
    rest, is_tag = lexer.finish()
    for event in parser.finish(rest, is_tag=is_tag, is_cut=is_cut):
        take(event)
    assert not is_open
    assert [(call.name, call.arguments) for call in parser.calls] == parsed.calls
    assert len({call.id for call in parser.calls}) == len(parser.calls)
    for _, arguments in parsed.calls:
        assert isinstance(json.loads(arguments), dict)
    parsed.shows_all, parsed.is_done = parser.shows_all, parser.is_done
    return parsed


def pieces(said: str, cuts: Iterable[int]) -> list[tuple[bool, str]]:
    """The text between markers in pieces, and the markers, which are never cut."""
    result: list[tuple[bool, str]] = []
    wanted = set(cuts)
    at = 0
    for i, part in enumerate(said.split(M)):
        if i:
            result.append((True, ""))
            at += len(M)
        first = 0
        for n in range(1, len(part) + 1):
            if n == len(part) or at + n in wanted:
                result.append((False, part[first:n]))
                first = n
        at += len(part)
    return result


def call(name: str, *parameters: str) -> str:
    body = "\n".join(parameters)
    return f'<{M} invoke name="{name}">\n{body}\n</{M} invoke>'


def text_parameter(name: str, value: str) -> str:
    return f'<{M} parameter name="{name}" string="true">{value}</{M} parameter>'


def json_parameter(name: str, value: str) -> str:
    return f'<{M} parameter name="{name}" string="false">{value}</{M} parameter>'


def block(*calls: str) -> str:
    return f"<{M} calls>\n" + "\n".join(calls) + f"\n</{M} calls>"


F = block(call("f", text_parameter("a", "x")))


def test_calls_of_no_tool_that_was_given_are_told_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = f'<{M} calls><{M} invoke name="another"></{M} invoke></{M} calls>'
    assert parse(said).text == said
    assert "of no tool that it was given" in caplog.text and "another" not in caplog.text
    caplog.clear()
    assert parse(said.replace("another", "f")).calls == [("f", "{}")]
    assert not caplog.text


def test_a_call_and_the_text_before_it():
    assert parse("Well. " + F) == Parsed("Well. ", [("f", '{"a": "x"}')], True, True)


def test_parallel_calls_come_in_their_order():
    said = block(call("f"), call("get_weather", json_parameter("n", "1")), call("ns::tool"))
    assert parse(said).calls == [("f", "{}"), ("get_weather", '{"n": 1}'), ("ns::tool", "{}")]


def test_what_the_vendor_renders_is_what_it_was():
    """Every kind of value, over the vendor's own writing of it."""
    arguments: dict[str, Any] = {
        "text": 'line\n "quoted" \\ </tag> é\U0001f600\u2028',
        "empty": "",
        "list": [1, [2.5, None], {"k": "<|v|>"}],
        "no": False,
        "object": {},
        "spaced": "  x\n",
    }
    tool_calls = [
        recipe.ToolCall("1", "f", json.dumps(arguments)),
        recipe.ToolCall("2", "get_weather", "{}"),
    ]
    messages = [
        recipe.UserMessage("Hi"),
        recipe.AssistantMessage("So.", None, tool_calls),
        recipe.UserMessage("and?"),
    ]
    rendered = [p.text for p in render(recipe.Conversation(messages, thinking_mode=False))]
    last_eos = rendered.index(SPELLINGS["eos"])
    said = "".join(rendered[rendered.index(SPELLINGS["think_end"]) + 1 : last_eos])
    parsed = parse(said)
    assert parsed.text == "So.\n\n"
    assert [name for name, _ in parsed.calls] == ["f", "get_weather"]
    assert [json.loads(arguments) for _, arguments in parsed.calls] == [arguments, {}]
    assert list(json.loads(parsed.calls[0][1])) == list(arguments)
    assert parsed.shows_all


@pytest.mark.parametrize(
    "value",
    [
        "1.50",
        "1e3",
        "123456789012345678901234567890",
        "-0",
        "[1,2]",
        '{"a":1.0,"a":2}',
        '"\\u00e9"',
    ],
)
def test_json_values_keep_their_spelling(value: str):
    assert parse(block(call("f", json_parameter("v", value)))).calls == [("f", f'{{"v": {value}}}')]


@pytest.mark.parametrize(
    "value",
    ["", "yes", "{'a': 1}", "[1,", "NaN", "1 2", "01", '"\\ud800"', "[" * 5000, "9" * 5000, "\n"],
)
def test_a_json_value_that_is_none_is_a_string(value: str):
    (_, arguments), *_ = parse(block(call("f", json_parameter("v", value)))).calls
    assert json.loads(arguments) == {"v": value}


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("", "5", 5),
        ("", "five", "five"),
        (' string="maybe"', "[5]", [5]),
    ],
)
def test_a_value_of_no_known_form_is_json_where_it_can_be(
    attribute: str, value: str, expected: object
):
    said = block(call("f", f'<{M} parameter name="v"{attribute}>{value}</{M} parameter>'))
    assert json.loads(parse(said).calls[0][1]) == {"v": expected}


def test_of_a_parameter_given_twice_the_first_counts():
    for second in (text_parameter("a", "y"), json_parameter("a", "2")):
        parsed = parse(block(call("f", text_parameter("a", "x"), second, json_parameter("b", "1"))))
        assert parsed.calls == [("f", '{"a": "x", "b": 1}')]
        assert not parsed.shows_all


@pytest.mark.parametrize(
    "said",
    [
        f"The marker is {M}, as in <{M} calls>, and that is that.",
        f"<{M}",
        f"<{M} cal{M}",
        f"<{M} cal<{M}>",
        f"{M}",
        f"<{M} calls",
        f"</{M} calls>",
        f"<{M} calls>\n",
        f"<{M} calls>\nso\n</{M} calls>",
        f"<{M} calls>\n<{M} calls>\n",
        f"<{M} callsign>",
        f'<{M} invoke name="f"',
        f'<{M} invoke nam="f">',
        f'<{M} invoke="f">',
        block(call("unknown", text_parameter("a", "x"))),
        call("unknown"),
        text_parameter("a", "x"),
        f'<{M} invoke name="{"f" * 2000}">',
        f"a < b </ c <{M}<{M}< d",
        f'<{M} calls>\n<{M} parameter name="f">',
        f"{M} calls>\n{M} invoke name='f'>",
        F.replace(M, "｜DSML"),
    ],
)
def test_what_is_no_call_is_text(said: str):
    assert parse(said) == Parsed(said)


@pytest.mark.parametrize(("n", "is_tag"), [(900, True), (1000, False), (2000, False)])
def test_a_tag_has_an_end(n: int, is_tag: bool):
    said = f'<{M} invoke name="f" note="{"x" * n}">'
    for cuts in ((), range(len(said))):
        assert bool(parse(said, cuts=cuts).calls) == is_tag
    # Not even its beginning is held back for longer.
    lexer = TagLexer()
    items = [*lexer.text("<"), *lexer.marker()]
    for character in said[len(f"<{M}") : -2]:
        items += lexer.text(character)
    assert bool(items) != is_tag


def test_a_call_after_a_mention_is_found():
    said = f"Write <{M} calls> and <{M} invoke>: "
    assert parse(said + F) == Parsed(said, [("f", '{"a": "x"}')], True, True)


@pytest.mark.parametrize("name", ["tool_calls", "toolcalls", "function_calls", "calls"])
@pytest.mark.parametrize("space", [" ", ""])
def test_other_spellings_of_the_same_tags(name: str, space: str):
    said = F.replace(" calls>", f"{space}{name}>").replace(f"{M} ", f"{M}{space}")
    assert parse(said) == Parsed("", [("f", '{"a": "x"}')], True, True)


def test_a_call_without_a_block_and_one_that_closes_itself():
    assert parse(call("f", text_parameter("a", "x"))).calls == [("f", '{"a": "x"}')]
    assert parse(f'<{M} invoke name="f"/>').calls == [("f", "{}")]
    said = block(f'<{M} invoke name="f"/>', f'<{M} invoke name="f" />')
    assert parse(said) == Parsed("", [("f", "{}"), ("f", "{}")], True, True)


A = text_parameter("a", "x")


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        # The end of a value, of a call, of both is missing.
        (f'<{M} invoke name="f">\n{A[: A.index("</")]}</{M} invoke>', ['{"a": "x"}']),
        (f'<{M} invoke name="f">\n{A}\n</{M} calls>', ['{"a": "x"}']),
        (f'<{M} invoke name="f">\n{A[: A.index("</")]}</{M} calls>', ['{"a": "x"}']),
        (f'<{M} invoke name="f">\n{A}\n{call("f")}', ['{"a": "x"}', "{}"]),
        (
            f'<{M} invoke name="f">\n<{M} parameter name="b" string="false">1\n{A}\n</{M} invoke>',
            ['{"b": 1, "a": "x"}'],
        ),
        # Something else is where a parameter or the next call should be.
        (f'<{M} invoke name="f">\n{A}\nso <b>\n</{M} invoke>', ['{"a": "x"}']),
        (f'<{M} invoke name="f">\n{A}\n</{M} parameter>', ['{"a": "x"}']),
        (f'<{M} invoke name="f">\n<{M} parameter>x', ["{}"]),
        (call("f") + "\nso", ["{}"]),
        (block(call("f"), call("unknown"), call("f")), ["{}"]),
        # It ends too early.
        (f'<{M} invoke name="f">', ["{}"]),
        (f'<{M} invoke name="f">\n<', ["{}"]),
        (f'<{M} invoke name="f">\n{A}\n<{M} para', ['{"a": "x"}']),
        (f'<{M} invoke name="f">\n{A[: A.index("</")]}', ['{"a": "x"}']),
        (f'<{M} invoke name="f">\n{A[: A.index("</")]}</', ['{"a": "x</"}']),
        (f'<{M} invoke name="f">\n{A[:-3]}', ['{"a": "x"}']),
        (f'<{M} invoke name="f">\n{json_parameter("a", "12")[:-12]}', ["{}"]),
    ],
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_call_that_breaks_is_closed(said: str, calls: list[str], is_cut: bool):
    parsed = parse(said, is_cut=is_cut)
    assert (parsed.text, [arguments for _, arguments in parsed.calls]) == ("", calls)
    assert not parsed.shows_all


def test_a_parameter_that_closes_itself_is_empty():
    said = block(call("f", f'<{M} parameter name="c"/>', A))
    assert parse(said) == Parsed("", [("f", '{"c": "", "a": "x"}')], True, True)


def test_a_mention_within_a_value_belongs_to_it():
    value = f"use {M} or <{M} calls> or <{M} or </{M} or <{M} callsign>"
    for parameter in (text_parameter("a", value), json_parameter("a", json.dumps(value))):
        (_, arguments), *_ = parse(block(call("f", parameter))).calls
        assert json.loads(arguments)["a"].replace("\uff5c", "｜") == value


def test_after_the_calls_nothing_counts():
    parsed = parse(F + "\n" + F + "so")
    assert (parsed.text, len(parsed.calls), parsed.shows_all) == ("", 1, False)
    assert parse(F + "\n").shows_all


def test_within_a_block_that_the_prompt_opened():
    rest = call("f", A) + f"\n</{M} calls>"
    assert parse(rest, opened=ANY_TOOL) == Parsed("", [("f", '{"a": "x"}')], True, True)
    body = rest[rest.index("\n") :]
    assert parse(body, opened="f") == Parsed("", [("f", '{"a": "x"}')], True, True)
    assert parse("I would rather not.", opened=ANY_TOOL).text == "I would rather not."
    assert parse("I would rather not.", opened="f").calls == [("f", "{}")]
    assert parse("", opened="f").calls == [("f", "{}")]


def test_any_name_is_one_without_a_list():
    assert parse(block(call("unknown")), tools=None).calls == [("unknown", "{}")]
    assert parse(f"<{M} invoke>", tools=None).text == f"<{M} invoke>"


SCRIPTS = [
    "Well.\n\n" + block(call("f", text_parameter("a", 'é"\\\n< </ \U0001f600'), A), call("f")),
    block(call("f", json_parameter("n", '{"a": [1.50, "</x>"]}'), text_parameter("b", ""))),
    f"a <{M} calls> b {F} c",
    F.replace(" calls", "tool_calls").replace(" invoke", "invoke"),
    block(call("f", f'<{M} parameter name="v">x</{M} parameter>'), call("unknown")),
]


@pytest.mark.parametrize("said", SCRIPTS)
def test_the_cuts_make_no_difference(said: str):
    whole = parse(said)
    assert parse(said, cuts=range(len(said))) == whole
    for cut in range(1, len(said)):
        assert parse(said, cuts=[cut]) == whole


def beginnings(said: str) -> Iterable[str]:
    """Every beginning of an output; the marker is one token and never cut."""
    for end in range(len(said)):
        if not any(said.startswith(M, end - n) for n in range(1, len(M))):
            yield said[:end]


@pytest.mark.parametrize("said", [said for said in SCRIPTS if "calls> b" not in said])
def test_cut_by_length_no_half_of_a_tag_is_shown(said: str):
    whole = parse(said)
    for part in beginnings(said):
        parsed = parse(part, is_cut=True)
        assert M not in parsed.text
        assert whole.text.startswith(parsed.text.removesuffix("<"))
        for (name, arguments), (_, complete) in zip(parsed.calls, whole.calls, strict=False):
            given, wanted = json.loads(arguments), json.loads(complete)
            assert name == "f" and M not in arguments
            assert list(given) == list(wanted)[: len(given)]
            assert all(given[key] == wanted[key] for key in list(given)[:-1])


WORDS = [
    M,
    "<",
    "</",
    ">",
    "\n",
    " ",
    '"',
    "\\",
    "so",
    "é",
    " calls>\n",
    f"<{M} calls>\n",
    f"</{M} calls>",
    f'<{M} invoke name="f">\n',
    f'<{M} invoke name="unknown">\n',
    f"</{M} invoke>",
    f'<{M} parameter name="a" string="true">',
    f'<{M} parameter name="b" string="false">',
    f'<{M} parameter name="c"/>',
    f"</{M} parameter>",
    "{",
    "1.50",
    F,
]


def outputs(n: int) -> Iterable[tuple[str, Sequence[int]]]:
    choose = random.Random(5)
    for _ in range(n):
        said = "".join(choose.choices(WORDS, k=choose.randrange(1, 14)))
        yield said, choose.choices(range(len(said)), k=4)


@pytest.mark.parametrize("is_cut", [False, True])
def test_random_outputs_give_whole_calls_however_they_are_cut(is_cut: bool):
    n_calls = n_texts = 0
    for said, cuts in outputs(10_000):
        whole = parse(said, is_cut=is_cut)
        assert parse(said, is_cut=is_cut, cuts=cuts) == whole
        if not is_cut and not whole.calls:
            assert whole.text == said
        elif not is_cut:
            assert said.startswith(whole.text)
        n_calls += bool(whole.calls)
        n_texts += bool(whole.text)
    assert n_calls > 1000 and n_texts > 1000


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters='"<', codec="utf-8"), min_size=1, max_size=8),
        st.text(st.characters(codec="utf-8"), max_size=20)
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.lists(st.booleans() | st.none()),
        max_size=5,
    ),
    st.data(),
)
def test_any_arguments_come_through(arguments: dict[str, object], data: st.DataObject):
    parameters = [
        text_parameter(name, value)
        if isinstance(value, str)
        else json_parameter(name, json.dumps(value))
        for name, value in arguments.items()
    ]
    said = block(call("f", *parameters))
    cuts = data.draw(st.lists(st.integers(0, len(said)), max_size=5))
    ((_, parsed),) = parse(said, cuts=cuts).calls
    assert json.loads(parsed) == arguments
