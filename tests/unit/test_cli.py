"""`ds41` from the outside: streams, exit codes, Ctrl-C, and one line for whatever is wrong."""

import errno
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import mlx_engine
from mlx_engine.cli import run
from mlx_engine.cli.main import app
from mlx_engine.errors import (
    BadRequest,
    CacheCorrupt,
    ContextTooLong,
    DeviceError,
    EngineError,
    ModelFileError,
)
from mlx_engine.prompt import Message, conversation, encode, encode_raw
from mlx_engine.sampling import Sampling
from tests.fake_engine import Call, FakeEngine, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SAID = "why\n</think>\nso\U0001f600"


class Loads:
    """Stands in for loading: gives the engine that a test sets, and keeps what was asked."""

    def __init__(self) -> None:
        self.engine = FakeEngine(SAID)
        self.calls: list[tuple[Path, str, dict[str, Any]]] = []

    def __call__(self, directory: Path, dtype: str, **options: Any) -> FakeEngine:
        self.calls.append((directory, dtype, options))
        return self.engine


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loads:
    loads = Loads()
    monkeypatch.setattr("mlx_engine.engine.load", loads)
    monkeypatch.setenv("DS41_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("DS41_CACHE_DIR", str(tmp_path / "cache"))
    return loads


def ds41(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, args, input=stdin)


def call_of(loads: Loads) -> Call:
    (call,) = loads.engine.calls
    return call


def prompt_ids(text: str, effort: Any = "high", system: str | None = None) -> tuple[int, ...]:
    messages = [Message("system", system)] if system is not None else []
    conversed = conversation([*messages, Message("user", text)], effort)
    return encode(conversed, tiny_tokenizer()).token_ids


def test_answer_to_stdout_and_the_rest_to_stderr(loads: Loads):
    result = ds41("run", "Hi")
    assert result.exit_code == 0
    assert result.stdout == "so\U0001f600\n"
    reasoning, _, statistics = result.stderr.partition("\n\n")
    assert reasoning == "why"
    assert len(statistics.splitlines()) == 1
    n = len(call_of(loads).token_ids)
    for part in (f"prompt {n} tokens", "answer 12 tokens", "; stop"):
        assert part in statistics
    assert "\x1b" not in result.output
    assert loads.engine.is_closed and loads.engine.is_left


def test_defaults_are_the_vendors_and_high_effort(loads: Loads, tmp_path: Path):
    ds41("run", "Hi")
    assert call_of(loads) == Call(prompt_ids("Hi"), 65536, Sampling())
    ((directory, dtype, options),) = loads.calls
    assert (directory, dtype) == (tmp_path / "model", "bfloat16")
    assert options == {
        "context_tokens": None,
        "prefill": "short",
        "cache_dir": tmp_path / "cache",
        "on_progress": None,  # there is no terminal to draw on
    }


def test_values_on_the_command_line_win(loads: Loads, tmp_path: Path):
    result = ds41(
        *("run", "Hi", "--model", str(tmp_path / "other"), "--system", "Be brief."),
        *("--effort", "low", "--max-tokens", "20", "--temperature", "0.5", "--top-p", "0.9"),
        *("--min-p", "0.1", "--seed", "4", "--stop", "\U0001f600", "--stop", "x", "--ctx", "500"),
        *("--dtype", "float32", "--prefill", "full"),
    )
    assert result.stdout == "so\n"
    sampling = Sampling(temperature=0.5, top_p=0.9, min_p=0.1, seed=4)
    assert call_of(loads) == Call(prompt_ids("Hi", "low", "Be brief."), 20, sampling)
    ((directory, dtype, options),) = loads.calls
    assert (directory, dtype) == (tmp_path / "other", "float32")
    assert (options["context_tokens"], options["prefill"]) == (500, "full")


def test_zero_is_a_value(loads: Loads):
    ds41("run", "Hi", "--temperature", "0", "--seed", "0")
    assert call_of(loads).sampling == Sampling(temperature=0.0, seed=0)


@pytest.mark.parametrize(
    ("args", "stdin", "expected"),
    [
        ([], "Hi\nyou\n", "Hi\nyou"),
        (["-"], "Hi", "Hi"),
        (["Ho"], "Hi", "Ho"),
        ([], "\u4f60\u597d\n\n".encode(), "\u4f60\u597d\n"),
        (["--", "-x"], None, "-x"),
    ],
)
def test_prompt_from_argument_or_stdin(
    loads: Loads, args: list[str], stdin: str | bytes | None, expected: str
):
    assert ds41("run", *args, stdin=stdin).exit_code == 0
    assert call_of(loads).token_ids == prompt_ids(expected)


def test_raw(loads: Loads):
    assert ds41("run", "--raw", "Once").stdout == "why\n\nso\U0001f600\n"
    assert call_of(loads).token_ids == encode_raw("Once", tiny_tokenizer()).token_ids


def test_json_is_one_object(loads: Loads):
    result = ds41("run", "--json", "Hi")
    (line,) = result.stdout.splitlines()
    fields = json.loads(line)
    timings = fields.pop("timings")
    assert fields == {
        "text": "so\U0001f600",
        "reasoning": "why",
        "prompt_tokens": len(call_of(loads).token_ids),
        "cached_tokens": 0,
        "completion_tokens": 12,
        "finish_reason": "stop",
    }
    assert set(timings) == {
        *("load_s", "prefill_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s")
    }
    assert all(value >= 0 for value in timings.values())
    assert "why" not in result.stderr


def test_a_tiny_model_where_none_is_named(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    made: list[Path] = []

    def tiny_checkpoint(cache_dir: Path) -> Path:
        made.append(cache_dir)
        return cache_dir / "tiny"

    monkeypatch.setattr("mlx_engine.tiny.tiny_checkpoint", tiny_checkpoint)
    assert "mean nothing" not in ds41("run", "Hi").stderr
    monkeypatch.delenv("DS41_MODEL")
    result = ds41("run", "Hi")
    assert result.stdout == "so\U0001f600\n"
    (line,) = [line for line in result.stderr.splitlines() if "mean nothing" in line]
    assert line.startswith("ds41: ")
    assert made == [tmp_path / "cache"]
    assert [directory for directory, _, _ in loads.calls] == [
        tmp_path / "model",
        tmp_path / "cache" / "tiny",
    ]


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch):
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.setenv("DS41_CACHE_DIR", "")
    assert run.cache_directory() == platformdirs.user_cache_path("ds41")
    monkeypatch.setenv("DS41_CACHE_DIR", "~/x")
    assert run.cache_directory() == Path.home() / "x"


def assert_one_line(result: Result, sentence: str) -> None:
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("ds41: ")
    assert sentence in line
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["run", ""], "the prompt is empty"),
        (["run", " \n"], "the prompt is empty"),
        (["run"], "the prompt is empty"),
        (["run", "-"], "the prompt is empty"),
        (["run", "Hi", "--temperature", "-1"], "temperature is -1.0, it must be"),
        (["run", "Hi", "--temperature", "nan"], "temperature is nan, it must be"),
        (["run", "Hi", "--temperature", "warm"], "'--temperature'"),
        (["run", "Hi", "--top-p", "0"], "top_p is 0.0, it must be"),
        (["run", "Hi", "--top-p", "1.1"], "top_p is 1.1, it must be"),
        (["run", "Hi", "--min-p", "2"], "min_p is 2.0, it must be"),
        (["run", "Hi", "--seed", "-1"], "seed is -1, it must be"),
        (["run", "Hi", "--seed", str(2**63)], f"seed is {2**63}, it must be"),
        (["run", "Hi", "--seed", "1.5"], "'--seed'"),
        (["run", "Hi", "--max-tokens", "0"], "max_tokens is 0, it must be"),
        (["run", "Hi", "--stop", ""], "a stop string is empty"),
        (["run", "Hi", "--effort", "ultra"], "'--effort'"),
        (["run", "Hi", "--dtype", "float16"], "'--dtype'"),
        (["run", "Hi", "--prefill", "long"], "'--prefill'"),
        (["run", "Hi", "--raw", "--system", "x"], "leave out system"),
        (["run", "Hi", "there"], "there"),
        (["run", "Hi", "--color"], "No such option: --color"),
        (["run", "\udcff"], "not valid Unicode"),
        (["--nothing"], "No such option: --nothing"),
        (["rum"], "No such command 'rum'. Did you mean 'run'?"),
    ],
)
def test_a_bad_value_is_one_line_before_anything_is_loaded(
    loads: Loads, args: list[str], sentence: str
):
    assert_one_line(ds41(*args), sentence)
    assert loads.calls == []


