"""The fingerprint: what changes it, what cannot, and a memo that must not lie."""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from mlx_engine import fingerprint as module
from mlx_engine.checkpoint import Checkpoint
from mlx_engine.config import ModelConfig
from mlx_engine.errors import ModelFileError
from mlx_engine.fingerprint import N_PIECES, PIECE_BYTES, SMALL_BYTES, fingerprint
from mlx_engine.shards import TensorLocation
from tests.checkpoints import header_bytes

N_SHARDS = 3
HEADER = header_bytes({"a": {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}})
# Of the data of a shard: far more than the samples, and not a multiple of their length.
DATA_BYTES = 40 * N_PIECES * PIECE_BYTES + 12_345


@pytest.fixture(autouse=True)
def settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SETTLED_NS", -(10**9))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return sparse_checkpoint(tmp_path / "model", N_SHARDS)


def sparse_checkpoint(directory: Path, n_shards: int, data_bytes: int = DATA_BYTES) -> Checkpoint:
    """Shards that take no room on the disk, beside a configuration and a tokenizer."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("[]")
    locations: dict[str, TensorLocation] = {}
    for i in range(n_shards):
        path = directory / f"model-{i}.safetensors"
        path.write_bytes(HEADER)
        os.truncate(path, len(HEADER) + data_bytes)
        locations[f"tensor{i}"] = TensorLocation(path, len(HEADER), data_bytes, "I8", (data_bytes,))
    return Checkpoint(directory, cast(ModelConfig, None), locations)


def shard(checkpoint: Checkpoint, i: int = 1) -> Path:
    return checkpoint.locations[f"tensor{i}"].path


def flip(path: Path, offset: int) -> None:
    """Change one byte in place; size and inode stay."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def piece_starts(data_bytes: int = DATA_BYTES) -> list[int]:
    """Where the samples lie, worked out apart from the code: evenly, the ends included."""
    step = (data_bytes - PIECE_BYTES) / 65
    return [len(HEADER) + int(i * step) for i in range(66)]


def test_the_samples_are_the_ends_and_64_pieces_between(checkpoint: Checkpoint):
    assert (N_PIECES, PIECE_BYTES) == (66, 65_536)
    starts = piece_starts()
    assert starts[-1] + PIECE_BYTES == shard(checkpoint).stat().st_size
    assert all(b - a > PIECE_BYTES for a, b in pairwise(starts))


def with_small_tensors(checkpoint: Checkpoint, n_bytes: int, offsets: list[int]) -> Checkpoint:
    """The same shards with tensors of a size beside the large one in the second."""
    path = shard(checkpoint)
    small = {
        f"small{i}": TensorLocation(path, offset, n_bytes, "I8", (n_bytes,))
        for i, offset in enumerate(offsets)
    }
    return replace(checkpoint, locations={**checkpoint.locations, **small})


@pytest.mark.parametrize("at", [0, 1, SMALL_BYTES - 2])
def test_every_byte_of_a_small_tensor_counts(checkpoint: Checkpoint, at: int):
    starts = piece_starts()
    between = [start + 2 * PIECE_BYTES for start in starts[:-1]]
    whole = with_small_tensors(checkpoint, SMALL_BYTES - 1, between[:40:13])
    before = fingerprint(whole, "bfloat16", None)
    for offset in between[:40:13]:
        flip(shard(checkpoint), offset + at)
        after = fingerprint(whole, "bfloat16", None)
        assert after != before
        before = after
    large = with_small_tensors(checkpoint, SMALL_BYTES, between[:1])
    before = fingerprint(large, "bfloat16", None)
    flip(shard(checkpoint), between[0] + at)
    assert fingerprint(large, "bfloat16", None) == before


def test_small_tensors_that_lie_together_are_read_at_once(
    checkpoint: Checkpoint, bytes_read: list[int]
):
    fingerprint(checkpoint, "bfloat16", None)
    plain = len(bytes_read)
    bytes_read.clear()
    start = piece_starts()[3] + 2 * PIECE_BYTES
    many = [start + i * 512 for i in range(200)]
    fingerprint(with_small_tensors(checkpoint, 100, many), "bfloat16", None)
    assert len(bytes_read) == plain + 1
    assert 199 * 512 + 100 in bytes_read


