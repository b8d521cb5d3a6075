"""Arrays in tests: to MLX and back, small random ones, those of a model, comparison."""

from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.ops.router import Router, Routing

Float = NDArray[np.float64]
INF = float("inf")


def f32(x: Any) -> mx.array:
    """An f32 array of anything that numpy reads."""
    return mx.array(np.asarray(x, np.float32))


def host(x: mx.array) -> NDArray[np.float32]:
    """The values in numpy; bf16 is widened."""
    return np.array(x.astype(mx.float32), np.float32)


def normal(seed: int, *shape: int) -> Float:
    """Random values that f32 holds."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(np.float32).astype(np.float64)


def close(found: mx.array, expected: NDArray[Any], relative: float = 2e-6) -> None:
    """Within a few roundings of the largest expected value."""
    bound = relative * max(float(np.abs(expected).max()), 1e-30)
    np.testing.assert_allclose(host(found), expected, rtol=0, atol=bound)


def routing(ids: NDArray[Any], weights: NDArray[Any], E: int) -> Routing:
    """Scores of E experts by which just `ids` [T, k] are chosen, with just these weights."""
    scores = np.full((len(ids), E), -1e9)
    np.put_along_axis(scores, ids, weights, axis=1)
    nothing = mx.zeros((E,))
    return Routing(f32(scores), Router(nothing, nothing, ids.shape[1], 1.0, False, 1.0))


def arrays_of(*nodes: object) -> Iterator[mx.array]:
    """Every array in or below these nodes of the weights."""
    for node in nodes:
        if isinstance(node, mx.array):
            yield node
        elif isinstance(node, tuple):
            yield from arrays_of(*cast("tuple[object, ...]", node))
        elif node is not None:
            yield from arrays_of(*vars(node).values())
