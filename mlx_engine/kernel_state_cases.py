"""The part of `kernel_cases` that makes cached rows, or reads them: front, indexer, attention."""

from typing import Any

import mlx.core as mx

from mlx_engine.formats import COMPRESSED, INDEX, WINDOW, CacheFormats
from mlx_engine.kernel_inputs import Numbers, Sizes, Work, copies, count_each, work
from mlx_engine.ops import attention, front, front_bytes, indexer
from mlx_engine.ops.attention import Chosen, SelectedRows, WindowRows
from mlx_engine.ops.attention_bytes import Seen, sparse_attention_traffic
from mlx_engine.ops.indexer import IndexKeys, IndexQueries
from mlx_engine.ops.indexer_bytes import choose_rows_traffic
from mlx_engine.ops.traffic import added

_EPS = 1e-20
_FORMATS = CacheFormats()


def window_row(s: Sizes, T: int, numbers: Numbers) -> Work:
    """Norms and the packed rows of the window; a decode step puts its row into the full ring."""
    L, D, R = s.q_lora_rank, s.head_dim, s.qk_rope_head_dim
    kv, at = numbers.normal(T, D), numbers.rotation(T, R)
    norms = numbers.normal(L), numbers.normal(D)
    options: dict[str, Any] = {"eps": _EPS, "fmt": WINDOW}
    rings: list[front.Ring | None] = [None]
    moved, own_bytes = front_bytes.attention_front_traffic(T, T, L, D, R, 2), 0
    if T == 1:
        moved = front_bytes.in_ring_traffic(s.sliding_window, L, D, R, 2)
        own_bytes = 4 * s.sliding_window * WINDOW.words(D)
        windows = numbers.packed(WINDOW, D, s.sliding_window, copies(s, own_bytes))
        rings = [front.Ring(window, 1) for window in windows]
    return work(
        numbers.normal(T, L),
        lambda latent, ring: front.attention_front(latent, kv, *norms, at, ring=ring, **options),
        rings,
        moved.unique_bytes,
        own_bytes,
    )


