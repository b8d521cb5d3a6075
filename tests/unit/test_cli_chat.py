"""`ds41 chat` over an engine that says what it is told: piped, and typed at a terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mlx_engine.cli.main import app
from mlx_engine.prompt import Message, conversation, encode
from mlx_engine.sampling import Sampling
from mlx_engine.tiny import tiny_checkpoint
from tests.fake_engine import FakeEngine, FakeModel, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60
ANSWER = "so\U0001f600"
SAID = f"why\n</think>\n{ANSWER}"


def ds41(*args: str, stdin: str | bytes) -> Result:
    return CliRunner().invoke(app, ["chat", "--kv-disk-dir", "none", *args], input=stdin)


def prompt_ids(engine: FakeEngine, messages: Sequence[Message], effort: Any) -> tuple[int, ...]:
    """The tokens of a conversation; answers of the engine with those that it sampled."""
    return encode(conversation(messages, effort), tiny_tokenizer(), engine.turns).token_ids


def test_each_line_is_answered_with_what_came_before_it(model: FakeModel) -> None:
    result = ds41(stdin="Hi\n\n  Ho \n")
    assert (result.exit_code, result.stdout) == (0, f"{ANSWER}\n{ANSWER}\n")
    first, second = model.engine.calls
    turn = [Message("user", "Hi"), Message("assistant", ANSWER, "why"), Message("user", "Ho")]
    assert first.token_ids == prompt_ids(model.engine, turn[:1], "high")
    assert second.token_ids == prompt_ids(model.engine, turn, "high")
    # The format leaves out earlier reasoning, which the first prompt's last token opens.
    n = len(first.token_ids) - 1
    assert second.token_ids[:n] == first.token_ids[:n]
    assert result.stderr.count("why") == 2 and result.stderr.count(" tokens, ") == 4
    assert "> " not in result.output and "\x1b" not in result.output
    assert model.engine.is_left


def test_a_new_conversation_knows_nothing_of_the_old_one(model: FakeModel) -> None:
    assert ds41(stdin="Hi\n/new\nHi\n").exit_code == 0
    first, second = model.engine.calls
    assert second.token_ids == first.token_ids


def test_commands_are_words_that_stand_alone(model: FakeModel) -> None:
    result = ds41(stdin="/etc/hosts is a file\n/help\n/exit\nnever\n")
    assert (result.exit_code, result.stdout) == (0, f"{ANSWER}\n")
    assert len(model.engine.calls) == 1
    assert all(command in result.stderr for command in ("/new", "/help", "/exit"))


@pytest.mark.parametrize("line", ["/nothing", "/new please"])
def test_an_unknown_command_is_one_sentence(model: FakeModel, line: str) -> None:
    result = ds41(stdin=f"{line}\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{line.split()[0]} is no command" in result.stderr.splitlines()[-1]
    assert model.engine.calls == []


def test_options_are_those_of_every_turn(model: FakeModel, tmp_path: Path) -> None:
    result = ds41(
        *("--model", str(tmp_path / "other"), "--system", "Be brief.", "--no-thinking"),
        *("--max-tokens", "20", "--temperature", "0.5", "--seed", "4", "--ctx", "500"),
        stdin="Hi\nHo\n",
    )
    assert result.exit_code == 0, result.output
    sampling = Sampling(temperature=0.5, seed=4)
    for call in model.engine.calls:
        assert (call.max_tokens, call.sampling) == (20, sampling)
    messages = [Message("system", "Be brief."), Message("user", "Hi")]
    assert model.engine.calls[0].token_ids == prompt_ids(model.engine, messages, "off")
    assert model.opened == [(tmp_path / "other", 500)]


@pytest.mark.parametrize(
    ("args", "stdin", "says"),
    [
        (["--max-tokens", "0"], "Hi\n", "max_tokens is 0"),
        (["--kv-disk-space", "much"], "Hi\n", "the size 'much' cannot be read"),
        ([], b"Hi\xff\n", "not UTF-8 text"),
        (["--url", "http://127.0.0.1:9"], "Hi\n", "does not answer as ds41 serve does"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    model: FakeModel, args: list[str], stdin: str | bytes, says: str
) -> None:
    if "--url" in args:
        result = CliRunner().invoke(app, ["chat", *args], input=stdin, env={"DS41_MODEL": "x"})
    else:
        result = ds41(*args, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr.splitlines()[-1]
    assert model.engine.calls == []


@pytest.mark.parametrize(
    "args",
    [
        ["--ctx", "9"],
        ["--model", "x"],
        ["--tiny-random"],
        ["--dtype", "float32"],
        ["--kv-disk-space", "1GB"],
        ["--devices", "2"],
        ["--stall-timeout", "9"],
    ],
)
def test_what_the_server_decides_is_refused(args: list[str]) -> None:
    result = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:9", *args], input="Hi\n")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"ds41: {args[0]} is not for --url")


def test_a_prompt_that_is_too_long_ends_a_pipe(model: FakeModel) -> None:
    model.engine = FakeEngine(SAID, context_tokens=300)
    result = ds41("--max-tokens", "20", stdin=f"Hi\n{'x' * 300}\nHo\n")
    assert (result.exit_code, result.stdout) == (2, f"{ANSWER}\n")
    assert "shorten" in result.stderr.splitlines()[-1]


def test_ctrl_c_ends_a_pipe_with_what_was_said(model: FakeModel) -> None:
    before = signal.getsignal(signal.SIGINT)
    model.engine = FakeEngine(
        SAID, before_token=lambda n: signal.raise_signal(signal.SIGINT) if n == 8 else None
    )
    result = ds41(stdin="Hi\nHo\n")
    assert (result.exit_code, result.stdout) == (130, "so\ufffd\n")
    assert len(model.engine.calls) == 1 and model.engine.is_left
    assert signal.getsignal(signal.SIGINT) is before


# Says the same after every prompt; Ctrl-C comes in the middle of the first answer.
PROGRAM = """
import signal
import mlx_engine.loading
from mlx_engine.cli.main import app
from tests.fake_engine import FakeEngine, FakeModel

