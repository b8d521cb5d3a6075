"""Tests of the random checkpoints' layout and of the safetensors reader."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference import formats
from tests.reference.files import read_config, read_tensors
from tests.reference.random_tensors import (
    DATA,
    TINY_CONFIG,
    Layout,
    random_tensors,
    tensor_layout,
)

RELEASED_CONFIG: dict[str, Any] = json.loads((DATA / "released_config.json").read_text())


def stored_bytes(layout: Layout) -> int:
    width = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
    return sum(width[dtype] * math.prod(shape) for dtype, shape in layout.values())


def test_the_layout_of_the_release_has_its_tensor_count_and_bytes() -> None:
    layout = tensor_layout(RELEASED_CONFIG)
    assert len(layout) == 96_085
    assert stored_bytes(layout) == 510_286_023_000
    assert layout["layers.39.ffn.experts.383.w2.weight"] == ("I8", (5120, 1152))
    assert len(tensor_layout(RELEASED_CONFIG, engram_rows=False)) == 96_085 - 4


def test_random_tensors_match_their_layout_and_hold_no_nan() -> None:
    tensors, layout = random_tensors(TINY_CONFIG, 0), tensor_layout(TINY_CONFIG)
    assert list(tensors) == list(layout)
    for name, (dtype, shape) in layout.items():
        values = tensors[name]
        assert values.shape == shape
        assert values.dtype == (np.float32 if dtype in ("BF16", "F32") else np.uint8)
        if dtype == "BF16":
            np.testing.assert_array_equal(formats.bf16_round(values), values)
        elif dtype == "F8_E4M3":
            assert not np.isnan(formats.e4m3(values)).any()
        elif dtype == "F8_E8M0":
            assert values.max() < 255
    again, other = random_tensors(TINY_CONFIG, 0), random_tensors(TINY_CONFIG, 1)
    assert all(np.array_equal(again[name], tensors[name]) for name in tensors)
    assert not any(np.array_equal(other[name], tensors[name]) for name in tensors)


def test_the_reader_returns_what_a_safetensors_directory_holds(tmp_path: Path) -> None:
    tensors, layout = random_tensors(TINY_CONFIG, 0), tensor_layout(TINY_CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    weight_map = {name: f"model-0000{1 + i % 2}.safetensors" for i, name in enumerate(layout)}
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in set(weight_map.values()):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        payload = b""
        for name in (name for name in layout if weight_map[name] == shard):
            dtype, shape = layout[name]
            data = tensors[name]
            if dtype == "BF16":
                data = (data.view(np.uint32) >> 16).astype(np.uint16)
            offsets = [len(payload), len(payload) + data.nbytes]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            payload += data.tobytes()
        text = json.dumps(header).encode()
        (tmp_path / shard).write_bytes(len(text).to_bytes(8, "little") + text + payload)

    read = read_tensors(tmp_path)
    assert read_config(tmp_path) == TINY_CONFIG
    assert read.keys() == tensors.keys()
    for name, values in tensors.items():
        assert read[name].dtype == values.dtype
        np.testing.assert_array_equal(read[name], values)
