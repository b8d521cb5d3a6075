"""Checkpoints that are wrong: refused whole before a byte is read, or as soon as a read fails."""

import dataclasses
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine.checkpoint import open_checkpoint
from mlx_engine.errors import ModelFileError
from tests.checkpoints import write_checkpoint
from tests.reference.random_tensors import TINY_CONFIG, random_tensors

Tensors = dict[str, NDArray[Any]]
CONFIG: dict[str, Any] = TINY_CONFIG


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(CONFIG, seed=11)


def refusal(directory: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(directory)
    return str(caught.value)


def test_all_that_is_wrong_is_reported_at_once(tensors: Tensors, tmp_path: Path) -> None:
    changed = dict(tensors)
    changed["mtp.5.norm.weight"] = np.zeros(4, np.uint16)
    for expert in range(7):
        for part in ("weight", "scale"):
            del changed[f"layers.5.ffn.experts.{expert}.w2.{part}"]
    changed["layers.0.attn.rotary"] = np.zeros(4, np.float32)
    changed["norm.weight"] = np.zeros(64, np.uint16)
    directory = write_checkpoint(
        tmp_path, CONFIG, changed, dtypes={"layers.2.attn.wkv.weight": "F8_E5M2"}
    )
    message = refusal(directory)
    header, *lines = message.splitlines()
    assert str(directory) in header and "fetch" in header
    missing, unexpected, wrong = lines
    assert "14 tensors are missing: layers.5.ffn.experts.0.w2.weight, " in missing
    assert missing.count("layers.5") == 10 and missing.endswith(" and 4 more")
    assert unexpected == "  - 2 tensors are unexpected: layers.0.attn.rotary, mtp.5.norm.weight"
    assert "2 tensors are of another dtype or shape" in wrong
    assert "norm.weight is BF16 [64], not BF16 [128]" in wrong
    assert "layers.2.attn.wkv.weight is F8_E5M2 [64, 128], not F8_E4M3 [64, 128]" in wrong


def test_the_tensors_of_a_missing_shard_are_reported_as_that_shard(
    tensors: Tensors, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path, CONFIG, tensors)
    path = directory / "model-00002-of-00003.safetensors"
    path.unlink()
    _, *lines = refusal(directory).splitlines()
    assert lines == [f"  - {path} is missing; fetch it again"]


def cut_a_shard(directory: Path) -> None:
    path = directory / "model-00002-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 1000)


def drop_the_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def take_another_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "qwen3"}')


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (cut_a_shard, "is truncated"),
        (drop_the_config, "has no config.json"),
        (take_another_config, "model_type is 'qwen3'"),
    ],
)
def test_a_spoilt_directory_is_refused_unread(
    tensors: Tensors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], object],
    part: str,
) -> None:
    directory = write_checkpoint(tmp_path, CONFIG, tensors)
    spoil(directory)
    monkeypatch.setattr(os, "preadv", None)
    assert part in refusal(directory)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("layers.2.attn.wo_b.scale", 0xFF),
        ("layers.2.ffn.experts.5.w1.scale", 0xFF),
        ("layers.2.attn.wo_b.weight", 0x7F),
        ("layers.4.engram.wkv.weight", 0xFF),
    ],
)
@pytest.mark.parametrize("place", [0, -1])
def test_a_code_that_is_no_number_is_refused(
    tensors: Tensors, tmp_path: Path, name: str, code: int, place: int
) -> None:
    codes = tensors[name].copy()
    codes.reshape(-1)[place] = code
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, CONFIG, {**tensors, name: codes}))
    with pytest.raises(ModelFileError, match=f"^{re.escape(name)} in .* no number"):
        checkpoint.read_weights()


def test_an_engram_table_in_two_files_is_refused(tensors: Tensors, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, CONFIG, tensors))
    name = "layers.4.engram.embed.scale"
    moved = dataclasses.replace(checkpoint.locations[name], path=tmp_path / "elsewhere")
    split = dataclasses.replace(checkpoint, locations={**checkpoint.locations, name: moved})
    with pytest.raises(ModelFileError, match=r"layers\.4\.engram\.embed.*in one file"):
        split.engram_tables()


def test_a_file_that_shrank_since_it_was_opened(tensors: Tensors, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, CONFIG, tensors))
    path = checkpoint.locations["embed.weight"].path
    os.truncate(path, checkpoint.locations["embed.weight"].offset + 100)
    with pytest.raises(ModelFileError, match=f"{path} ends at byte .*, within embed.weight"):
        checkpoint.read_weights()


def test_a_file_that_vanished_since_it_was_opened(tensors: Tensors, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, CONFIG, tensors))
    path = checkpoint.locations["embed.weight"].path
    path.unlink()
    with pytest.raises(ModelFileError, match=f"{path} cannot be opened: No such file"):
        checkpoint.read_weights()


def test_a_failing_disk(tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, CONFIG, tensors))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelFileError, match=r"cannot be read at byte .*: Input/output error"):
        checkpoint.read_weights()
