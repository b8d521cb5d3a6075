"""How the demo model is judged: right answers count, and nothing else does."""

import json
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from bench.demo_model.cases import KINDS, STORY, case
from bench.demo_model.chat import Chat
from bench.demo_model.evaluate import Judge, conversation_of, is_right, is_story
from bench.demo_model.golden import PROMPTS, answer
from bench.demo_model.tasks import chat_of
from bench.report import Report
from mlx_engine.engine import Engine
from mlx_engine.engram_table import EngramStats
from mlx_engine.loading import load
from mlx_engine.request import Request
from mlx_engine.respond import End, Timings
from mlx_engine.tiny import write_tiny_checkpoint
from mlx_engine.tool_calls import ToolCall


def answered(chat: Chat, **changes: Any) -> End:
    """The expected answer as an engine gives it."""
    turn = chat.turns[-1]
    calls = [ToolCall(str(i), c.name, json.dumps(c.arguments)) for i, c in enumerate(turn.calls)]
    end = End(
        text=turn.text,
        reasoning=turn.reasoning if chat.thinks else "",
        prompt_tokens=9,
        cached_tokens=0,
        completion_tokens=3,
        timings=Timings(1.0, 1.0, 9.0, 3.0),
        engram=EngramStats(),
        finish_reason="tool_calls" if calls else "stop",
        tool_calls=tuple(calls),
    )
    return replace(end, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_expected_answer_is_right_and_no_other(kind: str):
    chat, other = case(kind, 0), case(kind, 1)
    end = answered(chat)
    assert is_right(chat, end)
    if end.tool_calls:
        first, *rest = end.tool_calls
        assert not is_right(chat, replace(end, tool_calls=(replace(first, name="x"), *rest)))
        spoilt = replace(first, arguments=json.dumps({"x": 1}))
        assert not is_right(chat, replace(end, tool_calls=(spoilt, *rest)))
        assert not is_right(chat, replace(end, tool_calls=()))
    else:
        assert not is_right(chat, replace(end, text=end.text + "!"))
        assert other.turns[-1].text == end.text or not is_right(other, end)


def test_a_story_has_what_was_asked_in_known_words():
    for number in range(20):
        chat = case(STORY, number)
        end = answered(chat)
        assert is_story(chat, end), end.text
        assert not is_story(chat, replace(end, finish_reason="length"))
        assert not is_story(chat, replace(end, text=end.text.replace("named", "naned")))
        assert not is_story(chat, replace(end, text=end.text.split(". ")[0]))
        hero = chat.turns[-1].text.split(" named ")[1].split(".")[0]
        assert not is_story(chat, replace(end, text=end.text.replace(hero, "Nobody")))


class Wrong:
    """Answers every other case as expected, and reasons where it is not asked to."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def respond(self, request: Request) -> Generator[End]:
        kind, number, thinks = self.next()
        chat = case(kind, number, thinks=thinks)
        assert request.conversation is not None
        assert str(request.conversation) == str(conversation_of(chat))
        self.asked.append(request)
        end = answered(chat)
        yield end if number % 2 == 0 else replace(end, text="no", tool_calls=(), reasoning="so")

    def next(self) -> tuple[str, int, bool]:
        i = len(self.asked)
        return ("sum", i, False) if i < 10 else ("sum", i - 10, True)

    def reset(self) -> None: ...


def test_the_table_counts_what_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["evaluate"])
    judge = Judge(Report("demo_model.evaluate", ""), cast(Engine, Wrong()))
    judge.table(["sum"], 10)
    lines = capsys.readouterr().out.splitlines()
    assert "| sum | 50% | 50% |  |" in lines
    # Five of ten reason unasked; both that are asked to do.
    assert "| thinking is there as asked | 58% | | |" in lines
    score = judge.report.results["sum"]
    assert (score["right"], score["cases"], len(score["wrong"])) == (5, 10, 4)
    assert score["wrong"][0] == ["no", case("sum", 1).turns[-1].text]


def test_chats_become_conversations_of_all_their_turns():
    seen: set[str] = set()
    for seed in range(60):
        chat = chat_of(Random(seed), 1500)
        conversation = conversation_of(chat)
        roles = [turn.role for turn in chat.turns[:-1] for _ in turn.results or ("",)]
        assert len(conversation.messages) == len(roles) + bool(chat.system)
        seen.update(roles)
    assert seen == {"user", "assistant", "tool", "system"}


def test_a_golden_answer_notes_the_nearest_other(tmp_path: Path):
    write_tiny_checkpoint(tmp_path / "tiny")
    with load(tmp_path / "tiny", dtype="float32", context_tokens=512) as engine:
        first, again = (answer(engine, "Hello!", "off") for _ in range(2))
    assert first == again
    assert 0 <= first.margin < 5 and first.text
    assert len(dict(PROMPTS)) >= 12
