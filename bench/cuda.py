"""Decode and prefill of the model at the released widths on one NVIDIA GPU, beside mlx-lm.

    python -m bench.cuda [--layers 12] [--contexts 512,2048,8192,32768,131072] [--out FILE]

As many layers as fit, random weights, a small Engram table in a file. Every figure goes to FILE as
it is made, and what FILE holds already is not made again. The last line printed is that file's
JSON. The peer runs on the same packed expert arrays.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import numpy as np

from bench import cuda_model
from mlx_engine.cuda.kernels import CudaKernels
from mlx_engine.engram import EngramReader, Rows
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.session import Session
from tests.cuda.step import CompiledDecoder

CHUNK = 2048
# Steps before those that count (two forms to trace), and those.
WARM, STEPS = 4, 24
REPEATS = 5


def main() -> None:
    """Run what is missing from the results and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--contexts", default="512,2048,8192,32768,131072")
    parser.add_argument("--peer", default="512,8192")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("bench/results/cuda.json"))
    given = parser.parse_args()
    results = _Results(given.out)
    started = time.perf_counter()
    results.make("machine", lambda: _machine(given.commit))
    results.make("kernels", lambda: launch.start(CudaKernels())._asdict())
    assert not results.found["kernels"]["off"], "kernels differ from their references"
    results.make("ceilings", _ceilings)
    print(f"kernels after {time.perf_counter() - started:.0f} s", flush=True)
    config = cuda_model.small_config(given.layers)
    model = cuda_model.make_model(config)
    results.make("layers", lambda: given.layers)
    results.make("weights_GB", lambda: mx.get_active_memory() / 1e9)
    print(f"model after {time.perf_counter() - started:.0f} s", flush=True)
    with TemporaryDirectory() as folder:
        engram = cuda_model.make_engram(config, Path(folder) / "table")
        # A kernel that fails raises here, and nothing stands in for it.
        with engram, launch.using(CudaKernels()):
            _measure(model, engram, results, _numbers(given.contexts))
            results.make("accuracy", lambda: _accuracy(model, engram))
            print(f"ours after {time.perf_counter() - started:.0f} s", flush=True)
            peers = [c for c in _numbers(given.peer) if f"peer_{c}" not in results.found]
            if peers:
                peer = import_module("bench.cuda_peer").Peer(model)
                results.make("peer_head_ms", peer.head_ms)
                for context in peers:
                    results.make(f"peer_{context}", lambda c=context: peer.measure(c, CHUNK))
                print(f"peer after {time.perf_counter() - started:.0f} s", flush=True)
    print(f"all after {time.perf_counter() - started:.0f} s", flush=True)
    print(json.dumps(results.with_ratios()))


class _Results:
    """Figures by name, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def make(self, name: str, measure: Callable[[], Any]) -> None:
        if name not in self.found:
            self.found[name] = measure()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"{name:16s} {self.found[name]}", flush=True)

    def with_ratios(self) -> dict[str, Any]:
        """All figures, with how often the peer's time ours goes into."""
        ratios: dict[str, float] = {}
        for name, peer in self.found.items():
            context = name.removeprefix("peer_")
            if name != context and f"decode_{context}" in self.found:
                ours = self.found[f"decode_{context}"]["ms_per_layer"]
                ratios[context] = peer["decode_ms_per_layer"] / ours
        found = dict(self.found)
        if ratios:
            found["decode_ratio"] = min(ratios.values())
        if "8192" in ratios and "prefill_8192" in self.found:
            ours = self.found["prefill_8192"]["ms_per_layer_chunk"]
            found["prefill_ratio_8k"] = self.found["peer_8192"]["prefill_ms_per_layer_chunk"] / ours
        return found


def _machine(commit: str) -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    info = {key: str(value) for key, value in mx.device_info().items()}
    made = {"mlx": version("mlx"), "date": time.strftime("%Y-%m-%d"), "commit": commit}
    return {**info, "driver": driver, **made}


def _measure(
    model: Model, engram: EngramReader, results: _Results, contexts: tuple[int, ...]
) -> None:
    """Every context in turn: its last chunk, then steps after it."""
    ids = np.random.default_rng(0).integers(3, 100_000, max(contexts) + CHUNK).tolist()
    results.make("head_ms", lambda: _head_ms(model))
    session = Session(model, engram, prefill="full", chunk_tokens=CHUNK)
    for context in contexts:
        if context <= CHUNK:
            session.reset()
        names = f"prefill_{context}", f"decode_{context}"
        if all(name in results.found for name in names):
            continue
        mx.reset_peak_memory()
        if context <= CHUNK:
            # Kernels are checked at their first launch.
            _prefill(session, ids[:context], len(model.plans))
            session.reset()
        took = _prefill(session, ids[:context], len(model.plans))
        results.make(names[0], lambda made=took: made)
        results.make(
            names[1],
            lambda s=session, c=context: _decode(
                model, s, engram, ids[: c + CHUNK], c, results.found["head_ms"]
            ),
        )
        mx.clear_cache()


