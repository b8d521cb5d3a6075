"""The engine's model beside the float64 reference: built from a configuration, run, compared.

Owns small models on random checkpoints, runs in any chunking that record every discrete choice and
every cached row, and their comparison with a reference trace. Knows no expected numbers.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import mlx_engine.model
from mlx_engine.checkpoint import Checkpoint, open_checkpoint
from mlx_engine.devices import ONE, Devices
from mlx_engine.engram import EngramHash, EngramReader, EngramRows
from mlx_engine.formats import CacheFormats
from mlx_engine.layer_plan import LayerPlan
from mlx_engine.model import Model
from mlx_engine.ops.attention import SelectedRows, WindowRows
from mlx_engine.ops.indexer import IndexQueries
from mlx_engine.ops.mhc import Mixing
from mlx_engine.ops.router import Routing
from mlx_engine.state import SessionState
from tests.checkpoints import write_checkpoint
from tests.reference import engram
from tests.reference.forward import Reference, Trace
from tests.reference.random_tensors import TINY_CONFIG, random_tensors
from tests.unrounded import UNROUNDED

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


class Mismatch(AssertionError):
    """The model and the reference disagree."""


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The tiny configuration of section 9 with some keys changed.

    The table sizes follow from the other Engram keys, so they are set here.
    """
    text = {**TINY_CONFIG["text_config"], **changes}
    primes = engram.primes(
        text["engram_layer_ids"],
        text["engram_vocab_size"],
        text["engram_max_ngram_size"],
        text["engram_n_heads"],
    )
    text["engram_num_embeddings"] = [int(sizes.sum()) for sizes in primes.values()]
    return {**TINY_CONFIG, "text_config": text}


@dataclass
class Run:
    """What the model did with T tokens, laid out as the reference's Trace.

    S is the number of compressed rows of the layer's source after all T tokens.
    """

    logits: Floats
    # by layer: experts [T, E]; the compressed rows that attention reads [T, S]; window KV [T, D]
    experts: dict[int, Bools] = field(default_factory=dict[int, Bools])
    rows: dict[int, Bools] = field(default_factory=dict[int, Bools])
    windows: dict[int, Floats] = field(default_factory=dict[int, Floats])
    # the visible rows of the candidate blocks [T, S], None where there is no candidate source
    candidates: Bools | None = None
    # by source
    compressed: dict[int, Floats] = field(default_factory=dict[int, Floats])
    index_keys: dict[int, Floats] = field(default_factory=dict[int, Floats])


class Subject:
    """One checkpoint as the engine's model, in float32, and as the reference."""

    def __init__(
        self,
        raw: dict[str, Any],
        tensors: Mapping[str, NDArray[Any]],
        model: Model,
        reader: EngramReader | None,
    ) -> None:
        self.raw, self.tensors, self.model, self.reader = raw, tensors, model, reader
        self.config = model.config
        self._traces: dict[tuple[tuple[int, ...], bool], Trace] = {}

    def close(self) -> None:
        """Close the table files."""
        if self.reader is not None:
            self.reader.close()

    def reference(self, *, is_rounded: bool = True) -> Reference:
        """The same checkpoint as the reference reads it, with the cache roundings or without."""
        text = self.raw["text_config"]
        # The reference has no number for "no candidate source".
        if text["candidate_source_layer_id"] < 0:
            text = {**text, "candidate_source_layer_id": None}
        raw = {**self.raw, "text_config": text}
        return Reference(raw, self.tensors, _token_map(raw), round_cache=is_rounded)

    def trace(self, ids: Sequence[int], *, is_rounded: bool = True) -> Trace:
        """The reference's forward pass, computed once."""
        key = (tuple(ids), is_rounded)
        if key not in self._traces:
            self._traces[key] = self.reference(is_rounded=is_rounded).forward(ids)
        return self._traces[key]

    def state(self, *, is_rounded: bool = True) -> SessionState:
        """An empty state."""
        return SessionState(self.config, None if is_rounded else UNROUNDED)

    def engram_rows(self, ids: Sequence[int], first: int, last: int) -> EngramRows | None:
        """The Engram rows of the tokens from `first` up to `last` of a sequence."""
        if self.reader is None:
            return None
        past = max(first - self.reader.hash.history_tokens, 0)
        return self.reader.prefetch(
            np.array(ids[first:last], np.int64), np.array(ids[past:first], np.int64)
        )

    def run(
        self, ids: Sequence[int], chunks: Sequence[int] | None = None, *, is_rounded: bool = True
    ) -> Run:
        """Run the model at full depth in chunks of these sizes, by default in one piece."""
        chunks = chunks or [len(ids)]
        assert sum(chunks) == len(ids)
        state = self.state(is_rounded=is_rounded)
        logits: list[Floats] = []
        with _recorded(self, len(ids), state.formats) as run:
            first = 0
            for size in chunks:
                last = first + size
                chunk = ids[first:last]
                rows = self.engram_rows(ids, first, last)
                logits.append(np.array(self.model.forward(chunk, state, rows), np.float32))
                mx.eval(*state.arrays())
                first = last
        run.logits = np.concatenate(logits)
        config, formats = self.config, state.formats
        for source in config.kv_source_layer_ids:
            packed, keys = state.compressed[source].view(), state.index_keys[source]
            run.compressed[source] = np.array(formats.compressed.unpack(packed, config.head_dim))
            decoded = formats.index.decode(keys.codes.view(), keys.scales.view())
            run.index_keys[source] = np.array(decoded)
        return run


