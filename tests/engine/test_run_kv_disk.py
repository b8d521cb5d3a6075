"""`ds41 run --kv-disk-dir` over the tiny model: a second run starts where the first one was."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mlx_engine.cli.main import app

LONG = "word " * 50
COMMAND = ("run", "--json", "--effort", "off", "--max-tokens", "8", "--seed", "3")
PROGRAM = (sys.executable, "-W", "error", "-c", "from mlx_engine.cli.start import main; main()")

pytestmark = pytest.mark.usefixtures("no_model_is_named")


def run(prompt: str, folder: Path | str, *args: str) -> Result:
    result = CliRunner().invoke(app, [*COMMAND, prompt, "--kv-disk-dir", str(folder), *args])
    assert result.exit_code == 0, result.output
    return result


def fields(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout)


def test_a_second_run_reads_only_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    first = fields(run(LONG, folder))
    again = fields(run(LONG, folder))
    n_tokens = first["prompt_tokens"]
    assert first["cached_tokens"] == 0
    assert n_tokens - 2 <= again["cached_tokens"] < n_tokens
    assert again["text"] == first["text"]
    longer = fields(run(LONG + "and more", folder))
    assert 0 < longer["cached_tokens"] < n_tokens
    for options in (("--dtype", "float32"), ("--system", "Be brief.")):
        assert fields(run(LONG, folder, *options))["cached_tokens"] == 0
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_was_computed_before_a_request_to_end_is_kept(tmp_path: Path) -> None:
    command = [*PROGRAM, "run", LONG, "--tiny-random", "--effort", "off"]
    command += ["--temperature", "0", "--max-tokens", "3000"]
    command += ["--kv-disk-dir", str(tmp_path / "kv")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.read(1)
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=60)
    assert program.returncode == 128 + signal.SIGTERM
    end = fields(run(LONG, tmp_path / "kv"))
    assert end["cached_tokens"] >= end["prompt_tokens"] - 2


def test_without_a_folder_nothing_is_kept(cache: Path) -> None:
    before = {path for path in cache.rglob("*") if path.is_file()}
    for _ in range(2):
        assert fields(run(LONG, "none"))["cached_tokens"] == 0
    new = {path.name for path in cache.rglob("*") if path.is_file()} - {p.name for p in before}
    assert all(name.startswith(("token_map-", "shard_digests-")) for name in new)


def test_the_own_folder_that_cannot_be_used_is_said_and_the_answer_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    monkeypatch.setenv("DS41_CACHE_DIR", str(tmp_path))
    (tmp_path / "kv").symlink_to(target)
    result = CliRunner().invoke(app, ["chat", "--no-thinking", "--max-tokens", "8"], input="Hi\n")
    assert result.exit_code == 0 and result.stdout, result.output
    said = [line for line in result.stderr.splitlines() if "the disk cache is off" in line]
    assert len(said) == 1 and str(tmp_path / "kv") in said[0]
    assert os.listdir(target) == []


@pytest.mark.parametrize("command", [["run", "Hi"], ["chat"], ["serve", "--port", "0"]])
@pytest.mark.parametrize("kind", ["file", "beneath a file", "link"])
def test_a_named_folder_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], kind: str
) -> None:
    monkeypatch.delattr("mlx_engine.loading.OpenModel.load")
    at = tmp_path / "kv"
    if kind == "link":
        at.symlink_to(tmp_path)
    else:
        at.write_text("mine")
    folder = at / "kv" if kind == "beneath a file" else at
    result = CliRunner().invoke(app, [*command, "--kv-disk-dir", str(folder)], input="Hi\n")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    said = result.stderr.splitlines()[-1]
    assert said.startswith("ds41: ") and str(folder) in said and "--kv-disk-dir" in said
    assert os.listdir(tmp_path) == ["kv"]
    assert kind == "link" or at.read_text() == "mine"


def test_a_folder_full_of_other_files_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    run("Hi", folder)
    before = {path.name for path in folder.rglob("*")}
    (folder / "film.mov").write_bytes(bytes(2_000_000))
    result = run("Hi", folder, "--kv-disk-space", "1MB")
    (said,) = [line for line in result.stderr.splitlines() if "nothing is written" in line]
    assert said.startswith("ds41: ") and str(folder) in said
    assert {path.name for path in folder.rglob("*")} <= {*before, "film.mov"}
    assert (folder / "film.mov").stat().st_size == 2_000_000


def test_a_prompt_that_does_not_fit_is_said_with_a_limit_that_has_room_for_it(
    tmp_path: Path,
) -> None:
    """In a process of its own, whose log is the terminal's as the commands set it up."""

    def said(space: str) -> list[str]:
        command = (*PROGRAM, *COMMAND, LONG * 6, "--tiny-random", "--kv-disk-space", space)
        command += ("--kv-disk-dir", str(tmp_path / space))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [line for line in done.stderr.splitlines() if "--kv-disk-space" in line]

    (too_small,) = said("200kB")
    assert too_small.startswith("ds41: ") and "limit of 200000 bytes" in too_small
    assert said(too_small.split(" allow ")[1].split()[0]) == []


def test_a_folder_of_somebodys_files_is_refused_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "Documents"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "thesis.txt").write_text("mine")
    result = CliRunner().invoke(app, ["run", "Hi", "--kv-disk-dir", str(folder)])
    said = result.stderr.splitlines()[-1]
    assert (result.exit_code, result.stdout) == (2, "")
    assert "thesis.txt" in said
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in folder.rglob("*")] == ["thesis.txt"]
