"""Claude Code itself against the server, over a model that follows a script.

What it must not cost is asserted by tokens: of each prompt, those that are no part of the prompt
and answer before it are computed, and no others.
"""

import base64
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlx_engine.server import converter
from mlx_engine.server.body import IMAGE_NOTE
from mlx_engine.tokenizer import SPELLINGS
from tests.clients import claude_code
from tests.fake_engine import Call, released_tokenizer
from tests.scripted_engine import Answer, Course, Script, ScriptedEngine
from tests.server.support import Server, on_port, serving
from tests.server.test_messages import calls

# Claude Code 2.1.112 compacts no smaller window by itself.
CONTEXT_TOKENS = 110_000
DOT_PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAA"
    "AABJRU5ErkJggg=="
)

# The role's token and `<think>`, and what the text before them may grow into.
ANSWER_HEADER_TOKENS = 8

Ask = Callable[[Server, str], dict[str, Any]]


@pytest.fixture(params=claude_code.VERSIONS)
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> Ask:
    """Ask one version of Claude Code, which talks to a server."""
    command = claude_code.program(request.param)

    def ask(server: Server, question: str) -> dict[str, Any]:
        with on_port(server.app) as address:
            return claude_code.ask(command, question, tmp_path, address, CONTEXT_TOKENS)

    return ask


@pytest.fixture
def note(tmp_path: Path) -> Path:
    """A file that says a word."""
    path = tmp_path / "note.txt"
    path.write_text("the word is FORTYTWO\n")
    return path


def serve(*answers: Answer | Script, **options: Any) -> AbstractContextManager[Server]:
    tokenizer = released_tokenizer()
    options = {"context_tokens": CONTEXT_TOKENS, "chunk_tokens": 1024, **options}
    return serving(ScriptedEngine(*answers, tokenizer=tokenizer, **options))


def reads(*paths: Path) -> str:
    """An answer that reads files, all at once."""
    invokes = [("Read", {"file_path": json.dumps(str(path))}) for path in paths]
    return "I look.</think>Reading.\n\n" + calls(*invokes)


def asks_both_agents() -> str:
    """An answer that sets two subagents to work."""

    def task(word: str) -> tuple[str, dict[str, str]]:
        arguments = {
            "description": f"find {word}",
            "prompt": f"Say the word {word}.",
            "subagent_type": "general-purpose",
            "run_in_background": False,
        }
        return "Agent", {key: json.dumps(value) for key, value in arguments.items()}

    return "Both.</think>I ask.\n\n" + calls(task("ALPHA"), task("BETA"))


def text(call: Call) -> str:
    """A prompt without its special tokens."""
    return plain(call.token_ids)


def plain(token_ids: Sequence[int]) -> str:
    return b"".join(map(released_tokenizer().token_bytes, token_ids)).decode()


def prompt(server: Server, i: int) -> str:
    return text(server.engine.courses[i].call)


def computed_again(courses: list[Course]) -> list[int]:
    """For each prompt after the first, its tokens that were not the prompt and answer before it."""
    return [
        len(before.call.token_ids) + len(before.said) - after.cached_tokens
        for before, after in pairwise(courses)
    ]


def head_tokens(course: Course) -> int:
    """What comes before the first message: the system prompt and the tools."""
    return before_user(course.call.token_ids)


def before_user(token_ids: Sequence[int]) -> int:
    return token_ids.index(released_tokenizer().special_id(SPELLINGS["user"]))


def test_a_file_is_read_and_nothing_is_computed_twice(ask: Ask, note: Path) -> None:
    with serve(reads(note), "Seen.</think>It says FORTYTWO.") as server:
        printed = ask(server, "What does note.txt say?")
        courses = server.engine.courses
    assert printed["result"] == "It says FORTYTWO." and not printed["is_error"]
    assert len(courses) == 2
    assert "the word is FORTYTWO" in prompt(server, 1)
    assert "x-anthropic-billing-header" not in prompt(server, 0)
    assert computed_again(courses) == [0]
    usage = printed["usage"]
    cached_tokens = sum(course.cached_tokens for course in courses)
    assert usage["cache_read_input_tokens"] == cached_tokens
    computed_tokens = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    assert computed_tokens + cached_tokens == sum(len(course.call.token_ids) for course in courses)


