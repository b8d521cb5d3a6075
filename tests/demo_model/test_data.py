"""The demo model's data: every answer follows from what stands before it."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

from bench.demo_model import tasks
from bench.demo_model.cases import KINDS, case
from bench.demo_model.chat import Chat, Encoder, format_texts, spans
from bench.demo_model.exercises import exercise
from bench.demo_model.facts import glossary
from bench.demo_model.heads import agent
from bench.demo_model.prepare import build_tokenizer
from bench.demo_model.read_turns import REQUESTS
from bench.demo_model.tasks import chat_of
from bench.demo_model.tools import LISTS, Tool, tools_of
from bench.demo_model.words import spelling_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(format_texts())


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder(tokenizer.to_str())


def agent_of(rng: Random, tokens: int) -> Chat:
    chat = Chat()
    agent(rng, chat, tokens)
    return chat


@pytest.mark.parametrize("make", [chat_of, agent_of])
@pytest.mark.parametrize("tokens", [600, 2000, 8000])
def test_calls_are_those_of_a_tool_that_is_there_with_arguments_that_were_said(
    make: Callable[[Random, int], Chat], tokens: int
):
    calls = 0
    for seed in range(60):
        chat = make(Random(seed), tokens)
        definitions = {tool["name"]: tool["parameters"] for tool in chat.tools}
        assert len(definitions) == len(chat.tools), "two tools of one name"
        said = ""
        for turn in chat.turns:
            for call in turn.calls:
                schema = definitions[call.name]
                assert set(schema["required"]) <= set(call.arguments) <= set(schema["properties"])
                for name, value in call.arguments.items():
                    assert _is_of(value, schema["properties"][name])
                    for part in cast("list[object]", value if type(value) is list else [value]):
                        assert (part if isinstance(part, str) else json.dumps(part)) in said
                calls += 1
            # What was asked, and what a first tool gave back for a second.
            said = turn.text if turn.role == "user" else said + "".join(turn.results)
    assert calls > 20


def _is_of(value: object, schema: dict[str, Any]) -> bool:
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
    is_kind = isinstance(value, kinds[schema["type"]])
    return is_kind and value in schema.get("enum", [value])


def test_documents_are_about_as_long_as_asked_and_tools_up_to_24(encoder: Encoder):
    texts = format_texts()
    for tokens in (300, 2000, 8000):
        sizes = [encoder.document(chat_of(Random(s), tokens), texts)[0].size for s in range(60)]
        assert max(sizes) < 1.5 * tokens
        assert max(sizes) > 0.7 * tokens
    assert max(len(chat_of(Random(seed), 2000).tools) for seed in range(200)) > 14
    assert max(len(chat_of(Random(seed), 8000).tools) for seed in range(200)) > 23


@pytest.mark.parametrize("tokens", [1500, 4000, 8000, 20_000])
def test_long_heads_leave_room_for_what_is_asked_under_them(encoder: Encoder, tokens: int):
    texts = format_texts()
    sizes: list[int] = []
    behind: list[int] = []
    for seed in range(30):
        chat = agent_of(Random(seed), tokens)
        sizes.append(encoder.document(chat, texts)[0].size)
        behind.append(max((len(t.text) for t in chat.turns if t.role == "system"), default=0))
    assert sum(size > 1.05 * tokens for size in sizes) <= 3
    assert sorted(sizes)[15] > tokens / 2
    assert max(behind) > 0.3 * tokens


def test_no_file_of_the_training_says_what_read_turns_asks():
    """Those words are for Claude Code's turns alone."""
    held_out = {word.lower() for key, value, _ in REQUESTS for word in (key, value)}
    seen: set[str] = set()
    for seed in range(200):
        for chat in (chat_of(Random(seed), 1500), agent_of(Random(seed), 4000)):
            seen |= set(re.findall("[a-z]+", str(chat).lower()))
    assert len(held_out) == 20 and not held_out & seen


def test_a_word_has_the_same_tokens_wherever_it_stands(encoder: Encoder):
    rng = Random(0)
    places = (
        '{{"name": "{}"}}',
        "the {} of it",
        "get_{}_now",
        "/tmp/{}/x",
        "({})",
        "a, {}.",
        '="{}">',
    )
    for _ in range(300):
        word = spelling_of(rng)
        if not word.isalnum() or not word.isascii():
            continue
        ids = encoder.text(word)
        for place in places:
            found = encoder.text(place.format(word))
            assert any(found[i : i + len(ids)] == ids for i in range(len(found))), (word, place)


def test_the_tokenizer_gives_every_text_back(tokenizer: Tokenizer, encoder: Encoder):
    for seed in range(20):
        chat = chat_of(Random(seed), 800)
        text = "".join(turn.text for turn in chat.turns) + "\t\r\n  ü猫😀 {}[]</x>"
        assert tokenizer.decode(encoder.text(text), skip_special_tokens=False) == text


def test_a_document_has_the_tokens_of_its_whole_text(encoder: Encoder):
    """Cut into parts of unequal weight it is still what the engine reads."""
    texts = format_texts()
    for seed in range(100):
        chat = chat_of(Random(seed), 1200)
        whole = "".join(text for text, _ in spans(chat, texts))
        assert encoder.document(chat, texts)[0].tolist() == encoder.marked(whole)


