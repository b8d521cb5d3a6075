"""Decode and prefill of the model at the released widths on one NVIDIA GPU, beside mlx-lm.

    python -m bench.cuda [--layers 12] [--contexts 512,2048,8192,32768,131072] [--out FILE]

As many layers as fit, random weights, a small Engram table in a file. Every figure goes to FILE as
it is made, and what FILE holds already is not made again. The last line printed is that file's
JSON. The peer runs on the same packed expert arrays.

decode_N: steps of known tokens on the session's state, whose Engram rows were read before, none
waited for; and whole steps of a session that draws the next token, with all reads, with and without
the next step begun before its id is read. Where enqueue_ms, until the last known step is handed
over, is near step_ms, the GPU waits for the host.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np

from bench import cuda_model, cuda_table
from bench.cuda_accuracy import accuracy
from bench.cuda_float64 import operations
from bench.cuda_table import Counting
from mlx_engine.config import ModelConfig
from mlx_engine.cuda.kernels import CudaKernels
from mlx_engine.decoder import Decoder
from mlx_engine.engram import EngramReader, EngramRows
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.sampling import Sampler, Sampling
from mlx_engine.session import Session

CHUNK = 2048
# Steps before those that count (forms to trace), and those.
WARM, STEPS = 6, 24
REPEATS = 5
WARMED_CONTEXT = 8192
SHORT_CONTEXTS = (8192, 32768)
PROFILED_CONTEXT = 8192
# What should be at least (1) or at most (-1) what.
GOALS = {"decode_ratio": (1, 12), "prefill_ratio_8k": (1, 6), "decode_128k_to_2k": (-1, 1.5)}


def main() -> None:
    """Run what is missing from the results and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--contexts", default="512,2048,8192,32768,131072")
    parser.add_argument("--peer", default="512,2048,8192,32768")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("bench/results/cuda.json"))
    given = parser.parse_args()
    results = _Results(given.out)
    results.make("machine", lambda: _machine(given.commit))
    results.make("start", _start)
    assert not results.found["start"]["off"], "kernels differ from their references"
    results.make("ceilings", _ceilings)
    config = cuda_model.small_config(given.layers)
    mx.random.seed(0)
    model = cuda_model.make_model(config)
    results.make("layers", lambda: given.layers)
    results.make("weights_GB", lambda: mx.get_active_memory() / 1e9)
    contexts, peers = _numbers(given.contexts), _numbers(given.peer)
    with TemporaryDirectory() as folder:
        engram = cuda_model.make_engram(config, Path(folder) / "table")
        # A kernel that fails raises here, and nothing stands in for it.
        with engram, launch.using(CudaKernels()):
            few = [context for context in contexts if not peers or context <= max(peers)]
            _measure(model, engram, results, few)
            results.make("accuracy", lambda: _accuracy(model, engram), is_long=True)
            results.make("float64", operations, is_long=True)
            if any(f"peer_{context}" not in results.found for context in peers):
                peer = import_module("bench.cuda_peer").Peer(model)
                # Its first run compiles.
                peer.measure(CHUNK, CHUNK)
                results.make("peer_head_ms", peer.head_ms)
                for context in peers:
                    results.make(f"peer_{context}", lambda c=context: peer.measure(c, CHUNK))
                del peer
                mx.clear_cache()
            _measure(model, engram, results, contexts)
            for context in SHORT_CONTEXTS:
                results.make(f"short_{context}", lambda c=context: _short(model, engram, c))
            copy_GBps = results.found["ceilings"]["copy_GBps"]
            tables = _Tables(model, engram)
            results.make("decode_table", lambda: tables.decode(copy_GBps), is_long=True)
            results.make("prefill_table", tables.prefill, is_long=True)
    found = results.with_ratios(config)
    print(json.dumps(found))
    sys.exit(
        any(sign * found.get(name, limit) < sign * limit for name, (sign, limit) in GOALS.items())
    )