pressed = []

def press(n):
    if n == {at} and not pressed:
        pressed.append(n)
        signal.raise_signal(signal.SIGINT)

engine = FakeEngine({said!r}, before_token=press, context_tokens=400)
mlx_engine.loading.open_model = FakeModel(engine).open
try:
    app(["chat", "--kv-disk-dir", "none", "--max-tokens", "20"])
finally:
    print("prompts:", *(len(call.token_ids) for call in engine.calls))
"""


class Terminal:
    """A program at a terminal: `shown` is what it has written."""

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def read_until(self, text: str, times: int = 1) -> None:
        """Read on until it has been shown so often; fail when the program ends before."""
        while self.shown.count(text) < times:
            assert self._read(), f"no {text!r} in {self.shown}"

    def read_all(self) -> str:
        while self._read():
            pass
        return self.shown

    def _read(self) -> bool:
        ready, _, _ = select.select([self._leader], [], [], PATIENCE_S)
        assert ready, f"nothing more after {self.shown}"
        try:
            piece = os.read(self._leader, 4096)
        except OSError:  # Linux reports the closed other end in this way
            return False
        self.shown += piece.decode(errors="replace").replace("\r\n", "\n")
        return bool(piece)


@contextmanager
def typing(at: int) -> Generator[tuple[Terminal, subprocess.Popen[bytes]]]:
    leader, follower = pty.openpty()
    variables = {**os.environ, "DS41_MODEL": "x", "TERM": "dumb"}
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(said=SAID, at=at)]
    with subprocess.Popen[bytes](
        command, cwd=ROOT, env=variables, stdin=follower, stdout=follower, stderr=follower
    ) as program:
        os.close(follower)
        try:
            yield Terminal(leader), program
        finally:
            program.kill()
            os.close(leader)


@pytest.mark.parametrize(("at", "is_kept"), [(8, True), (2, False)])
def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(at: int, is_kept: bool) -> None:
    with typing(at) as (terminal, program):
        terminal.read_until("> ")
        assert "Ctrl-C stops an answer" in terminal.shown
        terminal.type("Hi\n")
        terminal.read_until("> ", 2)
        assert "ds41: stopped\n" in terminal.shown
        assert ("the message is not kept" in terminal.shown) == (not is_kept)
        terminal.type("Ho\n")
        terminal.read_until("> ", 3)
        assert f"{ANSWER}\n" in terminal.shown and "\x1b[2mw" in terminal.shown
        terminal.type("x" * 390 + "\n")
        terminal.read_until("> ", 4)
        assert "shorten" in terminal.shown
        terminal.type("half a line")
        terminal.read_until("half a line")
        # What Ctrl-C does; readline sees one that comes while it echoes at the line's end only.
        program.send_signal(signal.SIGINT)
        terminal.type("\n")
        terminal.read_until("> ", 5)
        terminal.type("\x04")
        last = terminal.read_all().splitlines()[-1]
        assert program.wait(PATIENCE_S) == 0
    # Both prompts begin alike; the second one is longer where the first is kept.
    first, second, *_ = (int(n) for n in last.removeprefix("prompts:").split())
    assert (second > first) == is_kept


def test_the_disk_cache_is_on_unless_it_is_turned_off(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    tiny_checkpoint(cache)
    variables = {**os.environ, "DS41_CACHE_DIR": str(cache)}
    variables.pop("DS41_MODEL", None)
    command = [sys.executable, "-W", "error", "-c", "from mlx_engine.cli.main import app; app()"]
    command += ["chat", "--tiny-random", "--max-tokens", "4", "--temperature", "0", "--no-thinking"]
    message = "word " * 60
    answers: list[str] = []
    for known in (False, True):
        run = subprocess.run(
            command, input=message, capture_output=True, text=True, timeout=120, env=variables
        )
        assert run.returncode == 0, run.stderr
        assert ("cached" in run.stderr) == known
        answers.append(run.stdout)
    assert answers[0] == answers[1] != ""
