"""The tiny checkpoint: complete, in the released format, the same each time, whole or not there."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mlx_engine import tiny
from mlx_engine.checkpoint import find_problems
from mlx_engine.config_file import load_config, parse_config
from mlx_engine.engram import EngramHash
from mlx_engine.errors import BadRequest, DeviceError, ModelFileError
from mlx_engine.inventory import Owner, tensor_specs
from mlx_engine.layer_plan import LayerKind, layer_plan
from mlx_engine.shards import list_tensors
from mlx_engine.tiny import tiny_checkpoint, tiny_config, write_tiny_checkpoint
from mlx_engine.token_map import build_token_map
from tests.reference.files import read_config, read_tensors
from tests.reference.forward import Reference

Tensors = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def tensors(checkpoint: Path) -> Tensors:
    return read_tensors(checkpoint)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_tensors_are_those_of_the_inventory(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    listing = list_tensors(checkpoint)
    assert find_problems(config, listing) == []
    found = {name: (at.dtype, at.shape) for name, at in listing.locations.items()}
    assert found == {spec.name: (spec.dtype, spec.shape) for spec in tensor_specs(config)}
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(s.n_bytes for s in tensor_specs(config))


def test_values_start_at_multiples_of_their_size(checkpoint: Path) -> None:
    sizes = {"F32": 4, "BF16": 2}
    for at in list_tensors(checkpoint).locations.values():
        assert at.offset % sizes.get(at.dtype, 1) == 0


def test_an_engram_table_shares_a_shard_with_its_layers_engram_alone(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    owners = {spec.name: spec.owner for spec in tensor_specs(config)}
    shards: dict[str, set[str]] = {}
    for name, at in list_tensors(checkpoint).locations.items():
        shards.setdefault(at.path.name, set()).add(name)
    tables = {
        frozenset(names)
        for names in shards.values()
        if Owner.ENGRAM_TABLES in {owners[name] for name in names}
    }
    assert config.engram is not None
    assert tables == {
        frozenset(name for name in owners if name.startswith(f"layers.{layer}.engram."))
        for layer in config.engram.layer_ids
    }
    n = len(shards)
    assert sorted(shards) == [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]


def test_it_has_every_kind_of_layer_and_is_small(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    plan = layer_plan(config)
    assert {(p.kind, p.ratio) for p in plan} >= {
        (LayerKind.SWA, 0),
        (LayerKind.FULL, 2),
        (LayerKind.REUSE, 2),
        (LayerKind.FULL, 1),
        (LayerKind.REINDEX, 1),
        (LayerKind.REUSE, 1),
    }
    assert any(p.is_candidate_source for p in plan) and any(p.uses_candidates for p in plan)
    assert [p.engram_index for p in plan if p.engram_index is not None] == [0, 1]
    assert config.draft is not None and config.vision is None
    yarn = config.yarn
    assert config.max_position_embeddings == 131072
    assert yarn.factor * yarn.original_max_position_embeddings == 131072
    # A pruned selection must be able to fill itself from the candidates (section 3.6).
    capacity = (config.candidate_topk_blocks - 1) * config.candidate_block_size + 1
    assert capacity >= config.index_topk
    assert sum(map(len, contents(checkpoint).values())) < 30e6


def test_the_configuration_follows_from_the_tokenizer(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == config.vocab_size
    assert tokenizer.token_to_id("<｜deepseek_image｜>") == config.image_token_id
    engram = config.engram
    assert engram is not None
    token_map = build_token_map(tokenizer)
    assert int(token_map.max()) + 1 == engram.compressed_vocab_size
    # Refuses row counts that are not the sums of its primes.
    EngramHash(token_map, engram, config.image_token_id)


def test_every_code_but_nan_occurs(checkpoint: Path, tensors: Tensors) -> None:
    codes: dict[str, set[int]] = {}
    for name, at in list_tensors(checkpoint).locations.items():
        if tensors[name].dtype == np.uint8:
            codes.setdefault(at.dtype, set()).update(np.unique(tensors[name]).tolist())
        else:
            assert np.isfinite(tensors[name]).all()
    assert codes["F8_E4M3"] == set(range(256)) - {0x7F, 0xFF}
    assert codes["I8"] == set(range(256))
    assert len(codes["F8_E8M0"]) > 4 and 255 not in codes["F8_E8M0"]


def test_activations_and_logits_have_sensible_sizes(checkpoint: Path, tensors: Tensors) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    reference = Reference(read_config(checkpoint), tensors, build_token_map(tokenizer))
    text = "The quick brown fox jumps over the lazy dog. " * 3
    ids = tokenizer.encode(f"<｜User｜>{text}<｜Assistant｜><think>").ids
    trace = reference.forward([0, *ids])
    for streams in trace.streams.values():
        assert 0.5 < np.sqrt((streams**2).mean()) < 5
    is_text = np.zeros(trace.logits.shape[1], np.bool_)
    is_text[[tokenizer.encode(chr(code)).ids[0] for code in range(0x21, 0x7F)]] = True
    assert 2 < trace.logits[:, is_text].std(axis=1).mean() < 4
    # What is said is mostly text, and varied.
    assert trace.logits[:, ~is_text].mean() < trace.logits[:, is_text].mean() - 2
    assert len(set(trace.logits.argmax(axis=1).tolist())) > 20


def test_a_seed_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "same", seed=0)
    write_tiny_checkpoint(tmp_path / "other", seed=1)
    same, other = contents(tmp_path / "same"), contents(tmp_path / "other")
    assert same == contents(checkpoint)
    assert {name for name in same if same[name] != other[name]} == {
        name for name in same if name.endswith(".safetensors") or name == "checksums.json"
    }


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    config = tiny_config()
    config["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    config["text_config"] |= {"num_nextn_predict_layers": 0, "hidden_size": 64}
    config["text_config"]["compress_ratios"] = config["text_config"]["compress_ratios"][:10]
    write_tiny_checkpoint(tmp_path, config=config)  # an empty folder is filled
    assert read_config(tmp_path) == config
    assert find_problems(load_config(tmp_path), list_tensors(tmp_path)) == []

    config["text_config"]["vocab_size"] = 256
    config["image_token_id"] = 255
    with pytest.raises(BadRequest, match=r"vocab_size is 256, .* needs at least 274"):
        write_tiny_checkpoint(tmp_path / "small", config=config)
    config["text_config"]["hidden_size"] = 65
    with pytest.raises(ModelFileError, match="hidden_size is 65"):
        write_tiny_checkpoint(tmp_path / "odd", config=config)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(contents(tmp_path))


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "notes").write_text("keep")
    with pytest.raises(BadRequest, match="is not empty"):
        write_tiny_checkpoint(directory)
    assert contents(directory) == {"notes": b"keep"}
    assert list(tmp_path.iterdir()) == [directory]


def test_the_cache_keeps_one_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "a" / "cache"
    directory = tiny_checkpoint(cache)
    assert directory.parent == cache and directory.name.startswith("tiny-")
    assert contents(directory) == contents(checkpoint)
    (directory / "mark").touch()
    assert tiny_checkpoint(cache) == directory
    assert (directory / "mark").exists()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def write_a_list(path: Path) -> None:
    path.write_bytes(b"[]")


@pytest.mark.parametrize("damage", [os.unlink, flip_a_bit, write_a_list])
@pytest.mark.parametrize(
    "name", ["model-00002-of-00005.safetensors", "config.json", "checksums.json"]
)
def test_a_damaged_checkpoint_in_the_cache_is_written_anew(
    checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], object],
) -> None:
    directory = tiny_checkpoint(tmp_path)
    damage(directory / name)
    assert caplog.records == []
    assert tiny_checkpoint(tmp_path) == directory
    assert contents(directory) == contents(checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]
    (record,) = caplog.records
    assert f"{directory} is damaged, it is written anew" in record.message


def test_an_update_makes_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tiny_checkpoint(tmp_path)
    monkeypatch.setattr(tiny, "_WRITER_VERSION", 0)
    other_version = tiny_checkpoint(tmp_path)
    config = tiny_config()
    config["text_config"]["index_topk"] = 32
    monkeypatch.setattr(tiny, "tiny_config", lambda: config)
    assert len({before, other_version, tiny_checkpoint(tmp_path)}) == 3


def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def interrupted(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_several_writers_at_once(checkpoint: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(tiny_checkpoint, [tmp_path] * 4))
    assert list(tmp_path.iterdir()) == list(found)
    assert contents(found.pop()) == contents(checkpoint)


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            DeviceError, match=r"cannot write .*: Not a directory; .*DS41_CACHE_DIR"
        ):
            tiny_checkpoint(cache)
    if os.geteuid() != 0:  # to root every folder is open
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        with pytest.raises(DeviceError, match=r"cannot write .*: Permission denied"):
            tiny_checkpoint(closed)


def test_the_default_configuration_is_parsed_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse_config(tiny_config())
    assert caplog.records == []
