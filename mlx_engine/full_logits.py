"""Logits of a whole sequence at full depth, apart from any session."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.engram import EngramReader, read_ahead
from mlx_engine.memory import CHUNK_TOKENS
from mlx_engine.model import Model
from mlx_engine.state import SessionState
from mlx_engine.token_ids import TokenIds, as_token_ids


def full_logits(
    model: Model,
    engram: EngramReader | None,
    token_ids: Sequence[int] | TokenIds,
    wanted: NDArray[np.int64],
    chunk_tokens: int = CHUNK_TOKENS,
) -> NDArray[np.float32]:
    """Logits after the `wanted` tokens of a sequence at full depth.

    f32 [len(wanted), V].
    """
    ids = as_token_ids(token_ids)
    state = SessionState(model.config)
    result = np.empty((wanted.size, model.config.vocab_size), dtype=np.float32)
    for first in range(0, ids.size, chunk_tokens):
        last = min(first + chunk_tokens, ids.size)
        rows = read_ahead(engram, ids, first, last)
        streams, pre = model.decode(model.encode(ids[first:last].tolist(), state, rows), state)
        inside = np.flatnonzero((wanted >= first) & (wanted < last))
        mx.eval(*state.arrays())
        if inside.size:
            at = mx.array(wanted[inside] - first)
            result[inside] = np.array(model.head(streams[at], pre[at]))
    return result
