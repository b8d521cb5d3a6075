"""A decode step of the model as a graph that MLX compiled, for bench/cuda.py and its test.

MLX's Python costs more than the GPU's work, so the step is traced once for a form and replayed.
All that a position decides is an input of the graph, and rows that grow are seen up to the next
multiple of `VIEW_ROWS`, so that a form lasts. The tracing stands in for what the model takes from
the host; the product's Session does not compile its steps.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias, cast
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.config import ModelConfig
from mlx_engine.engram import EngramRows, Rows
from mlx_engine.layer_plan import LayerPlan
from mlx_engine.model import Model
from mlx_engine.ops.front import Ring
from mlx_engine.ops.rope import Rotation, rope_frequencies
from mlx_engine.state import GrowingKeys, GrowingRows, SessionState, Window

VIEW_ROWS = 1024
_RATIOS = (1, 2)

# The token's embedding, numbers, integers and Engram rows; then the state.
Graph: TypeAlias = Callable[[list[mx.array], list[mx.array]], tuple[mx.array, list[mx.array]]]


class CompiledDecoder:
    """Decode steps after a session's state, of which it takes a copy; its windows are full."""

    def __init__(self, model: Model, state: SessionState) -> None:
        self._model = model
        self._state = _copy(state, list(state.arrays()))
        self._graphs: dict[Any, Graph] = {}

    @property
    def graphs(self) -> int:
        """How many forms were traced."""
        return len(self._graphs)

    def step(self, token: mx.array, rows: Sequence[Rows]) -> mx.array:
        """Append one token [1] with the rows of each Engram layer: f32 logits [V], not waited for.

        Nothing here waits for the GPU.
        """
        state = self._state
        for part in _growing(state):
            _reserve_one(part)
        inputs = [
            self._model.weights.embed[token],
            *_host_inputs(self._model.config, state.position),
            *(mx.array(part) for pair in rows for part in pair),
        ]
        arrays = list(state.arrays())
        form = self._form()
        if form not in self._graphs:
            # Of the state only the counts: its arrays come in.
            as_it_is = _copy(state, [mx.zeros((0, 0))] * len(arrays))

            def graph(inputs: list[mx.array], arrays: list[mx.array]) -> Any:
                return _traced(self._model, as_it_is, inputs, arrays)

            # Kernels are checked at their first launch, which a trace cannot do.
            mx.eval(graph(inputs, arrays))
            self._graphs[form] = cast(Graph, mx.compile(graph))
        logits, arrays = self._graphs[form](inputs, arrays)
        self._advance(arrays)
        return logits

    def _form(self) -> Any:
        """What the trace depends on besides its inputs."""
        config, after = self._model.config, self._state.position + 1
        lengths = [after // config.compress_ratios[s] for s in self._state.compressed]
        block, blocks = config.candidate_block_size, config.candidate_topk_blocks
        return (
            after % max(_RATIOS),
            *(_seen(n) for n in lengths),
            *(n > config.index_topk for n in lengths),
            *(-(-n // block) > blocks for n in lengths),
            *(part.buffer.shape[0] for part in _growing(self._state)),
        )

    def _advance(self, arrays: list[mx.array]) -> None:
        state = self._state
        state.position += 1
        self._state = _copy(state, arrays)
        for window in self._state.windows:
            window.end += 1
        for source in state.compressed:
            closed = state.position // self._model.config.compress_ratios[source]
            keys = self._state.index_keys[source]
            for part in (self._state.compressed[source], keys.codes, keys.scales):
                part.length = closed


class _Window(Window):
    """A window whose next slot is an array."""

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
        self.buffer = mx.slice_update(self.buffer, new, self._end, axes=[0])
        self.length += new.shape[0]

    def view(self) -> mx.array:
        return self.buffer[: _seen(self.length)]


def _traced(
    model: Model, state: SessionState, inputs: list[mx.array], arrays: list[mx.array]
) -> tuple[mx.array, list[mx.array]]:
    """The model's own pass over one token on inputs of a graph: logits [V], and the new state."""
    config, position = model.config, state.position
    embedding, numbers, integers, *memory = inputs
    plain, compressed, group = (
        Rotation(*(part.reshape(1, -1, 2) for part in mx.split(turn, 2)))
        for turn in mx.split(numbers, 3)
    )
    slot = integers[:1].reshape(())
    visible = {ratio: integers[i : i + 1] for i, ratio in enumerate(_RATIOS, 1)}
    ends = {ratio: integers[i : i + 1] for i, ratio in enumerate(_RATIOS, 1 + len(_RATIOS))}

    def turns(_: ModelConfig, positions: NDArray[np.int64], *, is_compressed: bool) -> Rotation:
        if not is_compressed:
            return plain
        return compressed if positions[0] == position else group

    def sees(_: Any, plan: LayerPlan, queries: int) -> mx.array:
        return visible[plan.ratio]

    given = _copy(state, arrays)
    given.windows = list[Window](_Window(window, slot) for window in given.windows)
    for source, rows in given.compressed.items():
        end, keys = ends[config.compress_ratios[source]], given.index_keys[source]
        given.compressed[source] = _Rows(rows, end)
        keys.codes, keys.scales = _Rows(keys.codes, end), _Rows(keys.scales, end)
    layers = config.engram.layer_ids if config.engram else ()
    pairs = dict(zip(layers, zip(memory[::2], memory[1::2], strict=True), strict=True))
    engram_rows = cast(EngramRows, SimpleNamespace(result=pairs.get))
    embedded = Model(config, replace(model.weights, embed=embedding), model.dtype)
    with (
        patch("mlx_engine.model.rotation", turns),
        patch("mlx_engine.model._Chunk.visible", sees),
        patch.object(mx, "async_eval"),
    ):
        logits = embedded.forward([0], given, engram_rows)
    return logits[0], list(given.arrays())


def _host_inputs(config: ModelConfig, position: int) -> tuple[mx.array, mx.array]:
    """What one position decides: rotations f32, and places and counts int32."""
    group = position // 2 * 2
    turns = [(position, config.rope_theta, None)]
    turns += [(at, config.compress_rope_theta, config.yarn) for at in (position, group)]
    numbers: list[NDArray[np.float32]] = []
    for at, theta, yarn in turns:
        angles = np.float32(at) * rope_frequencies(config.qk_rope_head_dim, theta, yarn)
        cos, sin = np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)
        both = np.stack([cos, cos], axis=-1), np.stack([-sin, sin], axis=-1)
        numbers.append(np.concatenate(both).reshape(-1).astype(np.float32))
    integers = [
        position % config.sliding_window,
        *((position + 1) // ratio for ratio in _RATIOS),
        *(position // ratio for ratio in _RATIOS),
    ]
    return mx.array(np.concatenate(numbers)), mx.array(np.array(integers, np.int32))


def _seen(length: int) -> int:
    return -(-length // VIEW_ROWS) * VIEW_ROWS


def _reserve_one(rows: GrowingRows) -> None:
    """Make room for the next row, and for as many as a view shows."""
    capacity, needed = rows.buffer.shape[0], _seen(rows.length + 1)
    if needed > capacity:
        rows.buffer = mx.pad(rows.buffer, [(0, needed + VIEW_ROWS - capacity), (0, 0)])


def _growing(state: SessionState) -> list[GrowingRows]:
    keys = [part for k in state.index_keys.values() for part in (k.codes, k.scales)]
    return [*state.compressed.values(), *keys]


def _copy(state: SessionState, arrays: Sequence[mx.array]) -> SessionState:
    """The same state of other arrays, in the order of `SessionState.arrays`."""
    left = iter(arrays)
    made = copy(state)
    made.windows = [copy(window) for window in state.windows]
    made.compressed = {source: copy(rows) for source, rows in state.compressed.items()}
    made.index_keys = {source: _copied(keys) for source, keys in state.index_keys.items()}
    made.pending = {source: copy(group) for source, group in state.pending.items()}
    for window in made.windows:
        window.rows = next(left)
    for rows in made.compressed.values():
        rows.buffer = next(left)
    for keys in made.index_keys.values():
        keys.codes.buffer, keys.scales.buffer = next(left), next(left)
    for group in made.pending.values():
        group.kv, group.gate = next(left), next(left)
    return made


def _copied(keys: GrowingKeys) -> GrowingKeys:
    made = copy(keys)
    made.codes, made.scales = copy(keys.codes), copy(keys.scales)
    return made