def compressed_row(s: Sizes, T: int, numbers: Numbers, *, ratio: int = 2) -> Work:
    """T tokens in groups, or one group for one token; groups of one are not pooled."""
    D, R, groups = s.head_dim, s.qk_rope_head_dim, max(T // ratio, 1)
    gate, norm = numbers.normal(ratio * groups, D, dtype=mx.float32), numbers.normal(D)
    at = numbers.rotation(groups, R)
    options: dict[str, Any] = {"ratio": ratio, "dtype": mx.bfloat16, "eps": _EPS, "fmt": COMPRESSED}
    return work(
        numbers.normal(ratio * groups, D, dtype=mx.float32),
        lambda kv, _: front.pooled_rows(kv, None if ratio == 1 else gate, norm, at, **options),
        [None],
        front_bytes.pooled_rows_traffic(groups, ratio, D, R, 2).unique_bytes,
    )


def index_key(s: Sizes, T: int, numbers: Numbers) -> Work:
    """Index keys from their product."""
    D, R = s.index_head_dim, s.qk_rope_head_dim
    norm, at = numbers.normal(D), numbers.rotation(T, R)
    options: dict[str, Any] = {"dtype": mx.bfloat16, "eps": _EPS, "fmt": INDEX}
    return work(
        numbers.normal(T, D, dtype=mx.float32),
        lambda key, _: front.encoded_keys(key, norm, at, **options),
        [None],
        front_bytes.encoded_keys_traffic(T, D, R).unique_bytes,
    )


def index_queries(s: Sizes, T: int, numbers: Numbers) -> Work:
    """The indexer's queries and the weights of its heads."""
    H, D, K, R = s.index_n_heads, s.index_head_dim, s.hidden_size, s.qk_rope_head_dim
    x, at = numbers.normal(T, K), numbers.rotation(T, R)
    own_bytes = 2 * H * K
    return work(
        numbers.normal(T, H, D),
        lambda q, w: front.index_queries(q, x, w, at, fmt=INDEX),
        [numbers.normal(H, K) for _ in range(copies(s, own_bytes))],
        front_bytes.index_queries_traffic(T, H, D, K, R, 2).unique_bytes,
        own_bytes,
    )


def choose(s: Sizes, T: int, numbers: Numbers, *, has_candidates: bool) -> Work:
    """The best rows among all keys, or among those of candidate blocks, which differ by copy."""
    S, H, D, B = s.keys, s.index_n_heads, s.index_head_dim, s.candidate_topk_blocks
    size = s.candidate_block_size
    head_weights = numbers.normal(T, H, dtype=mx.float32)
    visible = mx.full((T,), S, dtype=mx.int32)
    options: dict[str, Any] = {"k": s.index_topk, "block_size": size}
    read = min(T * B * size, S) if has_candidates else S
    own_bytes = read * (D // 2 + D // INDEX.group)
    count, sharing = copies(s, own_bytes), S // read
    keys = [
        IndexKeys(numbers.words(S, D // 8), numbers.scales(S, D // 32, middle=126), INDEX)
        for _ in range(-(-count // sharing))
    ]
    blocks: list[mx.array | None] = [None] * count
    if has_candidates:
        blocks = list(numbers.shares(count * T, B, S // size).reshape(count, T, B))

    def best(q: mx.array, among: tuple[IndexKeys, mx.array | None]) -> mx.array:
        queries = IndexQueries(q, head_weights, visible)
        return indexer.choose_rows(queries, among[0], candidates=among[1], **options)[0]

    launches = choose_rows_traffic(
        *(T, S, H, D, s.index_topk),
        value_bytes=2,
        block_size=size,
        candidate_blocks=B if has_candidates else None,
    )
    return work(
        # Of both signs and small, as index queries are: exact in bf16.
        mx.round(numbers.normal(T, H, D)),
        best,
        [(keys[copy // sharing], blocks[copy]) for copy in range(count)],
        added(*launches).unique_bytes,
        own_bytes,
    )


def attend(s: Sizes, T: int, numbers: Numbers, *, chosen: Chosen = Chosen.LISTED) -> Work:
    """Sparse attention; each copy has a window and chosen rows of its own.

    Rows are listed when there are more than are chosen, and else all visible, or there are none.
    """
    H, D, R, k = s.num_attention_heads, s.head_dim, s.qk_rope_head_dim, s.index_topk
    reach, S = s.sliding_window, s.rows if chosen is Chosen.LISTED else k
    sinks, at = numbers.normal(H, dtype=mx.float32), numbers.rotation(T, R)
    visible = mx.full((T,), S, dtype=mx.int32)
    options: dict[str, Any] = {
        "sliding_window": reach,
        "at": at,
        "formats": _FORMATS,
        "turns_q": True,
    }
    read = min(T * k, S)
    own_bytes = 4 * (read * COMPRESSED.words(D) + (reach + T - 1) * WINDOW.words(D))
    count, sharing = copies(s, own_bytes), S // read
    windows = numbers.packed(WINDOW, D, reach + T - 1, count)
    rows = numbers.packed(COMPRESSED, D, S, -(-count // sharing))
    ids = numbers.shares(count * T, k, S).reshape(count, T, k)

    def attended(q: mx.array, read: tuple[WindowRows, SelectedRows | None]) -> mx.array:
        return attention.sparse_attention(q, reach - 1, *read, sinks, **options)

    def selected(copy: int) -> SelectedRows | None:
        if chosen is Chosen.NONE:
            return None
        listed = ids[copy] if chosen is Chosen.LISTED else None
        return SelectedRows(rows[copy // sharing], visible, listed)

    is_listed, seen = chosen is Chosen.LISTED, 0 if chosen is Chosen.NONE else k
    launches = sparse_attention_traffic(
        (T, H, D),
        R,
        chosen,
        [Seen(reach, seen, seen if is_listed else 0)] * T,
        window_rows=reach + T - 1,
        compressed_rows=len(count_each(ids[0])) if is_listed else seen,
        most_rows=reach + seen,
        value_bytes=2,
        turns_q=True,
    )
    return work(
        numbers.normal(T, H, D),
        attended,
        [
            (
                # A ring for one query, as decoding has it, and rows in their order for more.
                WindowRows(windows[copy], None if T == 1 else 0),
                selected(copy),
            )
            for copy in range(count)
        ],
        added(*launches).unique_bytes,
        own_bytes,
    )
