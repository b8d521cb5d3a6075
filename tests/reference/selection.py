"""Choosing the k best: experts, compressed rows, candidate blocks (spec 3.6 and 3.7)."""

import math

import numpy as np
from numpy.typing import NDArray

from tests.reference.formats import Float


def top_k(scores: Float, k: int) -> tuple[NDArray[np.bool_], float]:
    """Mask of the k best scores > -inf of each row [T, N], ties to the lowest index; its margin."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    chosen = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(chosen, order[:, :k], True, axis=-1)
    chosen &= scores > -np.inf
    if not 0 < k < scores.shape[1]:
        return chosen, math.inf
    last, refused = np.take_along_axis(scores, order[:, k - 1 : k + 1], axis=-1).T
    # Exact ties come from equal products of few-bit values: ties in any arithmetic, no close call.
    close = np.isfinite(last) & np.isfinite(refused) & (last != refused)
    gap = last[close] - refused[close]
    largest = np.abs(np.where(np.isfinite(scores), scores, 0)).max(axis=-1)[close]
    return chosen, float(np.min(gap / largest, initial=math.inf))


def listed(chosen: NDArray[np.bool_], k: int) -> NDArray[np.int64]:
    """Columns set in each row of a mask [T, N], at most k -> [T, k], ascending, -1 at the end."""
    out = np.full((len(chosen), k), -1)
    for t, row in enumerate(chosen):
        found = np.flatnonzero(row)
        out[t, : len(found)] = found
    return out
