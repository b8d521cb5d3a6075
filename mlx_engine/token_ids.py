"""Sequences of token ids: as numpy has them, compared, and checked where a request brings them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_engine.config import ModelConfig
from mlx_engine.errors import BadRequest, ContextTooLong

TokenIds = NDArray[np.uint32]


def as_token_ids(token_ids: Sequence[int] | TokenIds) -> TokenIds:
    """Token ids [T] as numpy has them; no copy of what is so already."""
    return np.asarray(token_ids, dtype=np.uint32)


def shared_tokens(a: TokenIds, b: TokenIds) -> int:
    """How many tokens two sequences have in common from the start."""
    n = min(a.size, b.size)
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


def check_tokens(
    token_ids: Sequence[int], answer_tokens: int, config: ModelConfig, context_tokens: int
) -> None:
    """Refuse a prompt that the model cannot read, or that leaves too little room to answer.

    Raises BadRequest, or ContextTooLong.
    """
    T = len(token_ids)
    if T == 0:
        raise BadRequest("the prompt is empty: give at least one token")
    ids = as_int64("token ids", token_ids)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise BadRequest(
            f"a prompt's token ids must be from 0 to {config.vocab_size - 1}, "
            f"this one has {ids.min()} to {ids.max()}"
        )
    if (ids == config.image_token_id).any():
        raise BadRequest("the prompt holds an image token, and this engine reads text only")
    if T + answer_tokens > context_tokens:
        raise ContextTooLong(
            f"{T} tokens of prompt and {answer_tokens} of answer pass the context of "
            f"{context_tokens} tokens: shorten one, or load with a longer context"
        )


def as_int64(what: str, numbers: Sequence[int]) -> NDArray[np.int64]:
    """The numbers of a request as an array [N]; raises BadRequest for what is none."""
    array = np.array(numbers) if len(numbers) else np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadRequest(f"{what} must be one list of integers within 64 bits")
    return array.astype(np.int64)
