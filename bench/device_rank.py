"""One rank of bench/devices.py: `python -m bench.device_rank PART OUT.json [options]`.

PART "exchange" times sums and gathers alone; "model" a model of the released widths, a rank's part
of it or all; "experts" one layer's experts, shared by width and by expert. Every rank writes what
it measured; that of rank 0 counts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import numpy as np

from bench.cuda_model import make_engram, random_array, small_config
from mlx_engine.config import ModelConfig
from mlx_engine.decoder import Decoder
from mlx_engine.devices import ONE, Devices
from mlx_engine.engram import EngramReader
from mlx_engine.identity import state_digest
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.ops.experts import moe
from mlx_engine.ops.router import Router, Routing
from mlx_engine.session import Session
from mlx_engine.weights import FfnWeights, Fp4, Fp8
from tests.kernels.step import lay_out_weights

REPEATS = 5
CHUNK = 2048
# Steps before those that count, and those.
WARM, STEPS = 6, 24
# Exchanges of a chain, each on the result of the one before.
CHAIN = 40
# The widths of a dry run on a CPU.
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 4,
    "n_routed_experts": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "image_token_id": 511,
}


@dataclass(frozen=True)
class Apart(Devices):
    """A rank that exchanges nothing: its results are wrong, and take the time that they take."""

    def sum(self, x: mx.array, after: mx.array | None = None) -> mx.array:
        return x

    def gather(self, x: mx.array) -> mx.array:
        return mx.tile(x, (1, self.count))


def main() -> None:
    """Measure a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("exchange", "model", "experts"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", default="", help="ring or nccl; none for a single device")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="small widths, for a dry run")
    given = parser.parse_args()
    devices = Devices.join(given.backend) if given.backend else ONE
    config = _config(given.layers, is_small=given.small)
    chunk = 64 if given.small else CHUNK
    if mx.default_device() == mx.gpu:
        from mlx_engine.cuda.kernels import CudaKernels

        # A kernel that fails raises here, and nothing stands in for it.
        with launch.using(CudaKernels()):
            found = _measured(given.part, config, devices, chunk)
    else:
        found = _measured(given.part, config, devices, chunk)
    given.out.with_suffix(f".{devices.rank}.json").write_text(json.dumps(found))


def _measured(part: str, config: ModelConfig, devices: Devices, chunk: int) -> dict[str, Any]:
    if part == "exchange":
        return exchanges(devices, config.hidden_size, chunk)
    if part == "experts":
        return experts(config, chunk)
    return model(config, devices, chunk)


def _config(layers: int, *, is_small: bool) -> ModelConfig:
    config = small_config(layers)
    if not is_small:
        return config
    assert config.engram is not None
    engram = replace(config.engram, compressed_vocab_size=400)
    return replace(config, engram=engram, **cast("dict[str, Any]", SMALL))


# Exchanges


def exchanges(devices: Devices, D: int, chunk: int) -> dict[str, Any]:
    """us of an exchange of bf16 [T, D] for a token and for a chunk."""
    return {f"{T} tokens": _chains(devices, T, D) for T in (1, chunk)}


def _chains(devices: Devices, T: int, D: int) -> dict[str, Any]:
    group, found = devices.group, dict[str, Any]()
    x = mx.zeros((T, D), mx.bfloat16)
    ways: dict[str, Callable[[mx.array], mx.array]] = {
        "one addition": lambda y: y + 1,
        "all_sum": lambda y: mx.distributed.all_sum(y, group=group),
        "all_sum f32": lambda y: mx.distributed.all_sum(y.astype(mx.float32), group=group).astype(
            y.dtype
        ),
        "all_gather": lambda y: mx.distributed.all_gather(y[None], group=group)[0],
        "Devices.sum": devices.sum,
    }
    for name, way in ways.items():

        def chain(y: mx.array, way: Callable[[mx.array], mx.array] = way) -> mx.array:
            for _ in range(CHAIN):
                # Something between them, as in a model.
                y = way(y) + 1
            return y

        def waited(y: mx.array, way: Callable[[mx.array], mx.array] = way) -> mx.array:
            for _ in range(CHAIN):
                y = way(y) + 1
                mx.eval(y)
            return y

        forms = {"chain": chain, "compiled": mx.compile(chain), "each waited for": waited}
        found[name] = {form: _us(run, x) for form, run in forms.items()}
        found[name]["enqueued"] = _us(chain, x, is_waiting=False)
    found["same bits"] = _is_same(devices, T, D)
    return found


def _us(run: Callable[[mx.array], mx.array], x: mx.array, *, is_waiting: bool = True) -> float:
    """us of one of the chain, the least disturbed; without waiting until all is handed over."""
    times: list[float] = []
    for _ in range(REPEATS + 2):
        mx.synchronize()
        start = time.perf_counter()
        y = run(x)
        mx.async_eval(y)
        if is_waiting:
            mx.eval(y)
        times.append(1e6 * (time.perf_counter() - start) / CHAIN)
        mx.synchronize()
    return min(times[2:])


def _is_same(devices: Devices, T: int, D: int) -> bool:
    """Whether every rank has the bits of rank 0 after a sum of random values."""
    key = mx.random.key(devices.rank)
    total = devices.sum(mx.random.normal((T, D), key=key).astype(mx.bfloat16))
    alone = mx.distributed.all_sum(
        mx.random.normal((T, D), key=key).astype(mx.bfloat16), group=devices.group
    )
    both = mx.stack([total, alone])
    return mx.array_equal(both, devices.from_first(both)).item() is True


# Experts


def experts(config: ModelConfig, chunk: int) -> dict[str, Any]:
    """ms of a layer's experts on one of two devices, shared by width and by expert.

    By expert a device has half of them whole. For one token the busier of the two has 4 of the 6
    that are chosen (3.94 in the mean); for a chunk each has half of the choices.
    """
    E, I_D = config.n_routed_experts, config.moe_intermediate_size
    k = config.num_experts_per_tok
    found: dict[str, Any] = {"whole": {}, "by width": {}, "by expert": {}}
    shapes = {
        "whole": (E, I_D, {1: k, chunk: k}),
        "by width": (E, I_D // 2, {1: k, chunk: k}),
        "by expert": (E // 2, I_D, {1: -(-2 * k // 3), chunk: k // 2}),
    }
    for name, (count, width, chosen) in shapes.items():
        ffn = _ffn(config, count, width)
        for T, slots in chosen.items():
            found[name][f"{T} tokens"] = _moe_ms(config, ffn, T, slots)
        del ffn
        mx.clear_cache()
    return found


def _ffn(config: ModelConfig, E: int, width: int) -> FfnWeights:
    D = config.hidden_size

    def fp4(N: int, K: int) -> Fp4:
        codes = random_array("codes", (E, N, K // 8), mx.uint32)
        return Fp4(codes, random_array(".experts.", (E, N, K // 32), mx.uint8))

    def fp8(N: int, K: int) -> Fp8:
        codes = random_array("codes", (N, K // 4), mx.uint32)
        return Fp8(codes, random_array("scale", (N // 32, K // 32), mx.uint8))

    none = mx.zeros((1,))
    routed = fp4(width, D), fp4(D, width), fp4(width, D)
    shared = fp8(width, D), fp8(D, width), fp8(width, D)
    ffn = FfnWeights(none, none, *routed, *shared)
    mx.eval([part for w in (*routed, *shared) for part in (w.weight, w.scale)])
    return ffn


def _moe_ms(config: ModelConfig, ffn: FfnWeights, T: int, k: int) -> float:
    E, many = ffn.w1.weight.shape[0], 20
    router = Router(mx.zeros((1,)), mx.zeros((E,)), k, 1.0, True, 1.5)
    x = mx.random.normal((T, config.hidden_size)).astype(mx.bfloat16)
    # Other experts every time, so that none lies in a cache.
    scores = mx.random.uniform(shape=(many, T, E))
    mx.eval(x, scores)

    def run(y: mx.array) -> mx.array:
        for n in range(many):
            h = moe(y, Routing(scores[n], router), ffn, limit=config.swiglu_limit)
            y = mx.where(mx.isfinite(h), x, h)
        return y

    return _us(run, x) * CHAIN / many / 1e3


# The model


def model(config: ModelConfig, devices: Devices, chunk: int) -> dict[str, Any]:
    """ms a layer of a decode step and of a chunk, with the exchanges and without; bytes held."""
    mx.random.seed(0)
    made: dict[tuple[str, tuple[int, ...]], mx.array] = {}

    def make(name: str, shape: Any, dtype: mx.Dtype) -> mx.array:
        """Random values for a first layer, copies for the others: memory is what counts."""
        kind = name.split(".", 2)[-1] if name.startswith("layers.") else name
        key = kind, tuple(shape)
        is_new = key not in made
        if is_new:
            made[key] = random_array(name, tuple(shape), dtype)
        array = made[key] if is_new else made[key] + mx.zeros((), made[key].dtype)
        _computed(array)
        return array

    weights = lay_out_weights(config, make, devices)
    made.clear()
    mx.clear_cache()
    dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32
    whole = Model(config, weights, dtype, devices)
    found: dict[str, Any] = {
        "layers": config.num_hidden_layers,
        "weights_GB": mx.get_active_memory() / 1e9,
    }
    with TemporaryDirectory() as folder, _engram(config, Path(folder), devices) as engram:
        found |= _passes(whole, engram, chunk)
        found["peak_GB"] = mx.get_peak_memory() / 1e9
        if devices.count > 1:
            apart = Model(config, weights, dtype, Apart(devices.rank, devices.count))
            found["without exchanges"] = _passes(apart, engram, chunk)
    return found


# While weights are laid out, `mx.eval` is not MLX's.
_computed = cast(Callable[[mx.array], None], mx.eval)


def _engram(config: ModelConfig, folder: Path, devices: Devices) -> EngramReader:
    return make_engram(config, folder / "table", devices)


def _passes(subject: Model, engram: EngramReader, chunk: int) -> dict[str, Any]:
    """A prompt of two chunks, of which the second counts, and steps after it."""
    layers = len(subject.plans)
    numbers = np.random.default_rng(0)
    ids = numbers.integers(3, subject.config.vocab_size - 2, 2 * chunk + 2).tolist()
    decoder = Decoder(subject, is_on=True)
    session = Session(subject, engram, prefill="full", chunk_tokens=chunk, decoder=decoder)
    # Kernels are compiled at their first launch.
    session.sync(ids)
    session.reset()
    ends = [time.perf_counter() for _ in session.read(ids)]
    prefill_ms = 1e3 * (ends[2] - ends[1])
    token_id, drawn, steps = 5, list[int](), list[float]()
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        token = mx.argmax(session.step(token_id), keepdims=True)
        mx.async_eval(token)
        session.begin_step(token)
        token_id = cast(int, token.item())
        drawn.append(token_id)
        steps.append(1e3 * (time.perf_counter() - start))
    return {
        "prefill_ms": prefill_ms,
        "prefill_ms_per_layer": prefill_ms / layers,
        "prefill_tokens": chunk,
        "step_ms": statistics.median(steps[WARM:]),
        "step_ms_per_layer": statistics.median(steps[WARM:]) / layers,
        "drawn": drawn,
        "state": state_digest(session.state),
    }


if __name__ == "__main__":
    main()
