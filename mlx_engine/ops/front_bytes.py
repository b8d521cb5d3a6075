"""The bytes that each launch of the attention front's kernels moves, from shapes alone.

A threadgroup of D/2 threads makes a row; norms' weights are bf16.
"""

from mlx_engine.formats import COMPRESSED, INDEX, WINDOW
from mlx_engine.ops.traffic import Traffic, added, moved, number

_NORM_BYTES = 2


def attention_front_traffic(
    tokens: int, queries: int, q_lora_rank: int, head_dim: int, rotated: int, value_bytes: int
) -> Traffic:
    """`attention_front`, which reads a latent twice: for its squares, and to scale it."""
    latent = queries * q_lora_rank * value_bytes
    return added(
        moved(tokens * (head_dim * value_bytes + 2 * 4 * rotated + 4 * WINDOW.words(head_dim))),
        moved(head_dim * _NORM_BYTES, tokens),
        moved(latent, 2),
        moved(latent),
        moved(q_lora_rank * _NORM_BYTES, queries),
        number((tokens + queries) * head_dim // 2),
    )


def in_ring_traffic(
    window: int, q_lora_rank: int, head_dim: int, rotated: int, value_bytes: int
) -> Traffic:
    """`attention_front` for a token and its ring, whose other rows are copied."""
    return added(
        attention_front_traffic(1, 1, q_lora_rank, head_dim, rotated, value_bytes),
        moved(2 * (window - 1) * 4 * WINDOW.words(head_dim)),
        number((window + 1) * head_dim // 2),
    )


def pooled_rows_traffic(
    groups: int, ratio: int, head_dim: int, rotated: int, value_bytes: int
) -> Traffic:
    """`pooled_rows`, with gates if it pools."""
    read = 4 * head_dim * (2 * ratio if ratio > 1 else 1) + 2 * 4 * rotated
    written = head_dim * value_bytes + 4 * COMPRESSED.words(head_dim)
    return added(moved(groups * (read + written)), _norm(groups, head_dim))


def encoded_keys_traffic(groups: int, head_dim: int, rotated: int) -> Traffic:
    """`encoded_keys`."""
    codes = head_dim // 2 + head_dim // INDEX.group
    return added(moved(groups * (4 * head_dim + 2 * 4 * rotated + codes)), _norm(groups, head_dim))


def index_queries_traffic(
    queries: int, heads: int, head_dim: int, width: int, rotated: int, value_bytes: int
) -> Traffic:
    """`index_queries` for inputs of a width, which every head reads, and weights in bf16."""
    return added(
        moved(2 * queries * heads * head_dim * value_bytes),
        moved(queries * (width * value_bytes + 2 * 4 * rotated), heads),
        moved(heads * width * 2, queries),
        moved(queries * heads * 4),
    )


def _norm(rows: int, head_dim: int) -> Traffic:
    """A norm's weight, which every row reads, and its epsilon."""
    return added(moved(head_dim * _NORM_BYTES, rows), number(rows * head_dim // 2))