class _Results:
    """Figures by name, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def make(self, name: str, measure: Callable[[], Any], *, is_long: bool = False) -> None:
        """Measure what is not there yet, and print it unless it is long."""
        started = time.perf_counter()
        if name not in self.found:
            self.found[name] = measure()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.found, indent=1) + "\n")
        shown = "" if is_long else self.found[name]
        print(f"{name:16s} {time.perf_counter() - started:5.1f} s  {shown}", flush=True)

    def with_ratios(self, config: ModelConfig) -> dict[str, Any]:
        """All figures, with how often the peer's time ours goes into, and shares of the ceilings.

        decode_ratio is the smallest over the contexts; the sampled one compares whole steps, ours
        with all reads of Engram rows, which the peer does not have.
        """
        ratios: dict[str, float] = {}
        sampled: dict[str, float] = {}
        for name, peer in self.found.items():
            context = name.removeprefix("peer_")
            if name != context and f"decode_{context}" in self.found:
                ours = self.found[f"decode_{context}"]["ms_per_layer"]
                ratios[context] = peer["decode_ms_per_layer"] / ours
                ours = self.found[f"decode_{context}"]["step_ms_sampled"]
                sampled[context] = peer["step_ms"] / ours
        found = dict(self.found)
        if ratios:
            found["decode_ratios"], found["sampled_ratios"] = ratios, sampled
            found["decode_ratio"] = min(ratios.values())
            found["sampled_ratio"] = min(sampled.values())
        if "decode_2048" in found and "decode_131072" in found:
            found["decode_128k_to_2k"] = (
                found["decode_131072"]["ms_per_layer"] / found["decode_2048"]["ms_per_layer"]
            )
        ceilings = found["ceilings"]
        if found.get("decode_table") and f"decode_{PROFILED_CONTEXT}" in found:
            moved_MB = sum(row.get("MB", 0) for row in found["decode_table"].values())
            step_ms = found[f"decode_{PROFILED_CONTEXT}"]["step_ms"]
            found["decode_share_of_copy"] = moved_MB / step_ms / ceilings["copy_GBps"]
        if found.get("prefill_table"):
            table = found["prefill_table"]
            ms = sum(row["ms"] for name, row in table.items() if name.startswith("moe_"))
            work = 6 * CHUNK * config.hidden_size * config.moe_intermediate_size
            work *= config.num_experts_per_tok * found["layers"]
            found["experts_share_of_matrix"] = work / ms / 1e9 / ceilings["bf16_TFLOPps"]
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


def _start() -> dict[str, Any]:
    """The self-tests of every kernel, with what they and MLX's operations beside them compile."""
    started = time.perf_counter()
    families = launch.start(CudaKernels())
    return {**families._asdict(), "seconds": time.perf_counter() - started}


def _measure(
    model: Model, engram: EngramReader, results: _Results, contexts: Sequence[int]
) -> None:
    """Every context in turn: its last chunk, then steps after it."""
    ids = _ids(max(contexts) + CHUNK)
    results.make("head_ms", lambda: _head_ms(model))
    decoder = Decoder(model)
    session = Session(model, engram, prefill="full", chunk_tokens=CHUNK, decoder=decoder)
    for context in contexts:
        names = f"prefill_{context}", f"decode_{context}"
        if all(name in results.found for name in names):
            continue
        mx.reset_peak_memory()
        if context <= WARMED_CONTEXT:
            # Kernels are compiled at their first launch, those that choose rows for more of them.
            session.reset()
            _prefill(session, ids[:context], len(model.plans))
            session.reset()
        took = _prefill(session, ids[:context], len(model.plans))
        results.make(names[0], lambda made=took: made)
        results.make(
            names[1],
            lambda c=context: _per_layer(
                _decode(decoder, session, engram, ids, c), results.found["head_ms"], model
            ),
        )
        mx.clear_cache()


def _ids(count: int) -> list[int]:
    return np.random.default_rng(0).integers(3, 100_000, count).tolist()


def _prefill(session: Session, ids: list[int], layers: int) -> dict[str, float]:
    """Bring the session to these tokens; what counts is the middle one of the last three chunks."""
    times: list[tuple[float, int]] = []
    for done in session.read(ids):
        times.append((time.perf_counter(), done))
    logits = session.sync(ids)  # which are there already
    assert mx.all(mx.isfinite(logits)).item() is True, "the model computes no numbers"
    # The last tokens pass the layers by themselves: the last chunk of the full size is meant.
    chunks = [pair for pair in pairwise(times) if pair[1][1] - pair[0][1] > 2]
    (_, done_before), (after, done) = chunks[-1]
    tokens = done - done_before
    took = statistics.median(end - start for (start, _), (end, _) in chunks[-3:]) / layers
    return {
        "chunk_tokens": tokens,
        "ms_per_layer_chunk": 1e3 * took,
        "tokens_per_s_40_layers": tokens / took / 40,
        "seconds": after - times[0][0],
        "peak_GB": mx.get_peak_memory() / 1e9,
    }


