"""The safetensors files of a directory: locations, and one fault of every kind."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from mlx_engine import shards
from mlx_engine.errors import ModelFileError
from mlx_engine.loading import open_model
from mlx_engine.shards import INDEX_NAME, Listing, TensorLocation, list_tensors, read_header
from mlx_engine.tiny import tiny_checkpoint
from tests.checkpoints import header_bytes, write_checkpoint, write_shard

TENSORS: dict[str, NDArray[Any]] = {
    "a.weight": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "a.scale": np.arange(4, dtype=np.uint8).reshape(2, 2),
    "b.ffn.experts.0.w1.weight": np.arange(8, dtype=np.int8).reshape(4, 2),
    "b.attn.attn_sink": np.arange(3, dtype=np.float32),
    "c.weight": np.arange(10, dtype=np.uint16).reshape(5, 2),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", {}, TENSORS, shards=3)


def shard(directory: Path, number: int) -> Path:
    return directory / f"model-{number:05d}-of-00003.safetensors"


def read(at: TensorLocation) -> bytes:
    return at.path.read_bytes()[at.offset : at.offset + at.n_bytes]


def edit_index(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((directory / INDEX_NAME).read_text())
    edit(index["weight_map"])
    (directory / INDEX_NAME).write_text(json.dumps(index))


def the_problem(listing: Listing) -> str:
    (problem,) = listing.problems
    return problem


def test_every_location_leads_to_its_bytes(directory: Path) -> None:
    listing = list_tensors(directory)
    assert listing.problems == () and listing.unreadable == frozenset()
    assert {at.path for at in listing.locations.values()} == {
        shard(directory, i) for i in (1, 2, 3)
    }
    assert set(listing.locations) == set(TENSORS)
    for name, array in TENSORS.items():
        at = listing.locations[name]
        assert (read(at), at.shape) == (array.tobytes(), array.shape)
    assert [at.dtype for at in listing.locations.values()] == [
        "F8_E4M3",
        "F8_E8M0",
        "I8",
        "F32",
        "BF16",
    ]


def test_headers_read_as_the_safetensors_package_reads_them(directory: Path) -> None:
    for i in (1, 2, 3):
        ours = read_header(shard(directory, i))
        opened: Any = safe_open(shard(directory, i), framework="np")
        with opened as file:
            assert set(file.keys()) == set(ours)
            for name, at in ours.items():
                theirs = file.get_slice(name)
                assert (theirs.get_dtype(), tuple(theirs.get_shape())) == (at.dtype, at.shape)


def test_a_lone_file_needs_no_index(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", TENSORS)
    listing = list_tensors(tmp_path)
    assert set(listing.locations) == set(TENSORS) and listing.problems == ()


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(ModelFileError, match=f"{path} is no directory"):
            list_tensors(path)


def test_no_index(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"neither {INDEX_NAME} nor model.safetensors"):
        list_tensors(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": 3}', b"[" * 100_000],
)
def test_an_unreadable_index(directory: Path, content: bytes) -> None:
    (directory / INDEX_NAME).write_bytes(content)
    with pytest.raises(ModelFileError, match=INDEX_NAME):
        list_tensors(directory)


@pytest.mark.parametrize("place", ["../other.safetensors", "/etc/passwd", "a/b", 3, None, "a\0b"])
def test_an_index_leads_nowhere_else(directory: Path, place: Any) -> None:
    edit_index(directory, lambda weight_map: weight_map.update({"a.weight": place}))
    with pytest.raises(ModelFileError, match=r"places a\.weight in .*, which is no file name"):
        list_tensors(directory)


def test_a_missing_shard(directory: Path) -> None:
    lost = frozenset(read_header(shard(directory, 2)))
    shard(directory, 2).unlink()
    listing = list_tensors(directory)
    assert the_problem(listing) == f"{shard(directory, 2)} is missing; fetch it again"
    assert listing.unreadable == lost
    assert set(listing.locations) == set(TENSORS) - lost


def test_a_shard_that_is_a_folder(directory: Path) -> None:
    shard(directory, 2).unlink()
    shard(directory, 2).mkdir()
    assert f"{shard(directory, 2)} is not a file: fetch it again" in the_problem(
        list_tensors(directory)
    )


def test_every_bad_shard_is_reported(directory: Path) -> None:
    shard(directory, 1).unlink()
    shard(directory, 3).write_bytes(shard(directory, 3).read_bytes()[:-1])
    first, third = list_tensors(directory).problems
    assert "missing" in first and "truncated" in third


def test_a_shard_cut_at_any_byte_is_truncated(directory: Path) -> None:
    path = shard(directory, 1)
    whole = path.read_bytes()
    for n_bytes in range(len(whole)):
        path.write_bytes(whole[:n_bytes])
        with pytest.raises(ModelFileError, match=f"{path} is truncated"):
            read_header(path)


def test_a_huge_header_is_refused_before_it_is_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shard(directory, 1)
    with path.open("r+b") as file:
        file.write((2**63).to_bytes(8, "little"))
    with pytest.raises(ModelFileError, match="no safetensors file"):
        read_header(path)
    monkeypatch.setattr(shards, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ModelFileError, match="the limit is 100"):
        read_header(shard(directory, 2))


def test_a_tensor_that_the_index_places_elsewhere(directory: Path) -> None:
    first, second = shard(directory, 1), shard(directory, 2)
    edit_index(directory, lambda weight_map: weight_map.update({"a.scale": second.name}))
    listing = list_tensors(directory)
    assert listing.problems == (
        f"{first} holds what the index does not place in it: a.scale",
        f"{second} lacks what the index places in it: a.scale",
    )
    assert "a.scale" not in listing.locations and listing.unreadable == {"a.scale"}


def test_a_tensor_that_its_shard_lacks(directory: Path) -> None:
    edit_index(directory, lambda weight_map: weight_map.update({"d": shard(directory, 2).name}))
    listing = list_tensors(directory)
    assert the_problem(listing) == f"{shard(directory, 2)} lacks what the index places in it: d"
    assert set(listing.locations) == set(TENSORS) and listing.unreadable == {"d"}


def test_a_tensor_that_the_index_lacks(directory: Path) -> None:
    edit_index(directory, lambda weight_map: weight_map.pop("a.scale"))
    listing = list_tensors(directory)
    assert "does not place in it: a.scale" in the_problem(listing)
    assert set(listing.locations) == set(TENSORS) - {"a.scale"}


def entry(begin: Any, end: Any, shape: Any, dtype: Any = "I8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "n_bytes", "part"),
    [
        pytest.param([1], 0, "no JSON object", id="a list"),
        pytest.param({"x": 3}, 0, "malformed header entry for x", id="no entry"),
        pytest.param({"x": entry(0, 4, 4)}, 4, "malformed", id="a shape that is no list"),
        pytest.param({"x": entry(0, 4, [4.0])}, 4, "malformed", id="a fraction"),
        pytest.param({"x": entry(0, 4, [-4])}, 4, "malformed", id="a negative size"),
        pytest.param({"x": entry(0, True, [1])}, 1, "malformed", id="a truth value"),
        pytest.param({"x": entry(0, 4, [4], 8)}, 4, "malformed", id="a dtype that is no text"),
        pytest.param({"x": entry(4, 0, [4])}, 4, "data offsets", id="backwards"),
        pytest.param({"x": entry(0, 4, [5])}, 4, "has 4 bytes for x", id="another size"),
        pytest.param({"x": entry(0, 4, [4], "F32")}, 4, "takes 16", id="another type"),
        pytest.param({"x": entry(0, 4, [4])}, 3, "truncated: x ends", id="beyond the end"),
        pytest.param({"x": entry(2**70, 2**70 + 4, [4])}, 4, "truncated", id="far beyond"),
        pytest.param({"x": entry(0, 4, [4])}, 5, "1 bytes after its last", id="a tail"),
        pytest.param({}, 5, "5 bytes after its last", id="data of nothing"),
        pytest.param({"x": entry(2, 4, [2])}, 4, "x leaves a hole after the header", id="a hole"),
        pytest.param(
            {"x": entry(0, 4, [4]), "y": entry(3, 5, [2])}, 5, "y overlaps x", id="an overlap"
        ),
        pytest.param(
            {"x": entry(0, 4, [4]), "y": entry(0, 4, [4])}, 4, "y overlaps x", id="the same twice"
        ),
        pytest.param(
            {"x": entry(0, 9, [9]), "y": entry(2, 3, [1]), "z": entry(9, 10, [1])},
            10,
            "y overlaps x",
            id="one within another",
        ),
    ],
)
def test_a_malformed_header(tmp_path: Path, header: Any, n_bytes: int, part: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_bytes(header) + bytes(n_bytes))
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert part in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("text", [b"{", b"\xff\xff", b"", b"[" * 100_000])
def test_a_header_that_is_no_json(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ModelFileError, match="header that is not JSON"):
        read_header(path)


def test_a_dtype_of_another_release_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_bytes({"x": entry(0, 16, [2], "F64")}) + bytes(16))
    assert read_header(path)["x"].dtype == "F64"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "*.safetensors"]
)
def test_what_is_no_file_keeps_nobody_waiting(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    path = min(tiny_checkpoint(tmp_path).glob(name))
    path.unlink()
    make(path)
    with pytest.raises(ModelFileError, match=f"{path} is not a file"):
        open_model(path.parent)