def test_bytes_that_are_no_text(loads: Loads):
    assert_one_line(ds41("run", stdin=b"ab\xff"), "not UTF-8 text at byte 2")
    assert loads.calls == []


@pytest.mark.parametrize(
    "error", [BadRequest, CacheCorrupt, ContextTooLong, DeviceError, EngineError, ModelFileError]
)
def test_a_failure_of_the_engine_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: type[EngineError]
):
    def fail(*args: Any, **options: Any) -> FakeEngine:
        raise error("it broke here: do that")

    monkeypatch.setattr("mlx_engine.engine.load", fail)
    assert_one_line(ds41("run", "Hi"), "it broke here: do that")


def test_a_prompt_beyond_the_context(loads: Loads):
    loads.engine = FakeEngine(SAID, context_tokens=20)
    assert_one_line(ds41("run", "Hi"), "pass the context of 20")


def test_a_mistake_in_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **options: Any) -> FakeEngine:
        raise ZeroDivisionError

    monkeypatch.setattr("mlx_engine.engine.load", fail)
    assert isinstance(ds41("run", "Hi").exception, ZeroDivisionError)


def interrupting(*at: int) -> Callable[[int], None]:
    """Press Ctrl-C before these tokens are made."""
    return lambda n: signal.raise_signal(signal.SIGINT) if n in at else None


