"""Loading intact checkpoints: exact values, what is read, memory, progress, and the order."""

import copy
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine import memory, tensor_reader
from mlx_engine.checkpoint import load_weights, open_checkpoint
from mlx_engine.devices import Devices
from mlx_engine.errors import DeviceError, ModelFileError
from mlx_engine.weights import Fp4, Fp8, Weights
from tests.checkpoints import write_checkpoint
from tests.reference.random_tensors import TINY_CONFIG, random_tensors
from tests.unit.arrays import arrays_of

Tensors = dict[str, NDArray[Any]]
CONFIG: dict[str, Any] = TINY_CONFIG
EXPERTS: int = CONFIG["text_config"]["n_routed_experts"]
FULL, REINDEX, ENGRAM_LAYER = 3, 6, 4


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(CONFIG, seed=11)


@pytest.fixture(scope="module")
def directory(tensors: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An intact checkpoint, for tests that only read."""
    return write_checkpoint(tmp_path_factory.mktemp("intact"), CONFIG, tensors)


@pytest.fixture(scope="module")
def weights(directory: Path) -> Weights:
    return open_checkpoint(directory).read_weights()


def as_bytes(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint8)).tobytes()


def bf16_words(values: NDArray[np.float32]) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def test_bf16_and_f32_arrive_as_stored(weights: Weights, tensors: Tensors) -> None:
    layer = weights.layers[FULL]
    assert layer.attn.compressor is not None and layer.attn.indexer is not None
    bf16 = {
        "embed.weight": weights.embed,
        "head.weight": weights.head,
        "norm.weight": weights.norm,
        "layers.3.attn_norm.weight": layer.attn_norm,
        "layers.3.ffn_norm.weight": layer.ffn_norm,
        "layers.3.attn.q_norm.weight": layer.attn.q_norm,
        "layers.3.attn.kv_norm.weight": layer.attn.kv_norm,
        "layers.3.attn.compressor.wkv.weight": layer.attn.compressor.wkv,
        "layers.3.attn.compressor.wgate.weight": layer.attn.compressor.wgate,
        "layers.3.attn.compressor.norm.weight": layer.attn.compressor.norm,
        "layers.3.attn.indexer.wk.weight": layer.attn.indexer.wk,
        "layers.3.attn.indexer.k_norm.weight": layer.attn.indexer.k_norm,
        "layers.3.attn.indexer.weights_proj.weight": layer.attn.indexer.weights_proj,
        "layers.3.ffn.gate.weight": layer.ffn.gate_weight,
    }
    engram = weights.layers[ENGRAM_LAYER].engram
    assert engram is not None
    bf16["layers.4.engram.q_weight"] = engram.q_weight
    bf16["layers.4.engram.k_weight"] = engram.k_weight
    for name, array in bf16.items():
        assert array is not None and array.dtype == mx.bfloat16, name
        assert array.shape == tensors[name].shape, name
        assert as_bytes(array) == bf16_words(tensors[name]), name
    f32 = {
        "layers.3.hc_attn_fn": layer.hc_attn.fn,
        "layers.3.hc_attn_base": layer.hc_attn.base,
        "layers.3.hc_attn_scale": layer.hc_attn.scale,
        "layers.3.hc_ffn_fn": layer.hc_ffn.fn,
        "layers.3.hc_ffn_base": layer.hc_ffn.base,
        "layers.3.hc_ffn_scale": layer.hc_ffn.scale,
        "layers.3.attn.attn_sink": layer.attn.attn_sink,
        "layers.3.ffn.gate.bias": layer.ffn.gate_bias,
    }
    for name, array in f32.items():
        assert array.dtype == mx.float32 and array.shape == tensors[name].shape, name
        assert as_bytes(array) == tensors[name].tobytes(), name


def test_codes_arrive_packed_as_stored(weights: Weights, tensors: Tensors) -> None:
    attn, ffn = weights.layers[FULL].attn, weights.layers[FULL].ffn
    indexer, engram = weights.layers[REINDEX].attn.indexer, weights.layers[ENGRAM_LAYER].engram
    assert indexer is not None and engram is not None
    dense = {
        "layers.3.attn.wq_a": attn.wq_a,
        "layers.3.attn.wq_b": attn.wq_b,
        "layers.3.attn.wkv": attn.wkv,
        "layers.3.attn.wo_a": attn.wo_a,
        "layers.3.attn.wo_b": attn.wo_b,
        "layers.3.ffn.shared_experts.w1": ffn.shared_w1,
        "layers.3.ffn.shared_experts.w2": ffn.shared_w2,
        "layers.3.ffn.shared_experts.w3": ffn.shared_w3,
        "layers.6.attn.indexer.wq_b": indexer.wq_b,
        "layers.4.engram.wkv": engram.wkv,
    }
    for name, fp8 in dense.items():
        check_words(fp8, tensors[f"{name}.weight"], tensors[f"{name}.scale"])
    assert attn.wq_b.weight.shape == (4 * 64, 64 // 4)
    # Two groups of o_lora_rank rows, and so two of its tiles.
    assert attn.wo_a.weight.shape == (2, 32, 128 // 4) and attn.wo_a.scale.shape == (2, 1, 4)
    for matrix, fp4 in (("w1", ffn.w1), ("w2", ffn.w2), ("w3", ffn.w3)):
        stacked = {
            part: np.stack(
                [tensors[f"layers.3.ffn.experts.{e}.{matrix}.{part}"] for e in range(EXPERTS)]
            )
            for part in ("weight", "scale")
        }
        check_words(fp4, stacked["weight"], stacked["scale"])
    assert ffn.w2.weight.shape == (EXPERTS, 128, 64 // 8)
    assert ffn.w2.scale.shape == (EXPERTS, 128, 2)


def check_words(packed: Fp8 | Fp4, weight: NDArray[Any], scale: NDArray[Any]) -> None:
    assert packed.weight.dtype == mx.uint32 and packed.scale.dtype == mx.uint8
    assert as_bytes(packed.weight) == weight.tobytes()
    assert as_bytes(packed.scale) == scale.tobytes()
    # The first code is the lowest byte of its word.
    assert np.array(packed.weight).reshape(-1)[0] & 0xFF == weight.reshape(-1)[0]


def test_a_layer_has_what_its_kind_has(weights: Weights) -> None:
    compressors = {i: x.attn.compressor for i, x in enumerate(weights.layers) if x.attn.compressor}
    indexers = {i: x.attn.indexer for i, x in enumerate(weights.layers) if x.attn.indexer}
    assert [i for i, x in enumerate(weights.layers) if x.engram] == [1, 4]
    assert list(compressors) == [1, 3, 4] and list(indexers) == [1, 3, 4, 6]
    assert [i for i, compressor in compressors.items() if compressor.wgate is not None] == [1, 3]
    assert [i for i, indexer in indexers.items() if indexer.wk is not None] == [1, 3, 4]


def test_engram_tables_are_located_and_not_read(directory: Path, tensors: Tensors) -> None:
    tables = open_checkpoint(directory).engram_tables()
    for layer, table in zip((1, 4), tables, strict=True):
        shard = table.path.read_bytes()
        for part, offset in (("weight", table.weight_offset), ("scale", table.scale_offset)):
            expected = tensors[f"layers.{layer}.engram.embed.{part}"]
            assert shard[offset : offset + expected.nbytes] == expected.tobytes()
        shape = tensors[f"layers.{layer}.engram.embed.weight"].shape
        assert (table.n_rows, table.head_dim) == shape


def test_vision_and_draft_tensors_stay_on_disk(directory: Path, tmp_path: Path) -> None:
    """With or without their keys in the configuration; Engram's may never go unnoticed."""
    raw = copy.deepcopy(CONFIG)
    raw["text_config"]["num_nextn_predict_layers"] = 0
    raw["text_config"]["compress_ratios"] = raw["text_config"]["compress_ratios"][:8]
    tensors = random_tensors(CONFIG, seed=11)
    tensors["image_start"] = np.zeros(128, np.uint16)
    tensors["vision.norm.weight"] = np.zeros(32, np.uint16)
    path = write_checkpoint(tmp_path / "no keys", raw, tensors)
    total = memory.resident_bytes(open_checkpoint(directory).config)
    assert memory.resident_bytes(open_checkpoint(path).config) == total
    raw["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    without_engram = write_checkpoint(tmp_path / "no engram", raw, tensors)
    with pytest.raises(ModelFileError, match=r"12 tensors are unexpected: layers\.1\.engram\."):
        open_checkpoint(without_engram)


def test_the_bytes_read_are_the_resident_ones(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of tables, drafts, vision or the image tokens' bias is touched."""
    checkpoint = open_checkpoint(directory)
    wanted = [checkpoint.locations[s.name] for s in memory.resident_specs(checkpoint.config)]
    paths: dict[int, Path] = {}
    touched: list[tuple[Path, int, int]] = []
    real_open, real_preadv = os.open, os.preadv

    def spy_open(path: Path, flags: int) -> int:
        file = real_open(path, flags)
        paths[file] = path
        return file

    def spy_preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        n_bytes = real_preadv(file, buffers, offset)
        touched.append((paths[file], offset, n_bytes))
        return n_bytes

    monkeypatch.setattr(os, "open", spy_open)
    monkeypatch.setattr(os, "preadv", spy_preadv)
    checkpoint.read_weights()
    assert sorted(touched) == sorted((at.path, at.offset, at.n_bytes) for at in wanted)


def test_memory_stays_under_the_final_size_and_two_shards(tensors: Tensors, tmp_path: Path) -> None:
    """Counts what MLX allocates and what Python and numpy do, each at its own peak."""
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "model", CONFIG, tensors, shards=12))
    expected = memory.resident_bytes(checkpoint.config)
    shard_bytes = max(path.stat().st_size for path in tmp_path.glob("model/*.safetensors"))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tracemalloc.start()
    weights = checkpoint.read_weights()
    _, python_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    mlx_bytes = mx.get_peak_memory() - before
    assert sum(array.nbytes for array in arrays_of(weights)) == expected
    # MLX counts whole allocations, a little more than the arrays have.
    assert expected <= mlx_bytes <= 1.01 * expected
    assert mlx_bytes + python_bytes < expected + 2 * shard_bytes


def test_every_code_that_is_a_number_is_taken(tensors: Tensors, tmp_path: Path) -> None:
    """All of e4m3 but its two NaN, all of e8m0 but its one, and all of FP4."""
    every = {
        "layers.2.attn.wo_b.weight": [c for c in range(256) if c & 0x7F != 0x7F],
        "layers.2.attn.wo_b.scale": [0, 254],
        "layers.2.ffn.experts.5.w1.weight": list(range(256)),
    }
    changed = {
        name: np.resize(np.array(codes, np.uint8), tensors[name].shape)
        for name, codes in every.items()
    }
    weights = open_checkpoint(
        write_checkpoint(tmp_path, CONFIG, {**tensors, **changed})
    ).read_weights()
    layer = weights.layers[2]
    assert as_bytes(layer.attn.wo_b.weight) == changed["layers.2.attn.wo_b.weight"].tobytes()
    assert as_bytes(layer.ffn.w1.weight[5]) == changed["layers.2.ffn.experts.5.w1.weight"].tobytes()


def test_small_chunks_and_short_reads_give_the_same_bytes(
    directory: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_preadv = os.preadv
    monkeypatch.setattr(tensor_reader, "_CHUNK_BYTES", 1000)

    def short_preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        return real_preadv(file, [buffers[0][:999]], offset)

    monkeypatch.setattr(os, "preadv", short_preadv)
    again = open_checkpoint(directory).read_weights()
    for one, other in zip(arrays_of(weights), arrays_of(again), strict=True):
        assert as_bytes(one) == as_bytes(other)


@pytest.mark.parametrize("chunk_bytes", [100, 8 * 2**20])
def test_the_shares_of_two_devices_make_the_whole(
    directory: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(tensor_reader, "_CHUNK_BYTES", chunk_bytes)
    checkpoint = open_checkpoint(directory)
    whole = checkpoint.read_weights()
    calls: list[tuple[int, int]] = []
    shares = [
        checkpoint.read_weights(lambda done, n: calls.append((done, n)), devices=Devices(rank, 2))
        for rank in range(2)
    ]
    assert calls[-1] == (memory.read_bytes(checkpoint.config, 2),) * 2
    axes = {0: 0, 1: 0, 2: 0}
    for all_of_it, *parts in zip(arrays_of(whole), *map(arrays_of, shares), strict=True):
        pairs = zip(all_of_it.shape, parts[0].shape, strict=True)
        split = [axis for axis, (n, part) in enumerate(pairs) if n != part]
        if split:
            axes[split[0]] += 1
            assert as_bytes(mx.concatenate(parts, axis=split[0])) == as_bytes(all_of_it)
        else:
            assert [as_bytes(part) for part in parts] == [as_bytes(all_of_it)] * 2
    # Codes and scales. By rows: wq_b, wo_a, the sinks and two shared matrices of each layer, and
    # the head; by columns: wo_b, w2 of the shared expert, Engram's wkv twice. Of stacked experts
    # the first axis is the expert: w1 and w3 by rows, w2 by columns.
    layers = len(whole.layers)
    assert axes == {0: layers * 9 + 1, 1: layers * (4 + 4) + 5, 2: layers * 2}


def test_progress_rises_from_chunk_to_chunk_up_to_the_total(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    calls: list[tuple[int, int]] = []
    checkpoint.read_weights(lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    total = memory.resident_bytes(checkpoint.config)
    assert {call[1] for call in calls} == {total}
    assert done == sorted(set(done)) and done[0] < total == done[-1]


def test_an_interrupted_load_leaves_no_thread_and_no_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    real_open = os.open

    def spy_open(path: Path, flags: int) -> int:
        opened.append(real_open(path, flags))
        return opened[-1]

    monkeypatch.setattr(os, "open", spy_open)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_checkpoint(directory).read_weights(interrupt)
    assert not [t for t in threading.enumerate() if t.name.startswith("ds41-read")]
    assert opened
    for file in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


METAL = memory.MachineMemory("Metal", total_bytes=512 * 10**9, usable_bytes=400 * 10**9)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the steps of a load happened, in order; reads as one entry."""
    seen: list[str] = []
    real_preadv, real_require = os.preadv, memory.require_memory

    def preadv(*args: Any) -> int:
        if seen[-1:] != ["read"]:
            seen.append("read")
        return real_preadv(*args)

    def require(*args: Any) -> memory.Needs:
        seen.append("memory check")
        return real_require(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(memory, "require_memory", require)
    return seen


def test_the_wired_limit_is_raised_between_the_memory_check_and_the_first_read(
    directory: Path, events: list[str]
) -> None:
    limits: list[int] = []

    def set_limit(n_bytes: int) -> None:
        limits.append(n_bytes)
        events.append("wired limit")

    checkpoint = open_checkpoint(directory)
    weights = load_weights(checkpoint, 512, machine=METAL, set_wired_limit=set_limit)
    assert len(weights.layers) == 8
    assert events == ["memory check", "wired limit", "read"]
    assert limits == [METAL.usable_bytes]


def test_what_cannot_fit_is_refused_before_anything_is_read(
    directory: Path, events: list[str]
) -> None:
    small = memory.MachineMemory("Metal", total_bytes=2_000_000, usable_bytes=1_000_000)
    checkpoint = open_checkpoint(directory)
    needed = memory.format_bytes(memory.needs(checkpoint.config, 512).total_bytes)
    with pytest.raises(DeviceError, match=rf"needs {needed} .* 1\.00 MB of 2\.00 MB"):
        load_weights(
            checkpoint, 512, machine=small, set_wired_limit=lambda n: events.append("limit")
        )
    assert events == ["memory check"]


def test_a_chunk_that_is_too_long_for_the_machine_is_refused(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    needed = memory.needs(checkpoint.config, 512, chunk_tokens=64).total_bytes
    machine = memory.MachineMemory("CPU", total_bytes=2 * needed, usable_bytes=needed)
    assert len(load_weights(checkpoint, 512, chunk_tokens=64, machine=machine).layers) == 8
    with pytest.raises(DeviceError):
        load_weights(checkpoint, 512, chunk_tokens=512, machine=machine)
