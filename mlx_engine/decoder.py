"""Decoder: steps of one token as graphs that MLX compiled, for GPUs that would wait for Python.

A form of a step is traced once and replayed. What a position decides is an input of its graph, and
rows that grow are seen up to the next multiple of VIEW_ROWS, so that a form lasts. A step is two
graphs: what lies below the first Engram layer needs no table rows, so `begin` can hand it to the
device before the token's id is on the host, and make the other graph's nodes meanwhile. The state
stays the session's: its arrays go in, and what comes out takes their places.
"""

from collections.abc import Callable, Hashable, Iterator
from copy import copy
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import TypeAlias, cast

import mlx.core as mx

from mlx_engine.config import TILE, EngramConfig
from mlx_engine.cuda.host_slots import HostSlot, host_slots, padded
from mlx_engine.engram import EngramRows
from mlx_engine.model import Model
from mlx_engine.ops.front import Ring
from mlx_engine.state import GrowingRows, SessionState, Window
from mlx_engine.step_chunk import RATIOS, Places, StepChunk

VIEW_ROWS = 1024
# Forms that are kept: those of two lengths and both parities, below and above.
_KEPT_FORMS = 8
# Steps that may be under way, as far as their Engram rows go.
_SLOTS = 8

Arrays: TypeAlias = list[mx.array]
# What the host gives and the state's arrays; what the next graph takes or the logits, and the
# state's arrays.
Graph: TypeAlias = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]


@dataclass(frozen=True)
class Begun:
    """A step whose id was not known: after which arrays of the state, and what was made of it.

    `outputs` and `windows` are the lower graph's, under way. `upper` are the other's logits and
    arrays, once its form was compiled, with what `slot` will hold of table rows: nodes that only
    the thread whose `stream` this is can compute.
    """

    token: mx.array
    position: int
    given: Arrays
    outputs: Arrays
    windows: Arrays
    slot: HostSlot | None
    upper: Arrays
    stream: mx.Stream

    def is_of(self, token_id: int, state: SessionState) -> bool:
        """Whether this is the step of a state, as it is, with a token."""
        same = all(a is b for a, b in zip(self.given, state.arrays(), strict=True))
        return same and self.position == state.position and self.token.item() == token_id

    def let_go(self) -> None:
        """Keep no array of the state, which could not be written in place."""
        self.given.clear()
        self.upper.clear()


