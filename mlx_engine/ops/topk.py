"""The k largest entries of a row, ties to the lowest index.

MLX's partition leaves ties open. They do occur: index scores of rows that no head points at are
all zero.
"""

import mlx.core as mx

_LOW_BITS = 0xFFFFFFFF


def top_k(scores: mx.array, k: int) -> mx.array:
    """Indices of the k largest f32 scores of each row, ascending: [.., S] -> int32 [.., k].

    One unsigned key holds the score's order in its high bits and the index, inverted, in its low.
    """
    S = scores.shape[-1]
    # Adding zero turns -0 into +0, which must tie.
    bits = (scores + 0.0).view(mx.uint32)
    ordered = mx.where(bits >> 31, ~bits, bits | 0x80000000)
    inverted = _LOW_BITS - mx.arange(S, dtype=mx.uint32)
    keys = (ordered.astype(mx.uint64) << 32) | inverted.astype(mx.uint64)
    if k < S:
        keys = mx.partition(keys, kth=S - k, axis=-1)[..., S - k :]
    ids = _LOW_BITS - keys.astype(mx.uint32)
    return mx.sort(ids.astype(mx.int32), axis=-1)
