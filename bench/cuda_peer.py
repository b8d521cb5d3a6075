"""mlx-lm's deepseek_v41 at the released widths, on the packed experts of bench.cuda_model.

It has no Engram. Its other weights are random, in the forms in which it would read them.
"""

import time
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx_lm.models import deepseek_v41
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from bench.cuda_model import random_array
from mlx_engine.model import Model
from mlx_engine.weights import Fp4, Fp8

# These have no complete stubs.
_nn: Any = import_module("mlx.nn")
_utils: Any = import_module("mlx.utils")
_STEPS, _REPEATS = 24, 5


class Peer:
    """The peer's model with as many layers as ours."""

    def __init__(self, ours: Model) -> None:
        config, layers = ours.config, ours.weights.layers
        self._layers, self._vocabulary = config.num_hidden_layers, config.vocab_size
        self._model: Any = deepseek_v41.Model(
            deepseek_v41.ModelArgs(
                num_hidden_layers=config.num_hidden_layers,
                vocab_size=config.vocab_size,
                compress_ratios=config.compress_ratios,
                kv_source_layer_ids=config.kv_source_layer_ids,
                index_source_layer_ids=config.index_source_layer_ids,
                candidate_source_layer_id=config.candidate_source_layer_id,
                rope_scaling={
                    "type": "yarn",
                    "factor": 16,
                    "original_max_position_embeddings": 65536,
                    "beta_fast": 32,
                    "beta_slow": 1,
                },
            )
        )
        for layer, theirs in zip(layers, self._model.model.layers, strict=True):
            attention, mlp = theirs.self_attn, theirs.mlp
            for name in ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"):
                setattr(attention, name, _linear(getattr(attention, name)))
            attention.o_a_proj = _switch_fp8(attention.o_a_proj)
            if hasattr(attention, "indexer"):
                attention.indexer.q_b_proj = _linear(attention.indexer.q_b_proj)
            switch = mlp.experts.switch_mlp
            switch.gate_proj = _switch(layer.ffn.w1)
            switch.up_proj = _switch(layer.ffn.w3)
            switch.down_proj = _switch(layer.ffn.w2)
            for name in ("gate_proj", "up_proj", "down_proj"):
                setattr(mlp.shared_experts, name, _linear(getattr(mlp.shared_experts, name)))
            mlp.gate.weight = mx.random.normal(mlp.gate.weight.shape) * 0.02
            for mixing in (theirs.attn_hc, theirs.ffn_hc):
                mixing.fn = mx.random.normal(mixing.fn.shape) * 0.01
        self._model.update(_utils.tree_map_with_path(self._cast, self._model.parameters()))
        mx.eval(self._model.parameters())

    def _cast(self, name: str, value: mx.array) -> mx.array:
        is_wide = value.dtype == mx.float32 and self._model.cast_predicate(name)
        return value.astype(mx.bfloat16) if is_wide else value

    def measure(self, context: int, chunk: int) -> dict[str, Any]:
        """Prefill of a context in chunks, of which the last counts, and decode after it."""
        model, cache = self._model, self._model.make_cache()
        ids = mx.random.randint(0, self._vocabulary, (1, context))
        took, logits = 0.0, ids
        for first in range(0, context, chunk):
            mx.synchronize()
            start = time.perf_counter()
            logits = model(ids[:, first : first + chunk], cache)
            mx.eval(logits[:, -1], [c.state for c in cache])
            mx.synchronize()
            took = time.perf_counter() - start
        token = mx.argmax(logits[:, -1], axis=-1)[None]
        steps: list[float] = []
        for _ in range(1 + _REPEATS):
            mx.synchronize()
            start = time.perf_counter()
            for _ in range(_STEPS):
                token = mx.argmax(model(token, cache)[:, -1], axis=-1)[None]
                mx.async_eval(token)
            mx.synchronize()
            steps.append(1e3 * (time.perf_counter() - start) / _STEPS)
        # The first compiles.
        step = min(steps[1:])
        return {
            "decode_ms_per_layer": (step - self.head_ms()) / self._layers,
            "step_ms": step,
            "step_ms_all": steps[1:],
            "prefill_ms_per_layer_chunk": 1e3 * took / self._layers,
            "peak_GB": mx.get_peak_memory() / 1e9,
        }

    def head_ms(self) -> float:
        """The head's product and the choice, back to back."""
        x = mx.random.normal((1, 1, self._model.args.hidden_size)).astype(mx.bfloat16)
        mx.eval(x)
        times: list[float] = []
        for _ in range(4):
            start = time.perf_counter()
            mx.eval([mx.argmax(self._model.lm_head(x)) for _ in range(20)])
            times.append(1e3 * (time.perf_counter() - start) / 20)
        return min(times)


def _linear(like: Any) -> Any:
    made = _nn.QuantizedLinear.__new__(_nn.QuantizedLinear)
    _nn.Module.__init__(made)
    made.group_size, made.bits, made.mode = 32, 8, "mxfp8"
    w = _fp8(*like.weight.shape)
    made.weight, made.scales, made.biases = w.weight, mx.contiguous(w.row_scale), None
    return made


def _switch(w: Fp4) -> Any:
    return _switched(w.weight, w.scale, 4, "mxfp4")


def _switch_fp8(like: Any) -> Any:
    groups, N, K = like.weight.shape
    w = _fp8(groups, N, K)
    return _switched(w.weight, mx.contiguous(w.row_scale), 8, "mxfp8")


def _switched(weight: mx.array, scales: mx.array, bits: int, mode: str) -> Any:
    made = QuantizedSwitchLinear.__new__(QuantizedSwitchLinear)
    _nn.Module.__init__(made)
    made.group_size, made.bits, made.mode = 32, bits, mode
    made.weight, made.scales, made.biases, made.global_scale = weight, scales, None, None
    return made


def _fp8(*shape: int) -> Fp8:
    *lead, N, K = shape
    return Fp8(
        random_array("", (*lead, N, K // 4), mx.uint32),
        random_array("", (*lead, N // 32, K // 32), mx.uint8),
    )
