"""One decode step of a configuration as a trace: weights and state are shapes, nothing is loaded.

`Session.step` and the Sampler run as they are, on arguments that never get memory.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint import Checkpoint
from mlx_engine.config import TILE, ModelConfig
from mlx_engine.decoder import Decoder
from mlx_engine.devices import ONE, Devices
from mlx_engine.engram import EngramReader, EngramRows, Rows
from mlx_engine.inventory import tensor_specs
from mlx_engine.model import Model
from mlx_engine.sampling import Sampler, Sampling
from mlx_engine.session import Session
from mlx_engine.shards import TensorLocation
from mlx_engine.state import SessionState
from mlx_engine.weights import Weights
from tests.kernels.trace import Launch, trace

Make = Callable[[str, Sequence[int], mx.Dtype], mx.array]

_SPARE_ROWS = 64


def decode_step(
    config: ModelConfig, context_tokens: int, sampling: Sampling, *, by_decoder: bool = False
) -> list[Launch]:
    """The launches that follow `context_tokens` tokens with one more and draw the next.

    Those of the graphs that are compiled for CUDA `by_decoder`, as on a Mac.

    A launch's `source` is its layer: the highest whose weights or state it depends on; -1 for what
    comes before the layers, the number of layers for the head and the draw.
    """
    arguments: dict[str, mx.array] = {}

    def declare(name: str, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        arguments[name] = mx.zeros(shape, dtype)  # lazy, and never computed
        return arguments[name]

    lay_out_weights(config, declare)
    _fill(SessionState(config), config, context_tokens, declare)
    engram = engram_of_zeros(config)

    def step(**given: mx.array) -> list[mx.array]:
        def take(name: str, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
            return given[name]

        model = Model(config, lay_out_weights(config, take), mx.bfloat16)
        session = Session(model, engram, decoder=Decoder(model, is_on=by_decoder))
        _fill(session.state, config, context_tokens, take)
        session.restore([0] * context_tokens, session.state)
        token = Sampler(sampling)(session.step(0))
        return [token, *session.state.arrays()]

    def layer_of(name: str) -> int:
        if name.startswith("layers."):
            return int(name.split(".")[1])
        return -1 if name.startswith("embed") else config.num_hidden_layers

    return trace(step, arguments, layer_of)


def lay_out_weights(config: ModelConfig, make: Make, devices: Devices = ONE) -> Weights:
    """The weights as the checkpoint's own loader lays them out, from arrays that `make` gives."""
    locations = {
        spec.name: TensorLocation(Path(), 0, spec.n_bytes, spec.dtype, spec.shape)
        for spec in tensor_specs(config)
    }

    def fill(_: Any, names: list[str], shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return make(names[0], shape, dtype)

    with (
        patch("mlx_engine.tensor_reader.TensorReader._fill", fill),
        patch.object(mx, "eval"),
    ):
        return Checkpoint(Path(), config, locations).read_weights(devices=devices)


def engram_of_zeros(config: ModelConfig) -> EngramReader | None:
    """A reader whose rows are there at once, all zero."""
    engram = config.engram
    if engram is None:
        return None

    def prefetch(token_ids: NDArray[np.int64], _: NDArray[np.int64]) -> EngramRows:
        shape = (token_ids.size, engram.columns, engram.head_dim)
        rows: Future[Rows] = Future()
        scales = np.zeros((*shape[:-1], engram.head_dim // TILE), np.uint8)
        rows.set_result((np.zeros(shape, np.uint8), scales))
        return EngramRows(dict.fromkeys(engram.layer_ids, rows))

    history = SimpleNamespace(history_tokens=engram.max_ngram_size - 1)
    return cast(EngramReader, SimpleNamespace(hash=history, prefetch=prefetch))


def _fill(state: SessionState, config: ModelConfig, tokens: int, make: Make) -> None:
    """Give a state the arrays that it has after so many tokens, at least a window."""
    state.position = tokens
    for layer, window in enumerate(state.windows):
        window.rows = make(f"layers.{layer}.window", window.rows.shape, mx.uint32)
        window.end, window.count = tokens, window.rows.shape[0]
    for source, rows in state.compressed.items():
        ratio, keys = config.compress_ratios[source], state.index_keys[source]
        parts = {"compressed": rows, "codes": keys.codes, "scales": keys.scales}
        for name, part in parts.items():
            part.length = tokens // ratio
            shape = (part.length + _SPARE_ROWS, part.buffer.shape[1])
            part.buffer = make(f"layers.{source}.{name}", shape, part.buffer.dtype)
        if source in state.pending:
            group = state.pending[source]
            shape = (tokens % ratio, config.head_dim)
            group.kv = make(f"layers.{source}.pending_kv", shape, mx.float32)
            group.gate = make(f"layers.{source}.pending_gate", shape, mx.float32)
