"""What a demo checkpoint can do, on the engine itself: held-out cases, thinking off and on.

    python -m bench.demo_model.evaluate CHECKPOINT [--count N] [--kinds KIND ..] [--ablate KIND ..]

A case is right when the text is the expected one, word for word, or the calls have the expected
names and arguments; a story when it is about what was asked, in the world's words, and ends. It is
as asked when there was reasoning where it was asked for and none elsewhere. Thinking is judged on
a fifth of the cases, and not on the longest, whose contexts would have to be read again. The kinds
of --ablate are then judged with one mechanism of the model left out. The first table is the
README's.
"""

import argparse
import json
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count as count_from
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import deepseek_recipe as recipe
import mlx.core as mx

import mlx_engine
from bench.demo_model.cases import GOALS, KINDS, LONGEST, STORY, case
from bench.demo_model.chat import Chat
from bench.demo_model.prose import story
from bench.demo_model.words import ANIMALS, THINGS
from bench.report import Report
from mlx_engine import model as engine_model
from mlx_engine.engine import Engine
from mlx_engine.ops.indexer import IndexKeys, IndexQueries, choose_rows
from mlx_engine.respond import End, Request
from mlx_engine.sampling import Sampling

ANSWER_TOKENS = 400
SHOWN = 4
CONTEXT_TOKENS = 32_768


def conversation_of(chat: Chat) -> recipe.Conversation:
    """A chat in the form of the vendor's package, its last answer left out."""
    ids = (f"call-{i}" for i in count_from())
    messages: list[recipe.Message] = []
    pending: list[str] = []
    if chat.system:
        messages.append(recipe.SystemMessage(chat.system))
    for turn in chat.turns[:-1]:
        if turn.role == "user":
            messages.append(recipe.UserMessage(turn.text))
        elif turn.role == "system":
            messages.append(recipe.SystemMessage(turn.text))
        elif turn.role == "tool":
            results = zip(turn.results, pending, strict=True)
            messages += [recipe.ToolMessage(text, call_id) for text, call_id in results]
        else:
            calls = [
                recipe.ToolCall(next(ids), call.name, json.dumps(call.arguments))
                for call in turn.calls
            ]
            pending = [call.id for call in calls]
            messages.append(
                recipe.AssistantMessage(turn.text, turn.reasoning or None, calls or None)
            )
    tools = [recipe.ToolDefinition(**tool) for tool in chat.tools]
    if chat.thinks:
        return recipe.Conversation(messages, tools=tools, reasoning_effort="high")
    return recipe.Conversation(messages, tools=tools, thinking_mode=False)


@dataclass
class Score:
    """Cases judged, and of them right and with reasoning as asked; tokens and seconds.

    `read_tokens` are those of the prompts that the engine had not in its state.
    """

    cases: int = 0
    right: int = 0
    as_asked: int = 0
    prompt_tokens: int = 0
    read_tokens: int = 0
    prefill_s: float = 0.0
    answer_tokens: int = 0
    decode_s: float = 0.0
    # The first few wrong answers, each beside what was expected.
    wrong: list[list[str]] = field(default_factory=list[list[str]])

    def add(self, chat: Chat, end: End, is_right: bool) -> None:
        """Judge an answer."""
        self.cases += 1
        self.right += is_right
        if not is_right and len(self.wrong) < SHOWN:
            self.wrong.append([_shown(end.text, _calls(end)), _shown(*_expected(chat))])
        self.as_asked += bool(end.reasoning) == chat.thinks
        self.prompt_tokens += end.prompt_tokens
        self.read_tokens += end.prompt_tokens - end.cached_tokens
        self.prefill_s += end.timings.prefill_s
        self.answer_tokens += end.completion_tokens
        self.decode_s += end.timings.decode_s


Calls = list[tuple[str, Any]]


def _calls(end: End) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in end.tool_calls]


def _expected(chat: Chat) -> tuple[str, Calls]:
    turn = chat.turns[-1]
    return turn.text, [(call.name, call.arguments) for call in turn.calls]


def _shown(text: str, calls: Calls) -> str:
    return f"{text}{calls or ''}"


def is_right(chat: Chat, end: End) -> bool:
    """Whether an answer is the expected one: its calls, or its text."""
    text, calls = _expected(chat)
    return _calls(end) == calls and (bool(calls) or end.text.strip() == text)


@cache
def _story_words() -> frozenset[str]:
    texts = (story(Random(seed), "", "", thing) for seed, thing in enumerate(THINGS * 10))
    return frozenset(word for text in texts for word in _words(text) if word.islower())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def is_story(chat: Chat, end: End) -> bool:
    """Whether a story is about what was asked, in the words of the world's stories, and ends."""
    asked = {*_words(chat.turns[0].text)} & {*_words(chat.turns[1].text)}
    asked = {w for w in asked if w in ANIMALS + THINGS or (w.istitle() and len(w) > 2)}
    told = _words(end.text)
    known = {word for word in told if word.islower()} <= _story_words()
    return asked <= {*told} and known and end.finish_reason == "stop" and len(told) > 30


