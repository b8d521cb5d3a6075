"""StepChunk: the chunk of one token, from an array, so that a step's graph lasts for any position.

`Places` makes those arrays for many positions at once: what the host has just written a GPU would
wait for in every step. Decoder.py has the graphs.
"""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.chunk import Chunk
from mlx_engine.config import ModelConfig
from mlx_engine.layer_plan import LayerPlan
from mlx_engine.ops.rope import Rotation, rope_frequencies

RATIOS = (1, 2)
# Positions of a table, and how many tables are kept.
_POSITIONS, _TABLES = 128, 8


class StepChunk(Chunk):
    """A single token's chunk, of what `Places` has of its position."""

    def __init__(self, config: ModelConfig, end: int, place: mx.array) -> None:
        R, counts = config.qk_rope_head_dim, len(RATIOS)
        turns, integers = place[: 6 * R].view(mx.float32), place[6 * R :].view(mx.int32)
        plain, compressed, self._group = (
            Rotation(*(turns[first + i : first + i + R].reshape(1, -1, 2) for i in (0, R)))
            for first in range(0, 6 * R, 2 * R)
        )
        super().__init__(config, end, plain, compressed)
        self.slot = integers[:1].reshape(())
        self._visible = {ratio: integers[1 + i :][:1] for i, ratio in enumerate(RATIOS)}
        self.ends = {ratio: integers[1 + counts + i :][:1] for i, ratio in enumerate(RATIOS)}

    def at_groups(self, first: int, groups: int, ratio: int) -> Rotation:
        return self._group if ratio > 1 else self.compressed

    def visible(self, plan: LayerPlan, queries: int) -> mx.array:
        return self._visible[plan.ratio]

    def start(self, *arrays: mx.array) -> None:
        """Nothing is computed while a graph is traced."""


class Places:
    """What positions decide, in tables on the device."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tables: dict[int, mx.array] = {}

    def at(self, position: int) -> mx.array:
        """A position's words: uint32."""
        table, row = divmod(position, _POSITIONS)
        if table not in self._tables:
            if len(self._tables) == _TABLES:
                del self._tables[next(iter(self._tables))]
            positions = np.arange(table * _POSITIONS, (table + 1) * _POSITIONS)
            self._tables[table] = mx.array(_words(self._config, positions))
        # A slice is a view, a row by its number would be a launch.
        return self._tables[table][row : row + 1].reshape(-1)


def _words(config: ModelConfig, positions: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Of each position a row: rotations f32, then slot, counts and ends int32.

    Rows are padded, so that kernels may load four words.
    """
    turns = [(positions, config.rope_theta, None)]
    turns += [
        (at, config.compress_rope_theta, config.yarn) for at in (positions, positions // 2 * 2)
    ]
    numbers: list[NDArray[np.float64]] = []
    for at, theta, yarn in turns:
        frequencies = rope_frequencies(config.qk_rope_head_dim, theta, yarn)
        angles = at.astype(np.float32)[:, None] * frequencies
        cos, sin = np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)
        numbers += [np.stack(pair, axis=-1) for pair in ((cos, cos), (-sin, sin))]
    turned = np.concatenate([n.reshape(positions.size, -1) for n in numbers], axis=1)
    integers = [
        positions % config.sliding_window,
        *((positions + 1) // ratio for ratio in RATIOS),
        *(positions // ratio for ratio in RATIOS),
    ]
    words = [turned.astype(np.float32).view(np.uint32), np.stack(integers, 1).astype(np.uint32)]
    rows = np.concatenate(words, axis=1)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4)))
