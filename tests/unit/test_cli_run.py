"""`ds41 run` over an engine that says what it is told: streams, options, JSON, Ctrl-C."""

import errno
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mlx_engine import folders
from mlx_engine.cli.main import app
from mlx_engine.engram_table import EngramStats
from mlx_engine.ops.launch import FastPaths
from mlx_engine.prompt import Message, conversation, encode, encode_raw
from mlx_engine.respond import Request
from mlx_engine.sampling import Sampling
from tests.fake_engine import Call, FakeEngine, FakeModel, tiny_tokenizer

SAID = "why\n</think>\nso\U0001f600"


@pytest.fixture(autouse=True)
def no_checkpoint(model: FakeModel) -> None:
    """No test here opens a checkpoint."""


def ds41(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, args, input=stdin)


def call_of(model: FakeModel) -> Call:
    (call,) = model.engine.calls
    return call


NO_KERNELS = "ds41: no GPU kernels, this machine computes with MLX's own operations"


def prompt_ids(text: str, effort: Any = "high", system: str | None = None) -> tuple[int, ...]:
    messages = [Message("system", system)] if system is not None else []
    conversed = conversation([*messages, Message("user", text)], effort)
    return encode(conversed, tiny_tokenizer()).token_ids


def loaded_with(tmp_path: Path, **options: Any) -> dict[str, Any]:
    defaults = {
        "prefill": "short",
        "disk_cache": None,
        "cache_dir": tmp_path / "cache",
        "lead": None,
    }
    return defaults | options


def test_answer_to_stdout_and_the_rest_to_stderr(model: FakeModel):
    result = ds41("run", "Hi")
    assert result.exit_code == 0
    assert result.stdout == "so\U0001f600\n"
    paths, _, rest = result.stderr.partition("\n")
    assert paths == NO_KERNELS
    reasoning, _, statistics = rest.partition("\n\n")
    assert reasoning == "why"
    assert len(statistics.splitlines()) == 1
    n = len(call_of(model).token_ids)
    rows = "engram 75% of rows in memory"
    for part in (f"prompt {n} tokens", "answer 12 tokens", f"; {rows}; load", "; stop"):
        assert part in statistics
    assert "\x1b" not in result.output
    assert model.engine.is_closed and model.engine.is_left


@pytest.mark.parametrize(
    ("on", "off", "line"),
    [
        (("attention", "mhc"), (), "GPU kernels for attention, mhc"),
        (("mhc",), ("linear",), "GPU kernels for mhc; MLX's own operations for linear"),
    ],
)
def test_which_kernels_compute_is_said(
    model: FakeModel, on: tuple[str, ...], off: tuple[str, ...], line: str
):
    model.engine.fast_paths = FastPaths(on, off)
    assert ds41("run", "Hi").stderr.splitlines()[0] == f"ds41: {line}"


def test_no_rows_are_no_share(model: FakeModel, monkeypatch: pytest.MonkeyPatch):
    def none_counted(_: FakeEngine) -> EngramStats:
        return EngramStats()

    monkeypatch.setattr(FakeEngine, "engram_stats", none_counted)
    result = ds41("run", "Hi")
    assert result.exit_code == 0
    assert "engram" not in result.stderr


def test_defaults_are_the_vendors_and_high_effort(model: FakeModel, tmp_path: Path):
    ds41("run", "Hi")
    assert call_of(model) == Call(prompt_ids("Hi"), 65536, Sampling())
    assert model.opened == [(tmp_path / "model", None)]
    assert model.checked == [Request("Hi")]
    # The fake also tells how far it is, were there a terminal to draw on.
    assert model.loaded == [("bfloat16", loaded_with(tmp_path))]


def test_values_on_the_command_line_win(model: FakeModel, tmp_path: Path):
    result = ds41(
        *("run", "Hi", "--model", str(tmp_path / "other"), "--system", "Be brief."),
        *("--effort", "low", "--max-tokens", "20", "--temperature", "0.5", "--top-p", "0.9"),
        *("--min-p", "0.1", "--seed", "4", "--stop", "\U0001f600", "--stop", "x", "--ctx", "500"),
        *("--dtype", "float32", "--prefill", "full"),
    )
    assert result.stdout == "so\n"
    sampling = Sampling(temperature=0.5, top_p=0.9, min_p=0.1, seed=4)
    assert call_of(model) == Call(prompt_ids("Hi", "low", "Be brief."), 20, sampling)
    assert model.opened == [(tmp_path / "other", 500)]
    assert model.loaded == [("float32", loaded_with(tmp_path, prefill="full"))]


def test_zero_is_a_value(model: FakeModel):
    ds41("run", "Hi", "--temperature", "0", "--seed", "0")
    assert call_of(model).sampling == Sampling(temperature=0.0, seed=0)


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
    model: FakeModel, args: list[str], stdin: str | bytes | None, expected: str
):
    assert ds41("run", *args, stdin=stdin).exit_code == 0
    assert call_of(model).token_ids == prompt_ids(expected)


def test_raw(model: FakeModel):
    assert ds41("run", "--raw", "Once").stdout == "why\n\nso\U0001f600\n"
    assert call_of(model).token_ids == encode_raw("Once", tiny_tokenizer()).token_ids


