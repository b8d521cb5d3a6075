"""The bytes that each launch of the attention front's kernels must move, from shapes alone."""

from mlx_engine.formats import COMPRESSED, WINDOW


def attention_front_bytes(
    tokens: int, queries: int, q_lora_rank: int, head_dim: int, rotated: int, value_bytes: int
) -> int:
    """Bytes that `attention_front` reads and writes, for weights in bf16."""
    row = head_dim * value_bytes + 2 * 4 * rotated + 4 * WINDOW.words(head_dim)
    weights = 2 * (head_dim + q_lora_rank)
    return tokens * row + queries * 2 * q_lora_rank * value_bytes + weights + 4


def in_ring_bytes(window: int, q_lora_rank: int, head_dim: int, rotated: int, size: int) -> int:
    """Bytes that `attention_front` reads and writes for a token and its ring, as above."""
    one = attention_front_bytes(1, 1, q_lora_rank, head_dim, rotated, size)
    return one + 2 * (window - 1) * 4 * WINDOW.words(head_dim) + 4


def pooled_rows_bytes(
    groups: int, ratio: int, head_dim: int, rotated: int, value_bytes: int
) -> int:
    """Bytes that `pooled_rows` reads and writes, for a norm's weight in bf16; gates if it pools."""
    read = 4 * head_dim * (2 * ratio if ratio > 1 else 1) + 2 * 4 * rotated
    written = head_dim * value_bytes + 4 * COMPRESSED.words(head_dim)
    return groups * (read + written) + 2 * head_dim + 4


def encoded_keys_bytes(groups: int, head_dim: int, rotated: int) -> int:
    """Bytes that `encoded_keys` reads and writes, for a norm's weight in bf16."""
    key = 4 * head_dim + 2 * 4 * rotated + head_dim // 2 + head_dim // 32
    return groups * key + 2 * head_dim + 4


def index_queries_bytes(
    queries: int, heads: int, head_dim: int, width: int, rotated: int, value_bytes: int
) -> int:
    """Bytes that `index_queries` reads and writes for inputs of a width, for weights in bf16."""
    query = heads * (2 * head_dim * value_bytes + 4) + width * value_bytes + 2 * 4 * rotated
    return queries * query + 2 * heads * width
