"""What a demo checkpoint can do, on the engine itself: held-out cases, thinking off and on.

    python -m bench.demo_model.evaluate CHECKPOINT [--count N] [--kinds KIND ..] [--ablate KIND ..]

A case is right when the text is the expected one, word for word, or the calls have the expected
names and arguments; it is as asked when there was reasoning where it was asked for and none
elsewhere. The kinds of --ablate are then judged with one mechanism of the model left out.
"""

import argparse
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count as count_from
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepseek_recipe as recipe
import mlx.core as mx

import mlx_engine
from bench.demo_model.cases import KINDS, case
from bench.demo_model.chat import Chat
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
    """Cases judged, and of them right and with reasoning as asked; tokens and seconds."""

    cases: int = 0
    right: int = 0
    as_asked: int = 0
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    answer_tokens: int = 0
    decode_s: float = 0.0
    # The first few wrong answers, each beside what was expected.
    wrong: list[list[str]] = field(default_factory=list[list[str]])

    def add(self, chat: Chat, end: End) -> None:
        """Judge an answer."""
        expected = chat.turns[-1]
        calls = [(call.name, json.loads(call.arguments)) for call in end.tool_calls]
        wanted = [(call.name, call.arguments) for call in expected.calls]
        is_right = calls == wanted and (bool(wanted) or end.text.strip() == expected.text)
        self.cases += 1
        self.right += is_right
        if not is_right and len(self.wrong) < SHOWN:
            self.wrong.append([f"{end.text}{calls or ''}", f"{expected.text}{wanted or ''}"])
        self.as_asked += bool(end.reasoning) == chat.thinks
        self.prompt_tokens += end.prompt_tokens
        self.prefill_s += end.timings.prefill_s
        self.answer_tokens += end.completion_tokens
        self.decode_s += end.timings.decode_s


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
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), metavar="KIND")
    parser.add_argument("--ablate", nargs="*", default=[], metavar="KIND")
    args, sys.argv[1:] = parser.parse_known_args()
    report = Report("demo_model.evaluate", __doc__)
    with mlx_engine.load(args.checkpoint, context_tokens=CONTEXT_TOKENS) as engine:
        rows: list[list[Any]] = []
        for kind in args.kinds:
            off, on = (_score(report, engine, kind, args.count, thinks) for thinks in (False, True))
            rows.append([kind, off.right, off.as_asked, on.right, on.as_asked, args.count])
        report.table(("cases", "right", "as asked", "thinking: right", "as asked", "of"), rows)
        rows = []
        for kind in args.ablate:
            row = [kind, _score(report, engine, kind, args.count, False).right]
            for what in ABLATIONS:
                engine.reset()  # states of the whole model are no longer its own
                with without(what):
                    score = _score(report, engine, kind, args.count, False, f" without {what}")
                row.append(score.right)
            engine.reset()
            rows.append([*row, args.count])
        if rows:
            report.table(("right", "whole", *(f"without {what}" for what in ABLATIONS), "of"), rows)
    return report.finish()


def _score(
    report: Report, engine: Engine, kind: str, count: int, thinks: bool, note: str = ""
) -> Score:
    """Judge a kind's cases, and keep what came out."""
    score = Score()
    for number in range(count):
        chat = case(kind, number, thinks=thinks)
        *_, end = engine.respond(
            Request(
                conversation=conversation_of(chat),
                max_tokens=ANSWER_TOKENS,
                sampling=Sampling(temperature=0.0),
            )
        )
        assert isinstance(end, End)
        score.add(chat, end)
    print(f"{kind}{note}: {score.right} of {count}", file=sys.stderr, flush=True)
    report.results[kind + " thinking" * thinks + note] = vars(score)
    return score


if __name__ == "__main__":
    sys.exit(main())
