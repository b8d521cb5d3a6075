"""The peer: mlx-lm's own `deepseek_v41` over a checkpoint in the released layout.

Tests and benches hold the engine against it. It knows no Engram and refuses a configuration that
has one. mlx-lm is imported only here and only on use: that costs a second and it is no runtime
dependency.
"""

import importlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast
from unittest.mock import patch

import mlx.core as mx

from mlx_engine.formats import CacheFormats
from tests.unrounded import UNROUNDED


class PeerCache(Protocol):
    """What one layer of the peer remembers of a sequence."""

    @property
    def state(self) -> tuple[mx.array | None, ...]:
        """Its arrays."""
        ...

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        ...


class PeerModel(Protocol):
    """mlx-lm's model: token ids [B, T] and a cache to logits [B, T, V]."""

    def __call__(self, inputs: mx.array, cache: list[PeerCache] | None = None) -> mx.array: ...

    def make_cache(self) -> list[PeerCache]:
        """An empty cache, one entry a layer."""
        ...

    def set_dtype(self, dtype: mx.Dtype) -> None:
        """Cast every floating-point parameter."""
        ...


def import_peer(module: str) -> Any:
    """A module of mlx-lm."""
    return importlib.import_module(f"mlx_lm.{module}")


def load_peer(directory: Path, dtype: mx.Dtype) -> PeerModel:
    """Load a checkpoint directory as mlx-lm does, packed weights kept, with activations in `dtype`.

    The activations take the type of the embedding and the norms. In float32 all parameters that
    are not packed are cast; in bfloat16 they stay as released.
    """
    model, _ = import_peer("utils").load_model(directory)
    peer = cast(PeerModel, model)
    if dtype != mx.bfloat16:
        peer.set_dtype(dtype)
    return peer


class PeerSession:
    """One timeline of the peer, run as mlx-lm's own generation runs it."""

    def __init__(self, model: PeerModel) -> None:
        self._model = model
        self.cache = model.make_cache()

    def logits(self, token_ids: Sequence[int]) -> mx.array:
        """Append tokens: logits [T, V] after each, not waited for."""
        return self._model(mx.array(list(token_ids))[None], self.cache)[0]

    def prefill(self, token_ids: Sequence[int], chunk_tokens: int) -> mx.array:
        """Append a prompt in chunks: logits [V] after the last token.

        As in `mlx_lm.generate.generate_step`: a chunk's cache is waited for and its logits are
        never computed, and the last token is a step of its own.
        """
        for first in range(0, len(token_ids) - 1, chunk_tokens):
            self.logits(token_ids[first : min(first + chunk_tokens, len(token_ids) - 1)])
            mx.eval([layer.state for layer in self.cache])
        last = self.logits(token_ids[-1:])[-1]
        mx.eval(last)
        return last

    def generate(self, token_id: int, tokens: int) -> list[int]:
        """Append a token and the greedy ones after it, all but the last: those greedy tokens.

        As in `generate_step`: a step is enqueued before the token that it appends is read.
        """
        generated: list[int] = []
        following = self._greedy(mx.array([token_id]))
        for left in range(tokens, 0, -1):
            current = following
            if left > 1:
                following = self._greedy(current)
            generated.append(cast(int, current.item()))
        return generated

    def _greedy(self, token_id: mx.array) -> mx.array:
        logits = self._model(token_id[None], self.cache)[0, -1:]
        token = mx.argmax(logits, axis=-1)
        mx.async_eval(token)
        return token


@contextmanager
def without_roundings() -> Generator[CacheFormats]:
    """The peer rounds no cached value here; yields the formats with which the engine does not.

    What is left between the two is f32 noise. With the roundings it turns a code now and then, and
    everything after that differs by far more.
    """
    module = import_peer("models.deepseek_v41")
    with (
        patch.object(module, "_fake_quant_fp8", _unrounded),
        patch.object(module, "_fake_quant_fp4", _unrounded),
    ):
        yield UNROUNDED


def _unrounded(x: mx.array, *_: int, **options: Any) -> mx.array:
    return x