def test_calls_in_one_answer_and_a_picture_among_the_results(
    ask: Ask, note: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "dot.png"
    picture.write_bytes(base64.b64decode(DOT_PNG))
    with serve(reads(note, picture), reads(note), "Seen.</think>Done.") as server:
        printed = ask(server, "What do the files show?")
    assert printed["result"] == "Done." and printed["num_turns"] >= 3
    assert len(server.engine.courses) == 3
    assert "the word is FORTYTWO" in prompt(server, 1)
    assert prompt(server, 1).count(IMAGE_NOTE) == 1
    assert computed_again(server.engine.courses) == [0, 0]


def files_and_summary(folder: Path) -> Script:
    """A model that reads file by file until it is asked for a summary, and then is done."""
    files = [folder / f"{i}.txt" for i in range(8)]
    for i, file in enumerate(files):
        file.write_text("".join(f"line {n} of file {i} that goes on and on\n" for n in range(700)))
    unread = iter(files)

    def script(call: Call) -> str:
        so_far = text(call)
        if "create a detailed summary" in so_far:
            return "Hm.</think><analysis>files</analysis>\n<summary>They say FORTYTWO.</summary>"
        if "They say FORTYTWO." in so_far:
            return "Seen.</think>Done."
        return reads(next(unread))

    return script


def is_compacted(printed: dict[str, Any], courses: list[Course]) -> bool:
    """Whether a conversation went on after its summary, which was its last prompt but one."""
    summary, last = courses[-2:]
    assert "create a detailed summary" in text(summary.call)
    assert len(last.call.token_ids) < len(summary.call.token_ids)
    # The system prompt and the tools stay as they were.
    assert last.cached_tokens >= head_tokens(last) > 5000
    return printed["result"] == "Done." and not printed["is_error"]


def test_a_conversation_is_compacted_before_the_window_is_full(ask: Ask, tmp_path: Path) -> None:
    with serve(files_and_summary(tmp_path)) as server:
        printed = ask(server, "What do the files say?")
    courses = server.engine.courses
    assert is_compacted(printed, courses)
    # To summarize means to go on from the conversation, with its last answer or without.
    *earlier, at_summary, _ = computed_again(courses)
    assert earlier == [0] * len(earlier) and len(earlier) > 3
    assert 0 <= at_summary < len(courses[-3].said) + ANSWER_HEADER_TOKENS


@pytest.mark.parametrize("ask", ["2.1.332"], indirect=True)
def test_a_prompt_that_is_refused_as_too_long_is_compacted(
    ask: Ask, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the window was not told; 2.1.112 ends there."""
    caplog.set_level("INFO", "mlx_engine.server")
    with serve(files_and_summary(tmp_path), context_tokens=CONTEXT_TOKENS // 2) as server:
        printed = ask(server, "What do the files say?")
    assert "POST '/v1/messages' 400" in caplog.text
    assert is_compacted(printed, server.engine.courses)


def test_a_small_budget_of_thinking_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 2.1.112 sends it, below Anthropic's own least one, to models that it takes for older."""
    asked: list[Any] = []
    take = converter.thinking

    def thinking(path: str, given: Any) -> str | None:
        asked.append(given)
        return take(path, given)

    command = claude_code.program("2.1.112")
    monkeypatch.setattr(converter, "thinking", thinking)
    monkeypatch.setitem(claude_code.ALONE, "MAX_THINKING_TOKENS", "1000")
    with serve("Hm.</think>Hello.") as server, on_port(server.app) as address:
        options = ("--model", "claude-haiku-4-5")
        printed = claude_code.ask(command, "Hi", tmp_path, address, CONTEXT_TOKENS, *options)
    assert printed["result"] == "Hello." and not printed["is_error"]
    assert any(given is not None and given.get("budget_tokens", 1024) < 1024 for given in asked)


def test_two_subagents_at_once(ask: Ask) -> None:
    overlapped: list[bool] = []

    def script(call: Call) -> str:
        so_far = text(call)
        if "Ask both agents." not in so_far:
            word = "ALPHA" if "Say the word ALPHA" in so_far else "BETA"
            overlapped.extend(not course.is_closed for course in server.engine.courses[1:])
            return f"Hm.</think>It is {word}-FOUND."
        if "ALPHA-FOUND" in so_far and "BETA-FOUND" in so_far:
            return "Seen.</think>Both came."
        return asks_both_agents()

    def wait_for_the_other(course: Course) -> None:
        if len(server.engine.courses) == 2:
            time.sleep(0.05)

    with serve(script, before_step=wait_for_the_other) as server:
        printed = ask(server, "Ask both agents.")
    assert printed["result"] == "Both came."
    first, one, other, last = server.engine.courses
    assert overlapped == [True]
    # The two have a head in common, which is read once.
    pairs = zip(one.call.token_ids, other.call.token_ids, strict=False)
    shared_tokens = next(i for i, (a, b) in enumerate(pairs) if a != b)
    assert shared_tokens > head_tokens(one) == head_tokens(other)
    # And they have pushed nothing out.
    assert computed_again([first, last]) == [0]