def test_a_failure_to_write_stops_the_engine(loads: Loads, monkeypatch: pytest.MonkeyPatch):
    def closed(*args: Any, **options: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("mlx_engine.cli.terminal.typer.secho", closed)
    result = ds41("run", "Hi")
    assert (result.exit_code, result.output) == (1, "")
    assert loads.engine.is_closed and loads.engine.is_left
    assert loads.engine.tokens_made == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_with_what_was_said(loads: Loads, as_json: bool):
    before = signal.getsignal(signal.SIGINT)
    loads.engine = FakeEngine(SAID, before_token=interrupting(8))
    result = ds41("run", "Hi", *(["--json"] if as_json else []))
    assert result.exit_code == 130
    assert loads.engine.tokens_made == 9
    assert loads.engine.is_closed and loads.engine.is_left
    if as_json:
        fields = json.loads(result.stdout)
        assert (fields["reasoning"], fields["text"]) == ("why", "so\ufffd")
        assert (fields["finish_reason"], fields["completion_tokens"]) == ("cancelled", 9)
    else:
        assert result.stdout == "so\ufffd\n"
        assert result.stderr.splitlines()[-1].endswith("; cancelled")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait(loads: Loads):
    def twice(n: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    loads.engine = FakeEngine(SAID, before_token=twice)
    result = ds41("run", "Hi")
    assert result.exit_code == 130
    assert (result.output, loads.engine.tokens_made) == ("", 0)
    assert loads.engine.is_closed and loads.engine.is_left


def test_ctrl_c_while_loading(monkeypatch: pytest.MonkeyPatch):
    def load(*args: Any, **options: Any) -> FakeEngine:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("still loading")

    monkeypatch.setattr("mlx_engine.engine.load", load)
    result = ds41("run", "Hi")
    assert (result.exit_code, result.output) == (130, "")


def test_version_and_help():
    assert ds41("--version").output == f"ds41 {mlx_engine.__version__}\n"
    for args in ([], ["--help"], ["-h"]):
        result = ds41(*args)
        assert result.exit_code == 0
        assert all(command in result.stdout for command in ("run", "inspect", "download"))
    for option in ("--effort", "--max-tokens", "--stop", "--ctx", "--json", "DS41_MODEL"):
        assert option in ds41("run", "--help").stdout


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["run", "--help"]])
def test_help_does_not_wait_for_mlx(args: list[str]):
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('imported:', 'mlx.core' in sys.modules))\n"
        f"from mlx_engine.cli.main import app; app({args})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0
    assert out.stdout.splitlines()[-1] == "imported: False"


# A program of its own, for what needs real streams: a load that reports, a prompt in two chunks.
PROGRAM = """
import mlx_engine.engine
from mlx_engine.cli.main import app
from tests.fake_engine import FakeEngine

def load(*args, on_progress, **options):
    if on_progress is not None:
        on_progress(1 << 30, 2 << 30)
    return FakeEngine({said!r}, chunk_tokens=50)

mlx_engine.engine.load = load
app()
"""


def start(said: str, *args: str, **streams: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(said=said), *args]
    return subprocess.Popen[bytes](command, cwd=ROOT, **streams)


def test_a_closed_pipe_ends_quietly():
    with start(
        "</think>" + "so " * 20_000, "run", "Hi", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stdout and program.stderr
        assert program.stdout.read(2) == b"so"
        program.stdout.close()
        assert program.stderr.read() == b""
        assert program.wait(60) == 1


def test_a_warning_is_a_line_of_its_own():
    with start(
        "why</think>so<｜User｜>", "run", "Hi", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        answer, rest = program.communicate(timeout=60)
    assert answer == b"so\n"
    (line,) = [line for line in rest.decode().splitlines() if "<｜User｜>" in line]
    assert line.startswith("ds41: the model wrote <｜User｜>")


def test_bars_and_dim_text_on_a_terminal_only():
    leader, follower = pty.openpty()
    with start(SAID, "run", "Hi", stdout=subprocess.PIPE, stderr=follower) as program:
        os.close(follower)
        shown = b""
        while piece := _read_terminal(leader):
            shown += piece
        assert program.stdout
        assert program.stdout.read().decode() == "so\U0001f600\n"
        assert program.wait(60) == 0
    os.close(leader)
    for part in (b"load", b"1.0/2.0 GiB", b"prefill", b"\x1b[2mw", b"prompt 98 tokens"):
        assert part in shown

    with start(SAID, "run", "Hi", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        _, plain = program.communicate(timeout=60)
    assert plain.startswith(b"why\n\nds41: prompt 98 tokens")


def _read_terminal(leader: int) -> bytes:
    try:
        return os.read(leader, 4096)
    except OSError:  # Linux reports the closed other end in this way
        return b""