def _prefill(session: Session, ids: list[int], layers: int) -> dict[str, float]:
    """Bring the session to these tokens; what counts is the last chunk."""
    times: list[tuple[float, int]] = []
    for done in session.read(ids):
        times.append((time.perf_counter(), done))
    logits = session.sync(ids)  # which are there already
    assert mx.all(mx.isfinite(logits)).item() is True, "the model computes no numbers"
    # The last tokens pass the layers by themselves: the last chunk of the full size is meant.
    chunks = [pair for pair in pairwise(times) if pair[1][1] - pair[0][1] > 2]
    (before, done_before), (after, done) = chunks[-1]
    tokens, took = done - done_before, (after - before) / layers
    return {
        "chunk_tokens": tokens,
        "ms_per_layer_chunk": 1e3 * took,
        "tokens_per_s_40_layers": tokens / took / 40,
        "seconds": after - times[0][0],
        "peak_GB": mx.get_peak_memory() / 1e9,
    }


def _decode(
    model: Model, session: Session, engram: EngramReader, ids: list[int], context: int, head: float
) -> dict[str, float]:
    """Steps of known tokens, none waited for; then steps whose token is the one before's answer."""
    decoder, layers = CompiledDecoder(model, session.state), len(model.plans)
    done = context

    def known() -> float:
        nonlocal done
        reads = [_read(engram, ids, done + n) for n in range(STEPS)]
        mx.synchronize()
        start = time.perf_counter()
        for n, rows in enumerate(reads):
            logits = decoder.step(mx.array([ids[done + n]]), rows)
            mx.async_eval(mx.argmax(logits))
        mx.synchronize()
        done += STEPS
        return (time.perf_counter() - start) / STEPS

    def drawn() -> tuple[float, float]:
        nonlocal done
        waits: list[float] = []
        token = mx.array(ids[done])
        for n in range(WARM + STEPS):
            start = time.perf_counter()
            ids[done] = cast(int, token.item())
            rows = _read(engram, ids, done)
            token = mx.argmax(decoder.step(mx.array([ids[done]]), rows))
            mx.async_eval(token)
            done += 1
            if n >= WARM:
                waits.append(time.perf_counter() - start)
        return statistics.median(waits), statistics.mean(waits)

    for n in range(WARM):
        mx.eval(decoder.step(mx.array([ids[done + n]]), _read(engram, ids, done + n)))
    done += WARM
    step = 1e3 * statistics.median(known() for _ in range(REPEATS))
    median, _ = drawn()
    print(f"  {context}: {decoder.graphs} graphs, {step:.3f} ms a step", flush=True)
    return {
        "ms_per_layer": (step - head) / layers,
        "step_ms": step,
        "step_ms_sampled": 1e3 * median,
        "graphs": decoder.graphs,
        "peak_GB": mx.get_peak_memory() / 1e9,
    }


def _read(engram: EngramReader, ids: list[int], place: int) -> list[Rows]:
    history = np.array(ids[max(place - 8, 0) : place])
    rows = engram.prefetch(np.array([ids[place]]), history)
    return [rows.result(layer) for layer in engram.hash.layer_ids]


def _accuracy(model: Model, engram: EngramReader) -> dict[str, float]:
    """Relative errors of one step's logits: compiled against the session's, and against MLX's."""
    ids = np.random.default_rng(1).integers(3, 100_000, 513).tolist()
    session = Session(model, engram, prefill="full", chunk_tokens=CHUNK)
    session.sync(ids[:-1])

    def compiled() -> mx.array:
        decoder = CompiledDecoder(model, session.state)
        logits = decoder.step(mx.array(ids[-1:]), _read(engram, ids, len(ids) - 1))
        mx.eval(logits)
        return logits

    ours = compiled()
    mx.disable_compile()
    with launch.using(None):
        reference = compiled()
    mx.enable_compile()
    return {
        "step_against_reference": _distance(ours, reference),
        "compiled_against_session": _distance(ours, session.step(ids[-1])),
    }


def _distance(a: mx.array, b: mx.array) -> float:
    return cast(float, (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item())


def _seconds(run: Callable[[], Any]) -> float:
    """The median of a run's times, the first one apart."""
    times: list[float] = []
    for _ in range(REPEATS + 1):
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(run())
        mx.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _ceilings() -> dict[str, float]:
    """GB/s of a copy, read and written, and TFLOP/s of a bf16 product."""
    values = mx.random.randint(0, 1 << 30, (1 << 29,), dtype=mx.int32)
    square = mx.random.normal((8192, 8192)).astype(mx.bfloat16)
    mx.eval(values, square)
    return {
        "copy_GBps": 2 * values.nbytes / _seconds(lambda: values + 1) / 1e9,
        "bf16_TFLOPps": 2 * 8192**3 / _seconds(lambda: square @ square) / 1e12,
    }


def _head_ms(model: Model) -> float:
    """Collapse, norm, head and choice, back to back."""
    hc, D = model.config.hc_mult, model.config.hidden_size
    streams = mx.random.normal((1, hc, D)).astype(model.dtype)
    pre = mx.full((1, hc), 1 / hc)
    mx.eval(streams, pre)
    many = 20

    def heads() -> list[mx.array]:
        return [mx.argmax(model.head(streams, pre)) for _ in range(many)]

    return 1e3 * _seconds(heads) / many


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


if __name__ == "__main__":
    main()