ABLATIONS = ("Engram", "the selection", "compressed rows")


@contextmanager
def without(what: str) -> Generator[None]:
    """Leave one of the ABLATIONS out of the model: for the selection, rows are chosen at random."""
    match what:
        case "Engram":
            patched = patch.object(engine_model, "engram_gate", _unchanged)
        case "the selection":
            patched = patch.object(engine_model, "choose_rows", _choose_at_random)
        case _:
            patched = patch.object(engine_model.Model, "_selected", _nothing)
    with patched:
        yield


def _unchanged(streams: mx.array, *_: Any) -> mx.array:
    return streams


def _nothing(*_: Any) -> None:
    return None


def _choose_at_random(queries: IndexQueries, keys: IndexKeys, **options: Any) -> Any:
    """Choose by the scores of random queries."""
    return choose_rows(replace(queries, q=mx.random.normal(queries.q.shape)), keys, **options)


def main() -> int:
    """Run the evaluation and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo_model.evaluate", add_help=False)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS, STORY], metavar="KIND")
    parser.add_argument("--ablate", nargs="*", default=[], metavar="KIND")
    args, sys.argv[1:] = parser.parse_known_args()
    report = Report("demo_model.evaluate", __doc__)
    report.facts({"checkpoint": args.checkpoint.name, "cases": args.count})
    with mlx_engine.load(args.checkpoint, context_tokens=CONTEXT_TOKENS) as engine:
        judge = Judge(report, engine)
        judge.table(args.kinds, args.count)
        if args.ablate:
            judge.ablations(args.ablate, args.count)
    return report.finish()


@dataclass
class Judge:
    """Puts cases to an engine and keeps what came out in the report."""

    report: Report
    engine: Engine

    def table(self, kinds: list[str], count: int) -> None:
        """Every kind, with few cases for thinking; printed as the README has it."""
        every: list[Score] = []
        self.report.line("\n| Case | right | thinking | goal |\n|---|---:|---:|---:|")
        for kind in kinds:
            scores = [self.score(kind, count, False)]
            if kind not in LONGEST:
                scores.append(self.score(kind, max(1, count // 5), True))
            shares = [f"{score.right / score.cases:.0%}" for score in scores]
            goal = f"{GOALS[kind]:.0%}" if kind in GOALS else ""
            self.report.line(
                "| " + " | ".join([kind, *shares, *[""] * (2 - len(shares)), goal]) + " |"
            )
            every += scores
        cases = sum(score.cases for score in every)
        as_asked = sum(score.as_asked for score in every)
        self.report.line(f"| thinking is there as asked | {as_asked / cases:.0%} | | |\n")
        self.report.facts(
            {
                "prefill tokens/s": _rate(every, "read_tokens", "prefill_s"),
                "decode tokens/s": _rate(every, "answer_tokens", "decode_s"),
            }
        )

    def ablations(self, kinds: list[str], count: int) -> None:
        """How many are right with one mechanism left out."""
        rows: list[list[Any]] = []
        for kind in kinds:
            row = [kind, self.score(kind, count, False, " whole").right]
            for what in ABLATIONS:
                self.engine.reset()  # states of the whole model are no longer its own
                with without(what):
                    row.append(self.score(kind, count, False, f" without {what}").right)
            self.engine.reset()
            rows.append([*row, count])
        header = ("right", "whole", *(f"without {what}" for what in ABLATIONS), "of")
        self.report.table(header, rows)

    def score(self, kind: str, count: int, thinks: bool, note: str = "") -> Score:
        """Judge a kind's cases."""
        score = Score()
        judge = is_story if kind == STORY else is_right
        for number in range(count):
            chat = case(kind, number, thinks=thinks)
            *_, end = self.engine.respond(
                Request(
                    conversation=conversation_of(chat),
                    max_tokens=ANSWER_TOKENS,
                    sampling=Sampling(temperature=0.0),
                )
            )
            assert isinstance(end, End)
            score.add(chat, end, judge(chat, end))
        print(f"{kind}{note}: {score.right} of {count}", file=sys.stderr, flush=True)
        self.report.results[kind + " thinking" * thinks + note] = vars(score)
        return score


def _rate(scores: list[Score], tokens: str, seconds: str) -> float:
    total_s = sum(getattr(score, seconds) for score in scores)
    return sum(getattr(score, tokens) for score in scores) / max(total_s, 1e-9)


if __name__ == "__main__":
    sys.exit(main())
