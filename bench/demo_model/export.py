"""Writes trained weights as a checkpoint in the released format.

    python -m bench.demo_model.export PREPARED WEIGHTS FOLDER

FP4 experts, FP8 dense weights and Engram rows, BF16 and F32 for the rest, with the tokenizer that
the model was trained with. Needs no torch: the rounding is the training form's, in numpy.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.demo_model.parameters import parameter_of
from tests.checkpoints import write_checkpoint
from tests.reference.formats import (
    E2M1_MAGNITUDES,
    E4M3_MAGNITUDES,
    bf16_decode,
    bf16_round,
    e4m3,
    e8m0,
    fp4_weight,
    fp8_weight,
)
from tests.reference.random_tensors import tensor_layout

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

# The exported logits are so many times the trained ones; the likeliest token stays. Where clients
# draw at temperature 1, a small model's slips would spoil most long answers.
SHARPNESS = 4.0

# The smallest amax that a scale is made for; an e8m0 byte must not become 0.
_LEAST = 2.0**-100


def read_masters(folder: Path) -> dict[str, Floats]:
    """The master weights that training saved in bf16, by key."""
    masters: dict[str, Floats] = {}
    for path in sorted(folder.glob("masters-*.npz")):
        with np.load(path) as part:
            masters |= {key: bf16_decode(part[key]) for key in part.files}
    return masters


def tensors_of(config: dict[str, Any], masters: dict[str, Floats]) -> dict[str, NDArray[Any]]:
    """Every tensor of the checkpoint: FP8, packed FP4 and E8M0 as uint8 codes, others as f32."""
    layout = tensor_layout(config)
    tensors: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape) in layout.items():
        if name.endswith(".scale"):
            continue
        key, place = parameter_of(name, config)
        value = masters[key][place][: shape[0]]
        match dtype:
            case "I8":
                codes, scales = fp4_codes(value)
            case "F8_E4M3" if name.endswith("embed.weight"):
                codes, scales = fp8_codes(value, rows=1)
            case "F8_E4M3":
                codes, scales = fp8_codes(value, rows=32)
            case "BF16":
                tensors[name] = bf16_round(value)
                continue
            case _:
                tensors[name] = value
                continue
        tensors[name] = codes
        tensors[name.removesuffix("weight") + "scale"] = scales
    return tensors


def masters_of(config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> dict[str, Floats]:
    """The inverse: master weights with exactly the values of a checkpoint's tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    values: dict[str, Floats] = {}
    for name in tensors:
        if not name.endswith(".scale"):
            values[name] = _value(name, tensors).astype(np.float32)
            key, place = parameter_of(name, config)
            whole = (*(i + 1 for i in place), *values[name].shape)
            shapes[key] = tuple(map(max, whole, shapes.get(key, whole)))
    masters = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
    for name, value in values.items():
        key, place = parameter_of(name, config)
        masters[key][place][: len(value)] = value
    return masters


def _value(name: str, tensors: dict[str, NDArray[Any]]) -> NDArray[Any]:
    scale = tensors.get(name.removesuffix("weight") + "scale")
    if scale is None:
        return tensors[name]
    if ".experts." in name:
        return fp4_weight(tensors[name], scale)
    if name.endswith(".embed.weight"):
        return e4m3(tensors[name]) * e8m0(scale).repeat(32, axis=1)
    return fp8_weight(tensors[name], scale)


def fp4_codes(values: Floats) -> tuple[Codes, Codes]:
    """Packed e2m1 codes [out, in / 2] and e8m0 scales [out, in / 32]."""
    blocks = values.reshape(len(values), -1, 32)
    amax = np.maximum(abs(blocks).max(-1), _LEAST)
    scales = _power_of_two_ceil(amax / np.float32(6))
    units = blocks / np.exp2(scales.astype(np.float32) - 127)[..., None]
    codes = _nearest(units, E2M1_MAGNITUDES) | (np.signbit(units) << 3).astype(np.uint8)
    codes = codes.reshape(values.shape)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8), scales


def fp8_codes(values: Floats, *, rows: int) -> tuple[Codes, Codes]:
    """e4m3 codes [out, in] and e8m0 scales [out / rows, in / 32]."""
    N, K = values.shape
    tiles = values.reshape(N // rows, rows, K // 32, 32)
    amax = np.maximum(abs(tiles).max((1, 3)), _LEAST)
    scales = _power_of_two_ceil(amax / np.float32(448))
    units = tiles / np.exp2(scales.astype(np.float32) - 127)[:, None, :, None]
    codes = _nearest(units, E4M3_MAGNITUDES) | (np.signbit(units) << 7).astype(np.uint8)
    return codes.reshape(N, K), scales


def _power_of_two_ceil(x: Floats) -> Codes:
    """The e8m0 byte of the least power of two that is at least x."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).astype(np.uint8)


def _nearest(x: NDArray[np.floating[Any]], magnitudes: NDArray[np.float64]) -> Codes:
    """The code of the nearest magnitude, ties to the even code."""
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    size = abs(x).astype(np.float64)
    low = np.searchsorted(midpoints, size, side="left")  # a tie stays below
    high = np.searchsorted(midpoints, size, side="right")
    return np.where(low % 2 == 0, low, high).astype(np.uint8)


def export(prepared: Path, weights: Path, folder: Path) -> int:
    """Write the checkpoint; returns the bytes of its files."""
    config: dict[str, Any] = json.loads((prepared / "config.json").read_text())
    masters = read_masters(weights)
    masters["norm.weight"] *= SHARPNESS
    write_checkpoint(folder, config, tensors_of(config, masters), shards=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(prepared / name, folder)
    return sum(path.stat().st_size for path in folder.iterdir())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("prepared", "weights", "folder"):
        parser.add_argument(name, type=Path)
    print(export(**vars(parser.parse_args())), "bytes")
