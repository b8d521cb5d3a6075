"""Chunk: where the tokens of one pass stand, and which rows its layers have chosen so far.

What a position decides is made here on the host; decoder.py has it among the inputs of a graph.
"""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_engine.config import ModelConfig
from mlx_engine.layer_plan import LayerPlan
from mlx_engine.ops.rope import Rotation, rotation


@dataclass
class Chunk:
    """What the layers of one pass share: its end, the rotations, the rows chosen so far."""

    config: ModelConfig
    end: int
    plain: Rotation
    compressed: Rotation
    selections: dict[int, mx.array] = field(default_factory=dict[int, mx.array])
    candidates: mx.array | None = None

    @classmethod
    def of(cls, config: ModelConfig, end: int, tokens: int) -> "Chunk":
        """The last `tokens` positions before `end`."""
        positions = np.arange(end - tokens, end)
        return cls(
            config,
            end,
            rotation(config, positions, is_compressed=False),
            rotation(config, positions, is_compressed=True),
        )

    def at(self, plan: LayerPlan, tokens: int) -> Rotation:
        """The rotation of a layer's last `tokens` positions."""
        return (self.compressed if plan.ratio else self.plain).last(tokens)

    def at_groups(self, first: int, groups: int, ratio: int) -> Rotation:
        """The rotation of a source's groups, each at the position of its first token."""
        positions = np.arange(first, first + groups) * ratio
        return rotation(self.config, positions, is_compressed=True)

    def visible(self, plan: LayerPlan, queries: int) -> mx.array:
        """How many compressed rows each of the last queries sees: those closed at its position."""
        ends = np.arange(self.end - queries, self.end, dtype=np.int32) + 1
        return mx.array(ends // plan.ratio)

    def start(self, *arrays: mx.array) -> None:
        """Let the device compute these while the host waits for something else."""
        mx.async_eval(*arrays)