@pytest.mark.parametrize("piece", [0, 1, 31, 64, 65])
@pytest.mark.parametrize("at", [0, 777, PIECE_BYTES - 1])
@pytest.mark.parametrize("restores_times", [False, True])
def test_one_byte_of_a_sample_counts(
    checkpoint: Checkpoint, tmp_path: Path, piece: int, at: int, restores_times: bool
):
    before = fingerprint(checkpoint, "bfloat16", tmp_path)
    path = shard(checkpoint)
    times = path.stat()
    flip(path, piece_starts()[piece] + at)
    if restores_times:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        now = path.stat()
        assert (now.st_ino, now.st_size, now.st_mtime_ns) == (
            *(times.st_ino, times.st_size, times.st_mtime_ns),
        )
    assert fingerprint(checkpoint, "bfloat16", tmp_path) != before


def test_what_lies_between_samples_is_not_noticed(checkpoint: Checkpoint):
    """The limit that the module states: 510 GB are not read at every start."""
    before = fingerprint(checkpoint, "bfloat16", None)
    flip(shard(checkpoint), piece_starts()[1] + PIECE_BYTES)
    assert fingerprint(checkpoint, "bfloat16", None) == before


@pytest.mark.parametrize("data_bytes", [1, 8, PIECE_BYTES, N_PIECES * PIECE_BYTES])
def test_a_small_shard_is_read_whole(tmp_path: Path, data_bytes: int):
    checkpoint = sparse_checkpoint(tmp_path / "model", 1, data_bytes)
    seen = {fingerprint(checkpoint, "bfloat16", None)}
    for offset in {0, 9, len(HEADER) - 1, len(HEADER), len(HEADER) + data_bytes - 1}:
        flip(shard(checkpoint, 0), offset)
        seen.add(fingerprint(checkpoint, "bfloat16", None))
        flip(shard(checkpoint, 0), offset)
    assert len(seen) == 5 - (data_bytes == 1) + 1


Change = Callable[[Checkpoint], Checkpoint]


def appended(name: str) -> Change:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        with (checkpoint.directory / name).open("ab") as file:
            file.write(b" ")
        return checkpoint

    return change


def grown(checkpoint: Checkpoint) -> Checkpoint:
    """Longer, and yet all samples are zeros as before."""
    os.truncate(shard(checkpoint), shard(checkpoint).stat().st_size + 1)
    return checkpoint


def renamed(checkpoint: Checkpoint) -> Checkpoint:
    path = shard(checkpoint).rename(checkpoint.directory / "other.safetensors")
    moved = replace(checkpoint.locations["tensor1"], path=path)
    return replace(checkpoint, locations={**checkpoint.locations, "tensor1": moved})


def exchanged(checkpoint: Checkpoint) -> Checkpoint:
    """Two shards of different content under each other's names."""
    one, other = shard(checkpoint, 0), shard(checkpoint, 1)
    kept = one.rename(checkpoint.directory / "kept")
    other.rename(one)
    kept.rename(other)
    return checkpoint


def with_one_shard(checkpoint: Checkpoint) -> Checkpoint:
    return replace(checkpoint, locations={"tensor0": checkpoint.locations["tensor0"]})


@pytest.mark.parametrize(
    "change",
    [
        appended("config.json"),
        appended("tokenizer.json"),
        appended("model-2.safetensors"),
        grown,
        renamed,
        exchanged,
        with_one_shard,
    ],
)
def test_other_files_are_another_checkpoint(checkpoint: Checkpoint, tmp_path: Path, change: Change):
    flip(shard(checkpoint, 0), len(HEADER))
    before = fingerprint(checkpoint, "bfloat16", tmp_path)
    assert len(before) == 32
    assert fingerprint(change(checkpoint), "bfloat16", tmp_path) != before


