"""`ds41 run` over the real engine and the tiny model: text, JSON, Ctrl-C, and every bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlx_engine.cli.main import app
from mlx_engine.cli.terminal import Terminal
from mlx_engine.respond import Progress
from mlx_engine.tokenizer import SPELLINGS

SHORT = ("--effort", "off", "--max-tokens", "4")


pytestmark = pytest.mark.usefixtures("no_model_is_named")


def ds41(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def test_text_and_json_say_the_same() -> None:
    text = ds41("run", "Hi", "--seed", "1", *SHORT)
    assert text.exit_code == 0, text.output
    first, *_, statistics = text.stderr.splitlines()
    assert "its words mean nothing" in first
    assert "answer 4 tokens" in statistics and "of rows in memory" in statistics

    result = ds41("run", "Hi", "--seed", "1", "--json", *SHORT)
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields["text"] and text.stdout == fields["text"].removesuffix("\n") + "\n"
    assert (fields["reasoning"], fields["finish_reason"]) == ("", "length")
    assert (fields["cached_tokens"], fields["completion_tokens"]) == (0, 4)
    assert fields["prompt_tokens"] > 4
    assert 0 < fields["engram"]["rows_distinct"] <= fields["engram"]["rows_requested"]
    assert all(value > 0 for value in fields["timings"].values())


def test_reasoning_goes_to_stderr() -> None:
    result = ds41("run", "Hi", "--max-tokens", "4", "--temperature", "0")
    assert (result.exit_code, result.stdout) == (0, "")
    _, paths, reasoning, statistics = result.stderr.splitlines()
    assert paths.startswith("ds41: ") and "MLX's own operations" in paths
    assert reasoning and statistics.endswith("; length")


def test_ctrl_c_while_answering() -> None:
    command = [sys.executable, "-W", "error", "-c", "from mlx_engine.cli.start import main; main()"]
    command += ["run", "Hi", "--tiny-random", "--effort", "off"]
    command += ["--temperature", "0", "--max-tokens", "3000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        begin = program.stdout.read(1)
        assert begin
        program.send_signal(signal.SIGINT)
        rest, errors = program.communicate(timeout=60)
    assert program.returncode == 130
    assert (begin + rest).endswith(b"\n")
    _, _, statistics = errors.decode().splitlines()
    assert statistics.startswith("ds41: prompt ") and statistics.endswith("; cancelled")


def test_ctrl_c_while_reading_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_terminal: Terminal, progress: Progress) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Terminal, "prefill", interrupted)
    result = ds41("run", "Hi", "--json", *SHORT)
    assert result.exit_code == 130
    fields = json.loads(result.stdout)
    assert (fields["text"], fields["completion_tokens"]) == ("", 0)
    assert fields["finish_reason"] == "cancelled"
    assert result.stderr.splitlines()[-1].endswith("; cancelled")


def assert_refused(result: Result, says: str) -> None:
    """One sentence on stderr, under which a list may follow, and exit code 2."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    lines = [line for line in result.stderr.splitlines() if "mean nothing" not in line]
    assert lines[0].startswith("ds41: ")
    assert all(line.startswith("  - ") for line in lines[1:])
    assert says in "\n".join(lines)
    assert "Traceback" not in result.output


@pytest.fixture
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything that would read a weight fails, and not with exit code 2."""
    monkeypatch.setattr(os, "preadv", None)


def shard(directory: Path) -> Path:
    return directory / "model-00002-of-00005.safetensors"


def cut_a_shard(directory: Path) -> None:
    os.truncate(shard(directory), shard(directory).stat().st_size - 100)


def lose_a_shard(directory: Path) -> None:
    shard(directory).unlink()


def forget_a_shard(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"].items()
    index["weight_map"] = {name: at for name, at in places if at != shard(directory).name}
    path.write_text(json.dumps(index))


def change_a_dtype(directory: Path) -> None:
    data = shard(directory).read_bytes()
    shard(directory).write_bytes(data.replace(b'"F8_E8M0"', b'"F8_E5M2"', 1))


def take_another_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "llama"}')


def change_the_eos(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 5}))


def rename_a_token(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace(SPELLINGS["assistant"], "<assistant>"))


def lose_the_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


@pytest.mark.usefixtures("no_weight_is_read")
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shutil.rmtree, "is no directory"),
        (cut_a_shard, "is truncated"),
        (lose_a_shard, "model-00002-of-00005.safetensors is missing"),
        (forget_a_shard, "tensors are missing"),
        (change_a_dtype, "1 tensor is of another dtype or shape"),
        (take_another_config, "model_type is 'llama'"),
        (change_the_eos, "eos_token_id is 5"),
        (rename_a_token, f"lacks the special tokens {SPELLINGS['assistant']}"),
        (lose_the_tokenizer, "tokenizer.json is missing"),
    ],
)
def test_a_bad_checkpoint(
    cache: Path, tmp_path: Path, spoil: Callable[[Path], object], says: str
) -> None:
    (whole,) = cache.glob("tiny-*")
    directory = tmp_path / "model"
    shutil.copytree(whole, directory)
    spoil(directory)
    result = ds41("run", "Hi", "--model", str(directory))
    assert_refused(result, says)
    assert str(directory) in result.stderr


@pytest.mark.usefixtures("no_weight_is_read")
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["", *SHORT], "the prompt is empty"),
        (["Hi", "--ctx", "8"], "pass the context of 8 tokens"),
        (["Hi", "--max-tokens", "131072"], "pass the context of 131072 tokens"),
        (["Hi", "--ctx", "0"], "the context is 0 tokens, it must be from 1 to 131072"),
        (["Hi", "--ctx", "131073"], "the context is 131073 tokens"),
        (["Hi", "--max-tokens", "0"], "max_tokens is 0"),
        (["Hi", "--temperature", "-1"], "temperature is -1.0"),
        (["Hi", "--temperature", "inf"], "temperature is inf"),
        (["Hi", "--top-p", "0"], "top_p is 0.0"),
        (["Hi", "--min-p", "nan"], "min_p is nan"),
        (["Hi", "--seed", "-1"], "seed is -1"),
        (["Hi", "--model", "absent"], "absent"),
    ],
)
def test_a_bad_request(args: list[str], says: str) -> None:
    assert_refused(ds41("run", *args), says)


@pytest.mark.usefixtures("no_weight_is_read")
def test_a_cache_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DS41_CACHE_DIR", str(tmp_path / "file" / "cache"))
    result = ds41("run", "Hi")
    assert_refused(result, f"cannot write the tiny checkpoint to {tmp_path}")
    assert "DS41_CACHE_DIR" in result.stderr
