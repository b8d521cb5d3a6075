"""Writes checkpoint directories in the released layout, for tests.

Owns the safetensors bytes: numpy lacks the types F8_E4M3, F8_E8M0 and BF16, so headers are written
here by hand. Knows nothing of the engine, so that a fault there cannot hide.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_F32_NAME = re.compile(r"\.(hc_\w+|attn\.attn_sink|ffn\.gate\.bias(_vl)?)$")


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]],
    shards: int = 3,
    *,
    dtypes: Mapping[str, str] | None = None,
) -> Path:
    """Write `config.json`, the index and the shards into `directory`, and return it.

    F8_E4M3 and F8_E8M0 come as uint8 codes, I8 (FP4 pairs) as uint8 or int8, BF16 as uint16 codes
    or as float32 values that bf16 holds exactly, F32 as float32. `stored_dtype` tells by name what
    is declared; `dtypes` declares something else for single names, over the same bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # A weight and its scale stay in one shard, as they do in the release.
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
    shard_of = {module: i * shards // len(modules) for i, module in enumerate(modules)}
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for i in range(shards):
        part = [name for name in tensors if shard_of[name.rpartition(".")[0]] == i]
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        total_bytes += write_shard(directory / shard, {n: tensors[n] for n in part}, dtypes=dtypes)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory


def write_shard(
    path: Path, tensors: Mapping[str, NDArray[Any]], *, dtypes: Mapping[str, str] | None = None
) -> int:
    """Write one safetensors file, and return the bytes of its payload."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    payload: list[bytes] = []
    end = 0
    for name, array in tensors.items():
        dtype = stored_dtype(name, array)
        data = _stored_bytes(name, array, dtype)
        header[name] = {
            "dtype": (dtypes or {}).get(name, dtype),
            "shape": list(array.shape),
            "data_offsets": [end, end + len(data)],
        }
        payload.append(data)
        end += len(data)
    path.write_bytes(header_bytes(header) + b"".join(payload))
    return end


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """A safetensors header with its length before it, padded to 8 bytes as the format asks."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stored_dtype(name: str, array: NDArray[Any]) -> str:
    """The safetensors dtype that the release gives a tensor of this name and numpy type."""
    if array.dtype.itemsize == 1:
        if name.endswith(".scale"):
            return "F8_E8M0"
        return "I8" if ".ffn.experts." in name else "F8_E4M3"
    if array.dtype == np.float32 and _F32_NAME.search(name):
        return "F32"
    return "BF16"


def _stored_bytes(name: str, array: NDArray[Any], dtype: str) -> bytes:
    if dtype == "BF16" and array.dtype == np.float32:
        words = np.ascontiguousarray(array).view(np.uint32)
        if (words & 0xFFFF).any():
            raise ValueError(f"{name} has values that bf16 cannot hold")
        array = (words >> 16).astype(np.uint16)
    sizes = {"BF16": 2, "F32": 4}
    if array.dtype.itemsize != sizes.get(dtype, 1):
        raise ValueError(f"{name} is {array.dtype}, it must hold the codes of {dtype}")
    return np.ascontiguousarray(array).tobytes()