def load(raw: dict[str, Any], seed: int, devices: Devices = ONE) -> Subject:
    """The model of a configuration on the random checkpoint of a seed, or one device's part."""
    tensors = random_tensors(raw, seed)
    # The reader keeps its files open, so the directory may go as soon as all is loaded.
    with TemporaryDirectory() as directory:
        checkpoint = open_checkpoint(write_checkpoint(Path(directory), raw, tensors))
        weights = checkpoint.read_weights(devices=devices)
        model = Model(checkpoint.config, weights, mx.float32, devices)
        return Subject(raw, tensors, model, _reader(checkpoint, _token_map(raw), devices))


@lru_cache(maxsize=32)
def _load_once(raw_json: str, seed: int) -> Subject:
    return load(json.loads(raw_json), seed)


def build(raw: dict[str, Any], seed: int) -> Subject:
    """As `load`, once for all tests."""
    return _load_once(json.dumps(raw), seed)


def _token_map(raw: dict[str, Any]) -> NDArray[np.int32]:
    text = raw["text_config"]
    ids = np.arange(text["vocab_size"], dtype=np.int32)
    return ids % np.int32(text["engram_compressed_vocab_size"])


def _reader(
    checkpoint: Checkpoint, token_map: NDArray[np.int32], devices: Devices
) -> EngramReader | None:
    engram_config = checkpoint.config.engram
    if engram_config is None:
        return None
    engram_hash = EngramHash(token_map, engram_config, checkpoint.config.image_token_id)
    return EngramReader(
        engram_hash,
        checkpoint.engram_tables(),
        cache_bytes=1 << 14,
        n_readers=2,
        devices=devices,
    )


# Recording