def test_json_is_one_object(model: FakeModel):
    result = ds41("run", "--json", "Hi")
    (line,) = result.stdout.splitlines()
    fields = json.loads(line)
    timings = fields.pop("timings")
    assert fields == {
        "text": "so\U0001f600",
        "reasoning": "why",
        "prompt_tokens": len(call_of(model).token_ids),
        "cached_tokens": 0,
        "completion_tokens": 12,
        "engram": {
            "rows_requested": 12 * 12,
            "rows_distinct": 4 * 12,
            "cache_hits": 3 * 12,
            "bytes_read": 264 * 12,
        },
        "finish_reason": "stop",
        "tool_calls": [],
        "stop_string": None,
        "reasoning_tokens": 5,
    }
    assert set(timings) == {
        *("load_s", "prefill_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s")
    }
    assert all(value >= 0 for value in timings.values())
    assert "why" not in result.stderr


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_stand_in_where_no_model_is_named(
    is_installed: bool, model: FakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The demo model where it was installed, and a tiny random one otherwise or where asked for."""
    made: list[Path] = []

    def tiny_checkpoint(cache_dir: Path) -> Path:
        made.append(cache_dir)
        return cache_dir / "tiny"

    demo = tmp_path / "demo" if is_installed else None
    monkeypatch.setattr("mlx_engine.cli.folders.demo_directory", lambda: demo)
    monkeypatch.setattr("mlx_engine.tiny.tiny_checkpoint", tiny_checkpoint)
    tiny = tmp_path / "cache" / "tiny"

    def run(*args: str) -> tuple[Path, list[str]]:
        """The folder that was opened, and what was said of a stand-in."""
        model.loaded.clear()
        model.opened.clear()
        result = ds41("run", "Hi", *args)
        assert result.stdout == "so\U0001f600\n"
        ((directory, _),) = model.opened
        said = [line for line in result.stderr.splitlines() if "DS41_MODEL" in line]
        assert all(line.startswith("ds41: ") for line in said)
        return directory, said

    assert run() == (tmp_path / "model", [])
    directory, (said,) = run("--tiny-random")
    assert directory == tiny and "mean nothing" in said
    monkeypatch.delenv("DS41_MODEL")
    made.clear()
    directory, (said,) = run()
    assert directory == (demo or tiny)
    assert ("demo model" if is_installed else "mean nothing") in said
    assert made == ([] if is_installed else [tmp_path / "cache"])
    assert run("--tiny-random")[0] == tiny


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch):
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.setenv("DS41_CACHE_DIR", "")
    assert folders.cache_directory() == platformdirs.user_cache_path("ds41")
    monkeypatch.setenv("DS41_CACHE_DIR", "~/x")
    assert folders.cache_directory() == Path.home() / "x"


def test_a_size_that_is_none_is_one_line(model: FakeModel):
    result = ds41("run", "Hi", "--kv-disk-space", "much")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line == "ds41: the size 'much' cannot be read: write it as in 64GB or 500MB"
    assert model.opened == []


def interrupting(at: int, number: int = signal.SIGINT) -> Callable[[int], None]:
    """Press Ctrl-C before this token is made."""
    return lambda n: signal.raise_signal(number) if n == at else None


def test_a_failure_to_write_stops_the_engine(model: FakeModel, monkeypatch: pytest.MonkeyPatch):
    def closed(*args: Any, **options: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("mlx_engine.cli.terminal.typer.secho", closed)
    result = ds41("run", "Hi")
    assert (result.exit_code, result.output) == (1, f"{NO_KERNELS}\n")
    assert model.engine.is_closed and model.engine.is_left
    assert model.engine.tokens_made == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_with_what_was_said(model: FakeModel, as_json: bool):
    before = signal.getsignal(signal.SIGINT)
    model.engine = FakeEngine(SAID, before_token=interrupting(8))
    result = ds41("run", "Hi", *(["--json"] if as_json else []))
    assert result.exit_code == 130
    assert model.engine.tokens_made == 9
    assert model.engine.is_closed and model.engine.is_left
    if as_json:
        fields = json.loads(result.stdout)
        assert (fields["reasoning"], fields["text"]) == ("why", "so\ufffd")
        assert (fields["finish_reason"], fields["completion_tokens"]) == ("cancelled", 9)
    else:
        assert result.stdout == "so\ufffd\n"
        assert result.stderr.splitlines()[-1].endswith("; cancelled")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_request_to_end_is_obeyed_like_ctrl_c(model: FakeModel):
    before = signal.getsignal(signal.SIGTERM)
    model.engine = FakeEngine(SAID, before_token=interrupting(8, signal.SIGTERM))
    result = ds41("run", "Hi")
    assert (result.exit_code, result.stdout) == (128 + signal.SIGTERM, "so\ufffd\n")
    assert model.engine.is_closed and model.engine.is_left
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_does_not_wait(model: FakeModel):
    def twice(n: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    model.engine = FakeEngine(SAID, before_token=twice)
    result = ds41("run", "Hi")
    assert result.exit_code == 130
    assert (result.output, model.engine.tokens_made) == (f"{NO_KERNELS}\n", 0)
    assert model.engine.is_closed and model.engine.is_left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_end_is_written_ends_nothing(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, number: int
):
    left = FakeEngine.__exit__

    def interrupted(self: FakeEngine, *args: Any) -> None:
        signal.raise_signal(number)
        left(self, *args)

    monkeypatch.setattr(FakeEngine, "__exit__", interrupted)
    result = ds41("run", "Hi")
    assert result.exit_code == 0
    assert model.engine.is_left


def test_a_request_to_end_while_loading(monkeypatch: pytest.MonkeyPatch):
    def load(*args: Any, **options: Any) -> FakeEngine:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("still loading")

    monkeypatch.setattr(FakeModel, "load", load)
    before = signal.getsignal(signal.SIGTERM)
    assert ds41("run", "Hi").exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_while_loading(monkeypatch: pytest.MonkeyPatch):
    def load(*args: Any, **options: Any) -> FakeEngine:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("still loading")

    monkeypatch.setattr(FakeModel, "load", load)
    result = ds41("run", "Hi")
    assert (result.exit_code, result.output) == (130, "")
