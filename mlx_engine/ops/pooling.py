"""Pooling of a compressor's groups in MLX's operations (section 3.5).

R is a layer's ratio: a group is that many tokens in a row. Norms and packing are in front.py.
"""

from typing import TypeAlias

import mlx.core as mx

# kv and gate of the first tokens of a group, from an earlier step: f32 [n, D] each.
Pending: TypeAlias = tuple[mx.array, mx.array] | None


def pool_groups(kv: mx.array, gate: mx.array, ratio: int, pending: Pending = None) -> mx.array:
    """Pool each full group of `ratio` rows, per channel, by the softmax of its gates.

    kv, gate: f32 [G * ratio - n, D], those of the first n tokens in `pending` -> f32 [G, D].
    """
    if pending is not None:
        kv, gate = mx.concatenate([pending[0], kv]), mx.concatenate([pending[1], gate])
    D = kv.shape[-1]
    share = mx.softmax(gate.reshape(-1, ratio, D), axis=1)
    return mx.sum(kv.reshape(-1, ratio, D) * share, axis=1)
