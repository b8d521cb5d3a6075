"""`ds41 inspect`: the report, on good checkpoints and on bad ones."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from mlx_engine import memory
from mlx_engine.cli.inspect import inspect
from mlx_engine.cli.main import app
from mlx_engine.config_file import parse_config
from mlx_engine.errors import ModelFileError
from tests.checkpoints import write_checkpoint
from tests.reference.random_tensors import TINY_CONFIG, random_tensors

CONFIG: dict[str, Any] = TINY_CONFIG
ROOMY = memory.MachineMemory("Metal", 64 * 10**9, 48 * 10**9)
NEEDED = memory.needs(parse_config(CONFIG), 512)


@pytest.fixture(scope="module")
def tensors() -> dict[str, NDArray[Any]]:
    return random_tensors(CONFIG, seed=3)


def rows(text: str) -> dict[str, list[str]]:
    """The tables' lines by their first cell; cells are two or more spaces apart."""
    cells = [[c for c in line.split("  ") if c.strip()] for line in text.splitlines()]
    return {line[0].strip(): [c.strip() for c in line[1:]] for line in cells if len(line) > 1}


def test_the_report_counts_what_the_files_hold(
    tensors: dict[str, NDArray[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_checkpoint(tmp_path, CONFIG, tensors)
    inspect(directory, ROOMY)
    text = capsys.readouterr().out
    found = rows(text)
    payload = sum(
        a.nbytes // 2 if a.dtype == np.float32 and not is_f32(n) else a.nbytes
        for n, a in tensors.items()
    )
    assert found["total"] == [f"{len(tensors):,}", f"{payload:,}"]
    tables = [a for n, a in tensors.items() if ".engram.embed." in n]
    table_bytes = sum(a.nbytes for a in tables)
    assert found["engram tables"] == [f"{len(tables)}", f"{table_bytes:,}", "disk, read by row"]
    drafts = sum(name.startswith("mtp.") for name in tensors)
    assert found["draft stages (mtp)"][0] == str(drafts)
    assert found["draft stages (mtp)"][-1] == "disk" and found["embed"][-1] == "memory"
    assert found["weights in memory"] == [f"{NEEDED.weights_bytes:,}"]
    assert found["kept beside them"][0] == f"{NEEDED.kept_bytes:,}"
    assert found["state at full context"] == [
        f"{NEEDED.state_bytes:,}",
        "106 B a token and 4.35 KB of windows",
    ]
    assert found["needed at full context"] == [f"{NEEDED.total_bytes:,}"]
    assert found["this machine"][0] == "48,000,000,000"
    assert text.endswith("This machine can hold the model at its full context.\n")


def is_f32(name: str) -> bool:
    part = name.rpartition(".")[2]
    return part.startswith("hc_") or part in ("attn_sink", "bias", "bias_vl")


def test_a_machine_that_is_too_small_is_told_so(
    tensors: dict[str, NDArray[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_checkpoint(tmp_path, CONFIG, tensors)
    inspect(directory, memory.MachineMemory("Metal", 2 * 10**6, 10**6))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("This machine cannot hold the model")
    assert memory.format_bytes(NEEDED.total_bytes) in last


def test_a_bad_checkpoint_is_reported_whole_before_it_is_refused(
    tensors: dict[str, NDArray[Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Headers alone are read, so the report is there although nothing could be loaded."""
    changed = {**tensors, "layers.0.odd": np.zeros(3, np.float32)}
    del changed["norm.weight"]
    directory = write_checkpoint(tmp_path, CONFIG, changed, dtypes={"embed.weight": "F16"})
    last = directory / "model-00003-of-00003.safetensors"
    os.truncate(last, last.stat().st_size // 2)
    monkeypatch.setattr(os, "preadv", None)
    with pytest.raises(ModelFileError) as caught:
        inspect(directory, ROOMY)
    found = rows(capsys.readouterr().out)
    assert found["head and norm"][0] == "1"
    assert int(found["total"][0]) < len(tensors)
    message = str(caught.value)
    for part in (
        f"{last} is truncated",
        "missing: norm.weight",
        "embed.weight is F16",
        "of another",
    ):
        assert part in message


def test_unexpected_tensors_have_a_line_of_their_own(
    tensors: dict[str, NDArray[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {"layers.0.odd": np.zeros(3, np.uint16), **tensors}
    with pytest.raises(ModelFileError, match=r"unexpected: layers\.0\.odd"):
        inspect(write_checkpoint(tmp_path, CONFIG, changed), ROOMY)
    assert rows(capsys.readouterr().out)["unexpected"] == ["1", "6"]


def test_a_bad_configuration_does_not_hide_bad_files(
    tensors: dict[str, NDArray[Any]], tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path, {"model_type": "llama"}, tensors)
    with pytest.raises(ModelFileError, match=r"config\.json: model_type is 'llama'"):
        inspect(directory)
    (directory / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ModelFileError) as caught:
        inspect(directory)
    assert "'llama'" in str(caught.value) and "00001-of-00003.safetensors is missing" in str(
        caught.value
    )


def test_the_command_takes_the_folder(tensors: dict[str, NDArray[Any]], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, CONFIG, tensors)
    result = CliRunner().invoke(app, ["inspect", str(directory)])
    assert result.exit_code == 0 and str(directory) in result.output
    absent = CliRunner().invoke(app, ["inspect", str(tmp_path / "absent")])
    assert absent.exit_code == 2 and absent.stderr.startswith("ds41: ")
