"""Devices: the ranks that hold one model together, and what they exchange while it computes.

Owns which part of a dimension is whose, and the sums and gathers over mx.distributed. Every rank
gets the same bits, since routing and sampling follow from them. Who starts the ranks and tells them
what to compute is not its part.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_engine.config import TILE, ModelConfig
from mlx_engine.errors import BadRequest

# Up to so many tokens each rank adds all parts itself: one hop, where MLX's all_sum takes two.
_FEW_TOKENS = 8
# Values of an array that go along with another, so that one exchange comes after the other.
_TIE = 8


@dataclass(frozen=True)
class Devices:
    """Rank `rank` of `count`; `group` is MLX's, None for a single device, which exchanges nothing.

    A share is one of `count` equal parts, in the order of the ranks.
    """

    rank: int = 0
    count: int = 1
    group: Any = None

    @classmethod
    def join(cls, backend: str) -> "Devices":
        """This process among those that MLX's environment names, over "ring", "nccl" or "jaccl".

        Returns when all are there. Raises RuntimeError as MLX does.
        """
        group = mx.distributed.init(strict=True, backend=backend)
        return cls(group.rank(), group.size(), group)

    def share(self, n: int) -> slice:
        """This rank's share of n things."""
        part = n // self.count
        assert part * self.count == n, f"{n} do not split into {self.count}"
        return slice(self.rank * part, (self.rank + 1) * part)

    def sum(self, x: mx.array, after: mx.array | None = None) -> mx.array:
        """The sum of every rank's x [T, ..], of one shape and dtype, rounded once.

        Few tokens are gathered and added in the order of the ranks. For more, MLX's all_sum makes
        every value in one place and copies it, or in the order of the ranks everywhere (JACCL's
        mesh); from three ranks on it is given f32, since it would round bf16 at every addition.
        `after`: what the exchange before gave, where x does not follow from it: on CUDA two that
        are independent could run at once, and their parts meet the wrong ones.
        """
        if self.count == 1:
            return x
        sent = x
        if after is not None:
            sent = mx.concatenate([x.reshape(-1), after.reshape(-1)[:_TIE].astype(x.dtype)])
        if x.shape[0] <= _FEW_TOKENS:
            total, *rest = mx.distributed.all_gather(sent[None], group=self.group)
            total = total.astype(mx.float32)
            for part in rest:
                total = total + part.astype(mx.float32)
        else:
            wide = sent if self.count == 2 else sent.astype(mx.float32)
            total = mx.distributed.all_sum(wide, group=self.group)
        if after is not None:
            total = total[: x.size].reshape(x.shape)
        return total.astype(x.dtype)

    def gather(self, x: mx.array) -> mx.array:
        """Every rank's x [T, n] side by side: [T, count * n]."""
        if self.count == 1:
            return x
        parts = mx.distributed.all_gather(x[None], group=self.group)  # [count, T, n]
        return parts.swapaxes(0, 1).reshape(x.shape[0], -1)

    def from_first(self, x: mx.array) -> mx.array:
        """Rank 0's x, bit for bit, where the others give one of the same shape and dtype."""
        if self.count == 1:
            return x
        bits = x.reshape(-1).view(mx.uint8)
        # Nothing is left of the others' bits, but what they follow from is exchanged before.
        sent = bits if self.rank == 0 else bits & 0
        return mx.distributed.all_sum(sent, group=self.group).view(x.dtype).reshape(x.shape)


ONE = Devices()


def fitting_counts(config: ModelConfig) -> list[int]:
    """How many devices can share this model: all that divide what is split, ascending."""
    parts = _split_parts(config)
    return [n for n in range(1, min(parts.values()) + 1) if not any(p % n for p in parts.values())]


def require_fitting(config: ModelConfig, count: int) -> None:
    """Raise BadRequest for a count of devices that does not divide the model."""
    counts = fitting_counts(config)
    if count not in counts:
        uneven = [f"{n:,} {what}" for what, n in _split_parts(config).items() if n % count]
        raise BadRequest(
            f"{count} devices cannot share this model ({', '.join(uneven)} do not split evenly): "
            f"use {', '.join(map(str, counts))}"
        )


def _split_parts(config: ModelConfig) -> dict[str, int]:
    """What is shared out whole: a device gets as many of each as another."""
    parts = {
        "attention heads": config.num_attention_heads,
        "output groups": config.o_groups,
        "tiles of the experts' width": config.moe_intermediate_size // TILE,
        "ids of the vocabulary": config.vocab_size,
        "values of an embedding": config.hidden_size,
    }
    if config.engram is not None:
        parts["Engram columns"] = config.engram.columns
    return parts