class Decoder:
    """Single steps of a model on the states of its sessions; `traced` counts the forms so far.

    `is_on` says whether sessions use it, by default on NVIDIA GPUs.
    """

    def __init__(self, model: Model, *, is_on: bool | None = None) -> None:
        on_cuda = mx.default_device() == mx.gpu and mx.cuda.is_available()
        self.is_on = on_cuda if is_on is None else is_on
        self.traced = 0
        self._model = model
        self._graphs: dict[Hashable, Graph] = {}
        self._places = Places(model.config)
        self._slots: Iterator[HostSlot] | None = None
        engram, sources = model.config.engram, model.config.kv_source_layer_ids
        first = engram.layer_ids[0] if engram else 0
        # Rows that grow are written in place, which a step that does not come would not undo.
        self._lower = first if first <= min(sources) else 0
        if self.is_on and engram is not None:
            columns = engram.columns // model.devices.count
            n_bytes = sum(padded(columns * width) for width in _widths(engram))
            self._slots = cycle(host_slots(n_bytes * len(engram.layer_ids), _SLOTS))

    def fits(self, state: SessionState) -> bool:
        """Whether this makes the state's next step: with windows that are full."""
        at = state.position
        return self.is_on and all(window.ring(at, 1) is not None for window in state.windows)

    def begin(self, token: mx.array, state: SessionState) -> Begun | None:
        """Hand the part of the next step to the device that needs the token, of one id, only there.

        `step` goes on from it if its id is that one. None where there is no such part.
        """
        if self._lower == 0 or not self.fits(state):
            return None
        outputs, windows = self._run_lower(token, state)
        mx.async_eval(*outputs, *windows)
        slot = self._next_slot()
        self._reserve(state)
        # The first step of a form computes while it is made, and the rows are not there yet.
        is_known = self._form(state) in self._graphs
        upper = self._run_upper(outputs, slot, state) if is_known else []
        given, stream = _arrays(state), _stream()
        return Begun(token, state.position, given, outputs, windows, slot, upper, stream)

    def step(
        self,
        token_id: int,
        state: SessionState,
        rows: EngramRows | None,
        begun: Begun | None = None,
    ) -> mx.array:
        """Append a token, with the rows of its Engram layers: f32 logits [V], under way."""
        upper: Arrays = []
        if begun is not None and begun.is_of(token_id, state):
            outputs, windows, slot = begun.outputs, begun.windows, begun.slot
            if begun.stream == _stream():
                upper = begun.upper.copy()
        else:
            outputs, windows = self._run_lower(mx.array([token_id], mx.uint32), state)
            slot = self._next_slot()
        if begun is not None:
            begun.let_go()
        self._write(rows, slot)
        if not upper:
            self._reserve(state)
            upper = self._run_upper(outputs, slot, state)
        logits, *arrays = upper
        # From here on nobody else holds the rows that grow, so they are written in place.
        _put(state, [*windows, *arrays])
        _advance(state)
        del arrays, upper
        mx.async_eval(logits, *state.arrays())
        if slot is not None:
            slot.reader = logits
        return logits

    def _next_slot(self) -> HostSlot | None:
        return None if self._slots is None else next(self._slots)

    def _write(self, rows: EngramRows | None, slot: HostSlot | None) -> None:
        """Wait for the rows of all Engram layers: codes and scales of each."""
        engram = self._model.config.engram
        if engram is not None:
            assert rows is not None and slot is not None
            slot.write([part for layer in engram.layer_ids for part in rows.result(layer)])

    def _reserve(self, state: SessionState) -> None:
        """Make room for what the next step sees of rows that grow, whether it comes or not."""
        for source, keys in state.index_keys.items():
            seen = _seen((state.position + 1) // state.ratios[source])
            for part in (state.compressed[source], keys.codes, keys.scales):
                if part.buffer.shape[0] < seen:
                    part.reserve(seen)
                    # What waits for the thread that made it cannot be computed by another.
                    mx.async_eval(part.buffer)

    def _run_lower(self, token: mx.array, state: SessionState) -> tuple[Arrays, Arrays]:
        """What the layers below the first Engram layer make of a token, and their windows."""
        graph = self._graph("lower", self._lower_graph, state)
        inputs = [token.reshape(1), self._places.at(state.position)]
        return graph(inputs, _arrays(state)[: self._lower])

    def _run_upper(self, outputs: Arrays, slot: HostSlot | None, state: SessionState) -> Arrays:
        """The logits [V] after the other layers, and the arrays of the state from their own on."""
        graph = self._graph(self._form(state), self._upper_graph, state)
        memory = [] if slot is None else [slot.array]
        inputs = [*outputs, self._places.at(state.position), *memory]
        logits, arrays = graph(inputs, _arrays(state)[self._lower :])
        return [*logits, *arrays]

    def _graph(
        self, form: Hashable, make: Callable[[SessionState], Graph], state: SessionState
    ) -> Graph:
        """The graph of a form. The first step of one runs as it is.

        Kernels are checked at their first launch, which a trace cannot do.
        """
        if form in self._graphs:
            # The one that was used last goes last.
            self._graphs[form] = self._graphs.pop(form)
            return self._graphs[form]
        self.traced += 1
        if len(self._graphs) == _KEPT_FORMS:
            del self._graphs[next(iter(self._graphs))]
        graph = make(state)
        self._graphs[form] = mx.compile(graph)
        return graph

    def _form(self, state: SessionState) -> Hashable:
        """What the upper trace depends on besides its inputs."""
        config, after = self._model.config, state.position + 1
        lengths = [after // state.ratios[source] for source in state.compressed]
        block, blocks = config.candidate_block_size, config.candidate_topk_blocks
        return (
            after % max(RATIOS),
            *(_seen(n) for n in lengths),
            *(n > config.index_topk for n in lengths),
            *(-(-n // block) > blocks for n in lengths),
            *(rows.buffer.shape[0] for rows in state.compressed.values()),
        )

    def _lower_graph(self, state: SessionState) -> Graph:
        model, lower, counts = self._model, self._lower, _counts(state)

        def graph(inputs: Arrays, windows: Arrays) -> tuple[Arrays, Arrays]:
            token, place = inputs
            chunk = StepChunk(model.config, counts.position + 1, place)
            given = _given(counts, chunk, windows)
            streams, pre = model.embedded(mx.broadcast_to(token, (1, model.config.hc_mult)))
            for layer in range(lower):
                output = model.block(
                    layer, model.enter(layer, streams, pre, chunk, None), 1, chunk, given
                )
                streams, pre = output.written(), output.mixing.pre
            return [streams, pre], _arrays(given)[:lower]

        return graph

    def _upper_graph(self, state: SessionState) -> Graph:
        model, lower, counts = self._model, self._lower, _counts(state)
        top = model.config.num_hidden_layers - 1

        def graph(inputs: Arrays, arrays: Arrays) -> tuple[Arrays, Arrays]:
            streams, pre, place, *memory = inputs
            chunk = StepChunk(model.config, counts.position + 1, place)
            given = _given(counts, chunk, arrays, lower)
            rows = _unpacked(memory, model)
            entered = model.enter(lower, streams, pre, chunk, rows)
            for layer in range(lower, top + 1):
                model.publish(layer, entered.x, chunk, given)
                output = model.block(layer, entered, 1, chunk, given)
                if layer < top:
                    entered = model.between(output, layer + 1, chunk, rows)
                else:
                    streams, pre = output.written(), output.mixing.pre
            return [model.head(streams, pre).reshape(-1)], _arrays(given)[lower:]

        return graph


class _Window(Window):
    """A full window whose next slot is an array."""

    def __init__(self, like: Window, slot: mx.array) -> None:
        self.rows, self.end, self.count = like.rows, like.end, like.count
        self._slot = slot

    def ring(self, first_position: int, N: int) -> Ring | None:
        ring = super().ring(first_position, N)
        assert ring is not None, "the windows are full"
        return Ring(ring.rows, self._slot)


class _Rows(GrowingRows):
    """Rows whose end is an array; there is room for one more."""

    def __init__(self, like: GrowingRows, end: mx.array) -> None:
        self.buffer, self.length = like.buffer, like.length
        self._end = end

    def append(self, new: mx.array) -> None:
        # Of MLX's ways to write at a place that is an array, the one that costs a single launch.
        at = mx.broadcast_to(self._end, new.shape)
        self.buffer = mx.put_along_axis(self.buffer, at, new, axis=0)
        self.length += 1

    def view(self) -> mx.array:
        return self.buffer[: _seen(self.length)]


def _counts(state: SessionState) -> SessionState:
    """A copy without the arrays, which would stay in memory with the graph."""
    made = _copied(state)
    _put(made, [mx.zeros((0, 0))] * len(_places(made)))
    return made


def _given(counts: SessionState, chunk: StepChunk, arrays: Arrays, first: int = 0) -> SessionState:
    """The state as a graph sees it, with its arrays from the `first` on."""
    given = _copied(counts)
    given.windows = list[Window](_Window(window, chunk.slot) for window in given.windows)
    for source, keys in given.index_keys.items():
        end = chunk.ends[given.ratios[source]]
        given.compressed[source] = _Rows(given.compressed[source], end)
        keys.codes, keys.scales = _Rows(keys.codes, end), _Rows(keys.scales, end)
    _put(given, arrays, first)
    return given


def _copied(state: SessionState) -> SessionState:
    """A state of its own that refers to the same arrays."""
    made = copy(state)
    made.windows = [copy(window) for window in state.windows]
    made.compressed = {source: copy(rows) for source, rows in state.compressed.items()}
    made.index_keys = {source: copy(keys) for source, keys in state.index_keys.items()}
    for keys in made.index_keys.values():
        keys.codes, keys.scales = copy(keys.codes), copy(keys.scales)
    made.pending = {source: copy(group) for source, group in state.pending.items()}
    return made


def _arrays(state: SessionState) -> Arrays:
    return list(state.arrays())


def _places(state: SessionState) -> list[tuple[object, str]]:
    """Where a state keeps its arrays, in the order of `SessionState.arrays`."""
    keys = [part for each in state.index_keys.values() for part in (each.codes, each.scales)]
    growing = [*state.compressed.values(), *keys]
    return [
        *((window, "rows") for window in state.windows),
        *((rows, "buffer") for rows in growing),
        *((group, name) for group in state.pending.values() for name in ("kv", "gate")),
    ]


def _put(state: SessionState, arrays: Arrays, first: int = 0) -> None:
    for (owner, name), array in zip(_places(state)[first:], arrays, strict=False):
        setattr(owner, name, array)


def _advance(state: SessionState) -> None:
    """Count the token whose rows the arrays have."""
    state.position += 1
    for window in state.windows:
        window.end, window.count = state.position, window.rows.shape[0]
    for source, keys in state.index_keys.items():
        for part in (state.compressed[source], keys.codes, keys.scales):
            part.length = state.position // state.ratios[source]


def _stream() -> mx.Stream:
    """Where what this thread makes is computed: no two threads have the same."""
    return mx.default_stream(mx.default_device())


def _seen(length: int) -> int:
    return -(-length // VIEW_ROWS) * VIEW_ROWS


def _unpacked(memory: Arrays, model: Model) -> EngramRows | None:
    config = model.config
    if config.engram is None:
        return None
    columns, first = config.engram.columns // model.devices.count, 0
    pairs: dict[int, list[mx.array]] = {}
    for layer in config.engram.layer_ids:
        pairs[layer] = []
        for width in _widths(config.engram):
            part = memory[0][first : first + columns * width]
            pairs[layer].append(part.reshape(1, columns, width))
            first += padded(columns * width)
    return cast(EngramRows, SimpleNamespace(result=pairs.__getitem__))


def _widths(engram: EngramConfig) -> tuple[int, int]:
    """Bytes of a row's codes and scales."""
    return engram.head_dim, engram.head_dim // TILE
