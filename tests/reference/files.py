"""Reads a safetensors directory into numpy arrays, without the engine's checkpoint module."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.formats import bf16_decode


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json."""
    return json.loads((directory / "config.json").read_text())


def read_tensors(directory: Path) -> dict[str, NDArray[Any]]:
    """Name -> array for every tensor of the index: codes as uint8, BF16 and F32 as float32."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    weight_map: dict[str, str] = index["weight_map"]
    shards = {shard: _read_shard(directory / shard) for shard in set(weight_map.values())}
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _read_shard(path: Path) -> dict[str, NDArray[Any]]:
    data = path.read_bytes()
    payload_start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:payload_start])
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        stored = data[payload_start + begin : payload_start + end]
        tensors[name] = _decode(stored, entry["dtype"]).reshape(entry["shape"])
    return tensors


def _decode(stored: bytes, dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return bf16_decode(np.frombuffer(stored, np.uint16))
    return np.frombuffer(stored, np.float32 if dtype == "F32" else np.uint8)
