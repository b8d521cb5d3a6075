"""Claude Code itself against the server, over a model that follows a script.

DS41_CLAUDE_CODE names the program, as in DS41_CLAUDE_CODE="node .../cli.js"; without it nothing
runs. It gets a home of its own, and reaches no other address.
"""

import base64
import json
import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlx_engine.server.body import IMAGE_NOTE
from mlx_engine.server.claude_code import environment
from tests.fake_engine import released_tokenizer
from tests.scripted_engine import ScriptedEngine
from tests.server.support import Server, on_port, serving
from tests.server.test_messages import calls

CLAUDE_CODE = shlex.split(os.environ.get("DS41_CLAUDE_CODE", ""))
PATIENT_S = 180
DOT_PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAA"
    "AABJRU5ErkJggg=="
)

pytestmark = pytest.mark.skipif(not CLAUDE_CODE, reason="DS41_CLAUDE_CODE names no Claude Code")


def reads(path: Path, *others: Path) -> str:
    """An answer that reads files, all at once."""
    invokes = [("Read", {"file_path": json.dumps(str(each))}) for each in (path, *others)]
    return "I look.</think>Reading.\n\n" + calls(*invokes)


def ask(server: Server, folder: Path, question: str) -> dict[str, Any]:
    """What Claude Code prints at the end of a conversation."""
    home = folder / "home"
    home.mkdir()
    with on_port(server.app) as address:
        variables = environment(address, server.service.model_id, server.service.context_tokens)
        dead_proxy = "http://127.0.0.1:9"
        run = subprocess.run(
            [
                *CLAUDE_CODE,
                *("-p", question, "--output-format", "json"),
                *("--allowedTools", "Read", "--add-dir", str(folder)),
            ],
            env={
                **variables,
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "HTTPS_PROXY": dead_proxy,
                "NO_PROXY": "127.0.0.1",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_TELEMETRY": "1",
                "DISABLE_AUTOUPDATER": "1",
            },
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENT_S,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


def prompt(server: Server, i: int) -> str:
    """The text of a prompt, without its special tokens."""
    tokenizer = server.engine.tokenizer
    ids = server.engine.courses[i].call.token_ids
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def computed_again(server: Server) -> list[int]:
    """For each prompt after the first, its tokens that were not the prompt and answer before it."""
    courses = server.engine.courses
    return [
        len(before.call.token_ids) + len(before.said) - after.cached_tokens
        for before, after in pairwise(courses)
    ]


def serve(*answers: str) -> Any:
    return serving(ScriptedEngine(*answers, tokenizer=released_tokenizer(), context_tokens=200_000))


def test_a_file_is_read_and_nothing_is_computed_twice(tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("the word is FORTYTWO\n")
    with serve(reads(note), "Seen.</think>It says FORTYTWO.") as server:
        printed = ask(server, tmp_path, "What does note.txt say?")
        assert printed["result"] == "It says FORTYTWO." and not printed["is_error"]
        assert len(server.engine.courses) == 2
        assert "the word is FORTYTWO" in prompt(server, 1)
        assert computed_again(server) == [0]
        assert "x-anthropic-billing-header" not in prompt(server, 0)


def test_calls_in_one_answer_and_a_picture_among_the_results(tmp_path: Path) -> None:
    note, picture = tmp_path / "note.txt", tmp_path / "dot.png"
    note.write_text("the word is FORTYTWO\n")
    picture.write_bytes(base64.b64decode(DOT_PNG))
    with serve(reads(note, picture), reads(note), "Seen.</think>Done.") as server:
        printed = ask(server, tmp_path, "What do the files show?")
        assert printed["result"] == "Done." and printed["num_turns"] >= 3
        assert len(server.engine.courses) == 3
        assert "the word is FORTYTWO" in prompt(server, 1)
        assert prompt(server, 1).count(IMAGE_NOTE) == 1
        assert computed_again(server) == [0, 0]