def _decode(
    decoder: Decoder, session: Session, engram: EngramReader, ids: list[int], context: int
) -> dict[str, Any]:
    """Steps that draw, then steps of known tokens after a copy of the state that they left."""
    drawn, alone = _drawn(session, ids[context]), _drawn(session, ids[context], begins=False)
    state, place = session.state.fork(session.state.checkpoint()), session.position
    steps, enqueued = list[float](), list[float]()
    for repeat in range(REPEATS + 1):
        reads = [_read(engram, ids, place + n) for n in range(STEPS)]
        mx.synchronize()
        start = time.perf_counter()
        for n, rows in enumerate(reads):
            mx.async_eval(mx.argmax(decoder.step(ids[place + n], state, rows)))
        handed_over = time.perf_counter()
        mx.synchronize()
        place += STEPS
        if repeat:  # the first traces
            steps.append(1e3 * (time.perf_counter() - start) / STEPS)
            enqueued.append(1e3 * (handed_over - start) / STEPS)
    # Others use the host, which only adds: the least disturbed repeat counts, as the peer's does.
    step = min(steps)
    return {
        "step_ms": step,
        "step_ms_all": steps,
        "enqueue_ms": min(enqueued),
        "step_ms_sampled": drawn,
        "step_ms_sampled_not_begun": alone,
        "bubble_ms": drawn - step,
        "traced": decoder.traced,
        "peak_GB": mx.get_peak_memory() / 1e9,
    }


def _per_layer(made: dict[str, Any], head_ms: float, model: Model) -> dict[str, Any]:
    """With the time of a layer first."""
    return {"ms_per_layer": (made["step_ms"] - head_ms) / len(model.plans), **made}


def _drawn(session: Session, token_id: int, *, begins: bool = True) -> float:
    """ms of a step whose token is drawn from the one before, as the engine makes it."""
    sampler, times = Sampler(Sampling(temperature=0)), list[float]()
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        token = sampler(session.step(token_id))
        mx.async_eval(token)
        if begins:
            session.begin_step(token)
        token_id = cast(int, token.item())
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARM:])


def _read(engram: EngramReader, ids: list[int], place: int) -> EngramRows:
    """A token's rows, which are there."""
    history = np.array(ids[max(place - 8, 0) : place])
    rows = engram.prefetch(np.array([ids[place]]), history)
    found = {layer: rows.result(layer) for layer in engram.hash.layer_ids}
    return cast(EngramRows, SimpleNamespace(result=found.__getitem__))


def _short(model: Model, engram: EngramReader, context: int) -> dict[str, float]:
    """Seconds of a prompt with the upper layers only where the answer depends on them, and full."""
    seconds: dict[str, float] = {}
    for prefill in ("short", "full", "short"):
        session = Session(model, engram, prefill=prefill, chunk_tokens=CHUNK)
        start = time.perf_counter()
        mx.eval(session.sync(_ids(context)))
        seconds[prefill] = time.perf_counter() - start
    return {
        "seconds": seconds["short"],
        "seconds_full": seconds["full"],
        "tokens_per_s": context / seconds["short"],
    }


class _Tables:
    """Tables by kernel, of a step at PROFILED_CONTEXT tokens and of a full chunk after a first."""

    def __init__(self, model: Model, engram: EngramReader) -> None:
        self._model, self._engram, self._ids = model, engram, _ids(PROFILED_CONTEXT + CHUNK)

    def decode(self, copy_GBps: float) -> dict[str, dict[str, float]] | None:
        """A pipelined step of known tokens, with what its kernels must move."""
        model, engram, config = self._model, self._engram, self._model.config
        session = Session(model, engram, prefill="full", chunk_tokens=CHUNK)
        session.sync(self._ids[:PROFILED_CONTEXT])
        counting = Counting(config.n_routed_experts, config.num_experts_per_tok)
        with launch.using(counting):
            mx.eval(session.fork(session.checkpoints[-1]).step(5))
        state, place, decoder = session.state, session.position, Decoder(model)

        def steps() -> None:
            nonlocal place
            for rows in [_read(engram, self._ids, place + n) for n in range(STEPS)]:
                mx.async_eval(decoder.step(self._ids[place], state, rows))
                place += 1
            mx.synchronize()

        steps()
        table = cuda_table.kernel_times(steps, STEPS)
        if table is not None:
            table = cuda_table.with_bytes(table, counting.n_bytes, copy_GBps)
            cuda_table.printed("a decode step", table)
        return table

    def prefill(self) -> dict[str, dict[str, float]] | None:
        """The second chunk of a prompt."""
        session = Session(self._model, self._engram, prefill="full", chunk_tokens=CHUNK)
        chunks = [self._ids[: n * CHUNK + 2] for n in (1, 2)]
        session.sync(chunks[0])
        table = cuda_table.kernel_times(lambda: mx.eval(session.sync(chunks[1])), 1)
        if table is not None:
            cuda_table.printed(f"a chunk of {CHUNK}", table)
        return table


def _accuracy(model: Model, engram: EngramReader) -> dict[str, Any]:
    """Of a step after so many tokens that rows are chosen at both ratios."""
    ids = _ids(CHUNK + 1)
    session = Session(model, engram, prefill="full", chunk_tokens=CHUNK)
    session.sync(ids[:-1])
    rows = _read(engram, ids, len(ids) - 1)
    return accuracy(model, session.state, ids[-1], rows, CudaKernels())


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
