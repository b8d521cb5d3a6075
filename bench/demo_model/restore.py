"""Makes of a checkpoint what training goes on from.

    python -m bench.demo_model.restore CHECKPOINT PREPARED WEIGHTS

PREPARED gets what `prepare` writes, with the checkpoint's own tokenizer; WEIGHTS gets masters with
exactly the stored values. What the masters of a run had beyond them is lost.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.demo_model.chat import format_texts
from bench.demo_model.export import SHARPNESS, masters_of
from bench.demo_model.prepare import write_map_and_texts
from mlx_engine.shards import TensorLocation, list_tensors
from tests.reference.formats import bf16_decode, bf16_round


def restore(checkpoint: Path, prepared: Path, weights: Path) -> None:
    """Write both folders; raises FileExistsError where the second one has weights."""
    if any(weights.glob("masters-*.npz")):
        raise FileExistsError(f"{weights} has weights already: name another folder for these")
    for folder in (prepared, weights):
        folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(checkpoint / name, prepared)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    write_map_and_texts(prepared, tokenizer, format_texts())
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    locations = list_tensors(checkpoint).locations
    masters = masters_of(config, {name: _read(at) for name, at in locations.items()})
    masters["norm.weight"] /= SHARPNESS
    bits = {key: bf16_round(value).view(np.uint32) >> 16 for key, value in masters.items()}
    parts = {key: value.astype(np.uint16) for key, value in bits.items()}
    np.savez(weights / "masters-0.npz", allow_pickle=False, **parts)


def _read(at: TensorLocation) -> NDArray[Any]:
    """A tensor's values as f32, or its codes as uint8."""
    data = np.fromfile(at.path, np.uint8, at.n_bytes, offset=at.offset)
    if at.dtype == "BF16":
        return bf16_decode(data.view(np.uint16)).reshape(at.shape)
    return (data.view(np.float32) if at.dtype == "F32" else data).reshape(at.shape)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("checkpoint", "prepared", "weights"):
        parser.add_argument(name, type=Path)
    try:
        restore(**vars(parser.parse_args()))
    except FileExistsError as error:
        parser.error(str(error))