def test_other_numbers_are_another_computation(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    seen = {fingerprint(checkpoint, dtype, None) for dtype in ("bfloat16", "float32")}
    for version in ("NUMERICS_VERSION", "STATE_FORMATS_VERSION"):
        with monkeypatch.context() as patch:
            patch.setattr(module, version, 2)
            seen.add(fingerprint(checkpoint, "bfloat16", None))
    assert len(seen) == 4


def test_neither_place_nor_order_counts(checkpoint: Checkpoint, tmp_path: Path):
    before = fingerprint(checkpoint, "bfloat16", tmp_path)
    backwards = dict(reversed(list(checkpoint.locations.items())))
    assert fingerprint(replace(checkpoint, locations=backwards), "bfloat16", None) == before
    elsewhere = sparse_checkpoint(tmp_path / "elsewhere", N_SHARDS)
    assert fingerprint(elsewhere, "bfloat16", tmp_path) == before


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    pread = os.pread

    def counting(file: int, n_bytes: int, offset: int) -> bytes:
        data = pread(file, n_bytes, offset)
        counted.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counting)
    return counted


def test_a_checkpoint_of_the_released_size_is_read_in_part_and_once(
    tmp_path: Path, bytes_read: list[int]
):
    checkpoint = sparse_checkpoint(tmp_path / "model", 48, 10 * 2**30)
    before = fingerprint(checkpoint, "bfloat16", tmp_path)
    assert sum(bytes_read) == 48 * (8 + len(HEADER) + N_PIECES * PIECE_BYTES)
    bytes_read.clear()
    assert fingerprint(checkpoint, "bfloat16", tmp_path) == before
    assert bytes_read == []
    shard(checkpoint).touch()
    assert fingerprint(checkpoint, "bfloat16", tmp_path) == before
    assert sum(bytes_read) == 8 + len(HEADER) + N_PIECES * PIECE_BYTES


def memo_of(folder: Path) -> Path:
    (path,) = folder.glob("shard_digests-*")
    return path


def test_a_damaged_memo_is_read_over(checkpoint: Checkpoint, tmp_path: Path, bytes_read: list[int]):
    before = fingerprint(checkpoint, "bfloat16", tmp_path)
    memo = memo_of(tmp_path)
    whole = memo.read_bytes()
    for damaged in (b"", whole[:-1], whole[:40], whole[:100] + b"x" + whole[101:], b"{}" * 50):
        memo.write_bytes(damaged)
        bytes_read.clear()
        assert fingerprint(checkpoint, "bfloat16", tmp_path) == before
        assert bytes_read
        assert memo.read_bytes() == whole


def test_a_memo_of_another_version_is_read_over(
    checkpoint: Checkpoint,
    tmp_path: Path,
    bytes_read: list[int],
    monkeypatch: pytest.MonkeyPatch,
):
    with monkeypatch.context() as patch:
        patch.setattr(module, "_MEMO_VERSION", b"another")
        fingerprint(checkpoint, "bfloat16", tmp_path)
    bytes_read.clear()
    fingerprint(checkpoint, "bfloat16", tmp_path)
    assert bytes_read


def test_a_file_that_has_just_changed_is_not_remembered(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A second change within the same clock tick would leave its times as they are."""
    monkeypatch.undo()
    before = fingerprint(checkpoint, "bfloat16", tmp_path)
    assert not list(tmp_path.glob("shard_digests-*"))
    assert fingerprint(checkpoint, "bfloat16", tmp_path) == before


def test_a_folder_that_cannot_be_written_costs_only_time(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    blocked = tmp_path / "file"
    blocked.write_text("")
    expected = fingerprint(checkpoint, "bfloat16", None)
    assert fingerprint(checkpoint, "bfloat16", blocked / "cache") == expected
    assert [record.message for record in caplog.records if "are not kept" in record.message]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-1.safetensors"])
def test_a_missing_file_is_named(checkpoint: Checkpoint, name: str):
    (checkpoint.directory / name).unlink()
    with pytest.raises(ModelFileError, match=f"{name} cannot be read: No such file"):
        fingerprint(checkpoint, "bfloat16", None)


def test_a_shard_cut_short_meanwhile_is_an_error(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    pread = os.pread

    def cut(file: int, n_bytes: int, offset: int) -> bytes:
        return pread(file, n_bytes, offset)[: n_bytes - 1]

    monkeypatch.setattr(os, "pread", cut)
    with pytest.raises(ModelFileError, match="became shorter while it was read"):
        fingerprint(checkpoint, "bfloat16", None)