def test_names_that_are_looked_up_stand_in_the_list_before_what_is_asked():
    forms: set[str] = set()
    for seed in range(400):
        chat = Chat()
        glossary(Random(seed), chat, 400, 3)
        entries = chat.turns[0].text.split("\n\n")[0].split("\n")
        for turn in chat.turns[1::2]:
            match = re.fullmatch("The (?:name of|tool to) (.*) is (.*)\\.", turn.text)
            assert match is not None
            key, name = match.groups()
            found = [e for e in entries if re.search(rf"(?<!\w){re.escape(key)}(?!\w)", e)]
            assert any(re.search(rf"{re.escape(name)}.*{re.escape(key)}", e) for e in found)
            forms |= {re.sub(r"\w+", "", e) for e in found}
    assert len(forms) > 10


def test_tools_of_one_list_are_asked_for_in_words_of_their_own():
    for seed in range(50):
        tools = tools_of(Random(seed), 24)
        assert len({tool.task for tool in tools}) == len({tool.name for tool in tools}) == 24


def test_tools_of_a_third_of_conversations_mostly_take_lists(monkeypatch: pytest.MonkeyPatch):
    made: list[list[Tool]] = []

    def recording(*args: Any) -> list[Tool]:
        made.append(tools_of(*args))
        return made[-1]

    monkeypatch.setattr(tasks, "tools_of", recording)
    # Of conversations with and without numbers and truth values, which are none of LISTS.
    kinds: dict[bool, list[list[str]]] = {False: [], True: []}
    for seed in range(1000):
        made.clear()
        chat = chat_of(Random(seed), 3000)
        tools = made[-1] if made else []
        later = [parameter.kind for tool in tools for parameter in tool.parameters[1:]]
        assert all(tool.parameters[0].kind == "string" for tool in tools)
        if len(later) >= 12:
            kinds[set(later) <= set(LISTS)].append(later)
            assert all(tool.definition in chat.tools for tool in tools)
    plain, lists = list(chain(*kinds[False])), list(chain(*kinds[True]))
    assert 0.05 < plain.count("array") / len(plain) < 0.2
    assert 0.4 < lists.count("array") / len(lists) < 0.6
    assert 0.25 < len(kinds[True]) / sum(map(len, kinds.values())) < 0.45


@pytest.mark.parametrize("kind", ["sort numbers", "sort words", "sum", "count"])
def test_exercises_are_right(kind: str):
    for seed in range(200):
        chat = Chat()
        exercise(Random(seed), chat, kind)
        request, answer = chat.turns[0].text, chat.turns[1].text
        given = re.findall(r"\d+", request)
        match kind:
            case "sum":
                assert answer.endswith(f"= {sum(map(int, given))}")
                assert chat.turns[1].reasoning.endswith(answer.rsplit(" ", 1)[1])
            case "sort numbers":
                assert answer == ", ".join(sorted(given, key=int))
            case "sort words":
                assert answer == ", ".join(sorted(request.split(": ")[1].split(", ")))
            case _:
                numbers = [int(part) for part in answer.split(", ")]
                step = numbers[1] - numbers[0]
                assert numbers == list(range(numbers[0], numbers[-1] + step, step))
                assert not given or int(given[-1]) == numbers[-1]


def test_questions_about_a_long_context_share_it():
    for kind in ("recall of 7900", "call of 24", "call in 16000", "read in 16000"):
        first, second = (case(kind, number) for number in (0, 1))
        assert (first.system, first.tools) == (second.system, second.tools)
        assert first.turns[-1] != second.turns[-1]
        other = case(kind, 5)
        assert (other.tools, other.turns[0]) != (first.tools, first.turns[0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("call of 8", "23c23512103fdbde"),
        ("call in 16000", "6e796bf264065be0"),
        ("parallel of 4", "92da20e731f7c091"),
        ("result of 8", "a2af0409c68d2d1c"),
        ("read of call", "bc6b762635062766"),
        ("everyday call", "c8048a6061e157a3"),
        ("service call", "af49feaa573b0235"),
        ("unfamiliar call", "da798339eda5bfdf"),
    ],
)
def test_cases_of_calls_stay_what_they_were(kind: str, expected: str):
    """Scores of one model are compared with those of the next, also where training changes."""
    cases = [asdict(case(kind, n, thinks=thinks)) for n in range(20) for thinks in (False, True)]
    assert hashlib.sha256(json.dumps(cases).encode()).hexdigest()[:16] == expected


def test_cases_are_as_long_as_they_say(encoder: Encoder):
    texts = format_texts()
    for kind in KINDS:
        wanted = re.search(r"(?:recall of|in|under) (\d+)", kind)
        size = encoder.document(case(kind, 0), texts)[0].size
        if wanted:
            assert 0.85 < size / int(wanted[1]) < 1.2
        else:
            assert size < 2600


def test_the_same_seed_gives_the_same_in_another_process():
    """Also where strings hash otherwise."""
    code = (
        "from random import Random; from bench.demo_model.cases import KINDS, case\n"
        "from bench.demo_model.tasks import chat_of\n"
        "print([chat_of(Random(s), 1500) for s in range(40)], [case(k, 0) for k in KINDS])"
    )
    root = Path(__file__).parents[2]
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] != b""


def test_no_answer_gives_the_format_away():
    """Nothing but the format writes its markers: they would be taken for calls."""
    for seed in range(100):
        chat = chat_of(Random(seed), 1500)
        parts = [chat.system, json.dumps(chat.tools), *(t.text + t.reasoning for t in chat.turns)]
        assert not any("｜" in part or "think>" in part for part in parts)