@contextmanager
def _recorded(subject: Subject, T: int, formats: CacheFormats) -> Generator[Run]:
    """Watch the operations that the model calls; layers are told apart by their weights."""
    config, layers = subject.config, subject.model.weights.layers
    plans = subject.model.plans
    run = Run(np.empty(0, np.float32))
    by_gate = {id(w.ffn.gate_weight): layer for layer, w in enumerate(layers)}
    by_sink = {id(w.attn.attn_sink): layer for layer, w in enumerate(layers)}
    for plan in plans:
        run.experts[plan.layer] = np.zeros((T, config.n_routed_experts), np.bool_)
        run.windows[plan.layer] = np.zeros((T, config.head_dim), np.float32)
        if plan.ratio:
            run.rows[plan.layer] = np.zeros((T, T // plan.ratio), np.bool_)
        if plan.is_candidate_source:
            # Without a call every visible row is a candidate.
            run.candidates = visible_rows(plan, T)
    done = dict.fromkeys(by_gate.values(), 0)  # tokens that have passed the layer
    route: Callable[..., tuple[mx.array, mx.array, Mixing, Routing]] = mlx_engine.model.mhc_route
    attend: Callable[..., Any] = mlx_engine.model.sparse_attention
    choose: Callable[..., tuple[mx.array, mx.array | None]] = mlx_engine.model.choose_rows

    def watched_route(
        h: mx.array, *rest: Any, **options: Any
    ) -> tuple[mx.array, mx.array, Mixing, Routing]:
        streams, x, mixing, routing = route(h, *rest, **options)
        layer = by_gate[id(routing.router.weight)]
        at = slice(done[layer], done[layer] + h.shape[0])
        ids = np.array(routing.chosen()[0], np.int32)
        np.put_along_axis(run.experts[layer][at], ids, True, axis=-1)
        done[layer] = at.stop
        return streams, x, mixing, routing

    def watched_attention(
        q: mx.array,
        position: int,
        window: WindowRows,
        selected: SelectedRows | None,
        sinks: mx.array,
        **options: Any,
    ) -> Any:
        layer = by_sink[id(sinks)]
        at = slice(position, position + q.shape[0])
        if window.first_position is None:
            new = window.rows[position % window.rows.shape[0]][None]
        else:
            new = window.rows[position - window.first_position :]
        run.windows[layer][at] = np.array(formats.window.unpack(new, config.head_dim))
        if selected is not None:
            _mark(run.rows[layer][at], selected)
        return attend(q, position, window, selected, sinks, **options)

    def watched_choice(
        queries: IndexQueries, *rest: Any, **options: Any
    ) -> tuple[mx.array, mx.array | None]:
        rows, blocks = choose(queries, *rest, **options)
        if blocks is not None:
            assert run.candidates is not None
            # This chunk has not reached the layer's experts yet.
            first = done[config.candidate_source_layer_id]
            at = slice(first, first + queries.q.shape[0])
            S: int = run.candidates.shape[1]
            block_of_row = np.arange(S) // config.candidate_block_size
            listed = np.array(blocks, np.int32)
            run.candidates[at] &= (block_of_row[:, None] == listed[:, None]).any(axis=-1)
        return rows, blocks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlx_engine.model, "mhc_route", watched_route)
        patch.setattr(mlx_engine.model, "sparse_attention", watched_attention)
        patch.setattr(mlx_engine.model, "choose_rows", watched_choice)
        yield run


def visible_rows(plan: LayerPlan, T: int) -> Bools:
    """The rows that each of T queries sees: those closed at its position."""
    return np.arange(T // plan.ratio) < (np.arange(T)[:, None] + 1) // plan.ratio


def _mark(rows: Bools, selected: SelectedRows) -> None:
    """Set what each query attends to in rows [Q, S]."""
    if selected.ids is None:
        S = selected.rows.shape[0]
        rows[:, :S] = np.arange(S) < np.array(selected.visible)[:, None]
        return
    ids = np.array(selected.ids, np.int32)
    query, k = np.nonzero(ids >= 0)
    rows[query, ids[query, k]] = True


# Comparison


def compare_choices(subject: Subject, run: Run, trace: Trace) -> None:
    """Experts of every layer, rows that every layer attends to, candidates: equal as sets."""
    for layer, experts in run.experts.items():
        expected = np.zeros_like(experts)
        np.put_along_axis(expected, trace.experts[layer], True, axis=-1)
        _same(f"experts of layer {layer}", experts, expected)
    for plan in subject.model.plans:
        if plan.topk_source is not None:
            expected = trace.chosen[plan.topk_source]
            _same(f"rows of layer {plan.layer}", run.rows[plan.layer], expected)
        if plan.is_candidate_source:
            assert run.candidates is not None
            _same("candidates", run.candidates, trace.candidates[plan.layer])


def compare_cache(run: Run, trace: Trace) -> None:
    """Every cached value equal: no rounding code flipped."""
    for kind in ("windows", "compressed", "index_keys"):
        found, expected = getattr(run, kind), getattr(trace, kind)
        if found.keys() != expected.keys():
            raise Mismatch(f"{kind} of {sorted(found)}, expected of {sorted(expected)}")
        for layer, values in found.items():
            _same(f"{kind} of layer {layer}", values, expected[layer])


def compare_logits(run: Run, trace: Trace, tolerance: float) -> None:
    """No logit further from the reference's than `tolerance`."""
    error = float(np.abs(run.logits - trace.logits).max())
    if not error <= tolerance:
        raise Mismatch(f"logits differ by {error:.3g}, more than {tolerance:.3g}")


def _same(what: str, found: NDArray[Any], expected: NDArray[Any]) -> None:
    if found.shape != expected.shape:
        raise Mismatch(f"{what}: shape {found.shape}, expected {expected.shape}")
    differs = np.flatnonzero((found != expected).any(axis=-1))
    if differs.size:
        raise Mismatch(f"{what} differ at {differs.size} places, the first {differs[0]}")
