"""A model of the released widths with few layers and random weights, for bench/cuda.py.

The layers are of all kinds: two with a window alone, the first source of compressed rows at ratio
2, layers that reuse its choice, a source at ratio 1 with candidates, and one that chooses again.
Layer 1 has an Engram, whose table is small but lies in a file and is read from it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_engine.config import ModelConfig
from mlx_engine.config_file import parse_config
from mlx_engine.devices import ONE, Devices
from mlx_engine.engram import EngramHash, EngramReader, primes_from
from mlx_engine.engram_table import TableLocation
from mlx_engine.model import Model
from tests.kernels.step import lay_out_weights

_RELEASED = Path(__file__).parents[1] / "tests/data/released_config.json"
# Where the search for the primes of a small table starts.
_TABLE_START = 4000
# While weights are laid out, `mx.eval` is not MLX's.
_computed = cast(Callable[[mx.array], None], mx.eval)


def small_config(layers: int) -> ModelConfig:
    """The released configuration with so many layers, at least 7."""
    released = parse_config(json.loads(_RELEASED.read_text()))
    half = layers // 2
    engram = released.engram
    assert engram is not None and half >= 3
    return replace(
        released,
        num_hidden_layers=layers,
        compress_ratios=(0, 0, *[2] * (half - 2), *[1] * (layers - half)),
        kv_source_layer_ids=(2, half),
        index_source_layer_ids=(2, half, half + 3),
        candidate_source_layer_id=half,
        engram=replace(
            engram,
            layer_ids=(1,),
            vocab_size=_TABLE_START,
            num_embeddings=(sum(primes_from(_TABLE_START, engram.columns)),),
        ),
        draft=None,
        vision=None,
    )


def make_model(config: ModelConfig) -> Model:
    """The model in bf16; its arrays are there when this returns."""

    def make(name: str, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        made = random_array(name, tuple(shape), dtype)
        _computed(made)
        return made

    return Model(config, lay_out_weights(config, make), mx.bfloat16)


def random_array(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Codes that are numbers, scales that keep products near one, or normal values."""
    if dtype == mx.uint16:
        # Laid out as the bits of bf16.
        return random_array(name, shape, mx.bfloat16).view(mx.uint16)
    if dtype == mx.uint32:
        # A byte with its lowest bit clear is a number in both formats.
        words = mx.random.randint(-(2**31), 2**31 - 1, shape, dtype=mx.int32)
        return words.view(mx.uint32) & 0xFEFEFEFE
    if dtype == mx.uint8:
        least = 118 if ".experts." in name else 112
        return mx.random.randint(least, least + 4, shape).astype(mx.uint8)
    if "norm" in name:
        return mx.ones(shape, dtype)
    if name.endswith("_scale"):
        return mx.full(shape, 0.5, dtype)
    spread = 1.0 if name.endswith(("_base", "attn_sink")) or "embed" in name else 0.02
    return (mx.random.normal(shape) * spread).astype(dtype)


def make_engram(config: ModelConfig, path: Path, devices: Devices = ONE) -> EngramReader:
    """The product's reader on a table of random rows, which is written to `path`.

    All rows become hot in the first prompt, so that no later chunk waits for reads: with two tables
    under 40 layers a prompt's reads are hidden, under 12 they would not be.
    """
    engram = config.engram
    assert engram is not None
    rows, codes_bytes = engram.num_embeddings[0], engram.num_embeddings[0] * engram.head_dim
    numbers = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write((numbers.integers(0, 128, codes_bytes, np.uint8) * 2 % 254).tobytes())
        file.write(numbers.integers(112, 116, codes_bytes // 32, np.uint8).tobytes())
    tokens = np.arange(config.vocab_size, dtype=np.int32) % engram.compressed_vocab_size
    return EngramReader(
        EngramHash(tokens, engram, config.image_token_id),
        [TableLocation(path, 0, codes_bytes, rows, engram.head_dim)],
        cache_bytes=1 << 26,
        devices=devices,
    )
