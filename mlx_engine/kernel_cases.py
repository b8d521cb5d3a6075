"""What `kernel_bench` runs: each operation with kernels, at a model's widths on random data.

Owns the table of cases, their inputs and the bytes that they must move; checks and times nothing.
Weights come in several copies, so that a chain of calls reads them from memory as decoding does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import mlx.core as mx

from mlx_engine.formats import COMPRESSED, INDEX, WINDOW, CacheFormats
from mlx_engine.kernel_inputs import Numbers, Sizes, copies, count_different
from mlx_engine.ops import (
    attention,
    engram,
    expert_tiles,
    experts,
    front,
    front_bytes,
    indexer,
    linear,
    mhc,
    mhc_bytes,
)
from mlx_engine.ops.attention import SelectedRows, WindowRows
from mlx_engine.ops.indexer import IndexKeys, IndexQueries
from mlx_engine.ops.mhc import MhcSublayer, Mixing
from mlx_engine.ops.mhc_bytes import HC
from mlx_engine.ops.router import Router, Routing, choose_bytes, mhc_route, router_scores_bytes
from mlx_engine.ops.sampling import draw, draw_bytes
from mlx_engine.weights import EngramWeights, FfnWeights, MhcWeights

_EPS = 1e-20
_FORMATS = CacheFormats()

W = TypeVar("W")


# Of x and the number of a copy of the weights: all that it computes, as one list.
Compute: TypeAlias = Callable[[mx.array, int], list[mx.array]]


@dataclass(frozen=True)
class Work:
    """One operation on its inputs, x and a copy of its weights, and the bytes it must move."""

    x: mx.array
    compute: Compute
    copies: int
    n_bytes: int


@dataclass(frozen=True)
class Case:
    """An operation for so many tokens; a decode step of the release calls it `per_token` times."""

    family: str
    name: str
    tokens: int
    per_token: float
    prepare: Callable[[Sizes, int, Numbers], Work]


def _work(
    x: mx.array, function: Callable[[mx.array, W], Any], weights: list[W], n_bytes: int
) -> Work:
    return Work(x, lambda x, copy: _arrays(function(x, weights[copy])), len(weights), n_bytes)


def _arrays(value: Any) -> list[mx.array]:
    """Every array of a result: of tuples, and of a sublayer's coefficients."""
    if isinstance(value, Mixing):
        value = (value.pre, value.post, value.comb)
    if isinstance(value, tuple):
        return [array for part in cast("tuple[Any, ...]", value) for array in _arrays(part)]
    return [] if value is None else [value]


def _between(
    s: Sizes, T: int, numbers: Numbers, router: Callable[[], Router | None] = lambda: None
) -> Work:
    """Between two sublayers, or with a router into a layer's experts."""
    D, columns = s.hidden_size, (2 + HC) * HC
    streams = numbers.normal(T, HC, D)
    shares = mx.softmax(numbers.normal(T, 2 + HC, HC, dtype=mx.float32), axis=-1)
    last = Mixing(shares[:, 0], shares[:, 1], shares[:, 2:])

    def sublayer() -> MhcSublayer:
        fn = numbers.normal(columns, HC * D, dtype=mx.float32) * (HC * D) ** -0.5
        base, scale = numbers.normal(columns, dtype=mx.float32), mx.array([0.5, 0.5, 0.5])
        weights = MhcWeights(fn, base, scale)
        return MhcSublayer(weights, numbers.normal(D), s.hc_sinkhorn_iters, 1e-6, _EPS)

    def compute(h: mx.array, to: tuple[MhcSublayer, Router | None]) -> Any:
        between = (h, streams, last, last.pre, to[0])
        if to[1] is None:
            return mhc.mhc_between(*between)
        *found, routing = mhc_route(*between, to[1])
        return (*found, routing.scores)

    return _work(
        numbers.normal(T, D),
        compute,
        [(sublayer(), router()) for _ in range(copies(s, 4 * columns * HC * D))],
        sum(mhc_bytes.mhc_between_bytes(T, D, value_bytes=2)),
    )


def _route(s: Sizes, T: int, numbers: Numbers) -> Work:
    E, D = s.n_routed_experts, s.hidden_size
    work = _between(s, T, numbers, lambda: _router(s, numbers.normal(E, D)))
    return replace(work, n_bytes=work.n_bytes + router_scores_bytes(T, E, D))


def _router(s: Sizes, weight: mx.array) -> Router:
    bias = mx.zeros((weight.shape[0],))
    return Router(weight, bias, s.num_experts_per_tok, weight.shape[1] ** 0.5, True, 1.5)


def _fp8(
    s: Sizes, T: int, numbers: Numbers, *, N: Callable[[Sizes], int], K: Callable[[Sizes], int]
) -> Work:
    n, k = N(s), K(s)
    return _work(
        numbers.normal(T, k),
        linear.fp8_linear,
        [numbers.fp8(n, k) for _ in range(copies(s, n * k))],
        linear.fp8_linear_bytes(T, n, k, value_bytes=2),
    )


def _fp8_pair(s: Sizes, T: int, numbers: Numbers) -> Work:
    D, outputs = s.hidden_size, (s.q_lora_rank, s.head_dim)
    n_bytes = sum(linear.fp8_linear_bytes(T, N, D, value_bytes=2) for N in outputs)
    return _work(
        numbers.normal(T, D),
        lambda x, w: linear.fp8_linear_pair(x, *w),
        [tuple(numbers.fp8(N, D) for N in outputs) for _ in range(copies(s, sum(outputs) * D))],
        n_bytes - 2 * T * D,  # x is read once
    )


def _output(s: Sizes, T: int, numbers: Numbers) -> Work:
    G, rank, D = s.o_groups, s.o_lora_rank, s.hidden_size
    K = s.num_attention_heads * s.head_dim // G
    n_bytes = linear.fp8_linear_bytes(T, rank, K, value_bytes=2, G=G)
    n_bytes += linear.fp8_linear_bytes(T, D, G * rank, value_bytes=2)
    return _work(
        numbers.normal(T, s.num_attention_heads, s.head_dim),
        lambda o, w: linear.grouped_output(o, *w),
        [
            (numbers.fp8(rank, K, groups=G), numbers.fp8(D, G * rank))
            for _ in range(copies(s, G * rank * (K + D)))
        ],
        n_bytes,
    )


def _head(s: Sizes, T: int, numbers: Numbers) -> Work:
    V, D = s.head_rows, s.hidden_size
    return _work(
        numbers.normal(T, D),
        linear.linear_f32,
        [numbers.normal(V, D) for _ in range(copies(s, 2 * V * D))],
        linear.linear_f32_bytes(T, V, D, value_bytes=2),
    )


def _moe(s: Sizes, T: int, numbers: Numbers) -> Work:
    E, k, D, I_D = s.experts, s.num_experts_per_tok, s.hidden_size, s.moe_intermediate_size
    router = _router(s, mx.zeros((E, 1)))
    ffn = FfnWeights(
        *(router.weight, router.bias),
        *(numbers.fp4(E, I_D, D), numbers.fp4(E, D, I_D), numbers.fp4(E, I_D, D)),
        *(numbers.fp8(I_D, D), numbers.fp8(D, I_D), numbers.fp8(I_D, D)),
    )
    if T <= s.few_tokens:
        # Different experts for each token, so that the bytes are known.
        draws = [numbers.choices(1, T * k, E).reshape(T, k) for _ in range(E // k)]
        n_bytes = experts.moe_bytes(T, k, E, D, I_D, 2)
    else:
        draws = [numbers.choices(T, k, E) for _ in range(E // k)]
        different = count_different(draws[0])
        n_bytes = choose_bytes(T, k, E) + expert_tiles.tiles_bytes(
            *(T, k, E, D, I_D, 2), experts=different
        )
        # The shared expert's products, in launches of their own.
        shared = ((I_D, D), (I_D, D), (D, I_D))
        n_bytes += sum(linear.fp8_linear_bytes(T, N, K, value_bytes=2) for N, K in shared)
    return _work(
        numbers.normal(T, D),
        lambda x, scores: experts.moe(x, Routing(scores, router), ffn, limit=s.swiglu_limit),
        [numbers.scores(ids, E) for ids in draws],
        n_bytes,
    )


def _front(s: Sizes, T: int, numbers: Numbers) -> Work:
    L, D, R = s.q_lora_rank, s.head_dim, s.qk_rope_head_dim
    kv, at = numbers.normal(T, D), numbers.rotation(T, R)
    norms = numbers.normal(L), numbers.normal(D)
    options: dict[str, Any] = {"eps": _EPS, "fmt": WINDOW}
    if T > 1:
        ring, n_bytes = None, front_bytes.attention_front_bytes(T, T, L, D, R, 2)
    else:
        # A decode step puts its row into the full window.
        ring = front.Ring(WINDOW.pack(numbers.normal(s.sliding_window, D)), 1)
        n_bytes = front_bytes.in_ring_bytes(s.sliding_window, L, D, R, 2)
    return _work(
        numbers.normal(T, L),
        lambda latent, _: front.attention_front(latent, kv, *norms, at, ring=ring, **options),
        [None],
        n_bytes,
    )


def _pooled(s: Sizes, T: int, numbers: Numbers) -> Work:
    """T tokens in groups of two, or one group for one token."""
    D, R, groups = s.head_dim, s.qk_rope_head_dim, max(T // 2, 1)
    gate, norm = numbers.normal(2 * groups, D, dtype=mx.float32), numbers.normal(D)
    at = numbers.rotation(groups, R)
    options: dict[str, Any] = {"ratio": 2, "dtype": mx.bfloat16, "eps": _EPS, "fmt": COMPRESSED}
    return _work(
        numbers.normal(2 * groups, D, dtype=mx.float32),
        lambda kv, _: front.pooled_rows(kv, gate, norm, at, **options),
        [None],
        front_bytes.pooled_rows_bytes(groups, 2, D, R, 2),
    )


def _encoded(s: Sizes, T: int, numbers: Numbers) -> Work:
    D, R = s.index_head_dim, s.qk_rope_head_dim
    norm, at = numbers.normal(D), numbers.rotation(T, R)
    options: dict[str, Any] = {"dtype": mx.bfloat16, "eps": _EPS, "fmt": INDEX}
    return _work(
        numbers.normal(T, D, dtype=mx.float32),
        lambda key, _: front.encoded_keys(key, norm, at, **options),
        [None],
        front_bytes.encoded_keys_bytes(T, D, R),
    )


def _index_queries(s: Sizes, T: int, numbers: Numbers) -> Work:
    H, D, K, R = s.index_n_heads, s.index_head_dim, s.hidden_size, s.qk_rope_head_dim
    x, at = numbers.normal(T, K), numbers.rotation(T, R)
    return _work(
        numbers.normal(T, H, D),
        lambda q, w: front.index_queries(q, x, w, at, fmt=INDEX),
        [numbers.normal(H, K) for _ in range(copies(s, 2 * H * K))],
        front_bytes.index_queries_bytes(T, H, D, K, R, 2),
    )


def _choose(s: Sizes, T: int, numbers: Numbers, *, has_candidates: bool) -> Work:
    S, H, D, B = s.keys, s.index_n_heads, s.index_head_dim, s.candidate_topk_blocks
    size = s.candidate_block_size
    head_weights = numbers.normal(T, H, dtype=mx.float32)
    visible = mx.full((T,), S, dtype=mx.int32)
    options: dict[str, Any] = {"k": s.index_topk, "block_size": size}
    if has_candidates:
        options["candidates"] = numbers.choices(T, B, S // size)

    def choose(q: mx.array, keys: IndexKeys) -> mx.array:
        return indexer.choose_rows(IndexQueries(q, head_weights, visible), keys, **options)[0]

    key_bytes = S * (D // 2 + D // INDEX.group)
    return _work(
        # Of both signs and small, as index queries are: exact in bf16.
        mx.round(numbers.normal(T, H, D)),
        choose,
        [
            IndexKeys(numbers.words(S, D // 8), numbers.scales(S, D // 32, middle=126), INDEX)
            for _ in range(copies(s, key_bytes))
        ],
        indexer.choose_rows_bytes(
            *(T, S, H, D, s.index_topk),
            itemsize=2,
            block_size=size,
            candidate_blocks=B if has_candidates else None,
        ),
    )


def _attention(s: Sizes, T: int, numbers: Numbers) -> Work:
    H, D, R, k = s.num_attention_heads, s.head_dim, s.qk_rope_head_dim, s.index_topk
    reach, S = s.sliding_window, s.rows
    sinks, at = numbers.normal(H, dtype=mx.float32), numbers.rotation(T, R)
    ids = numbers.choices(T, k, S)
    visible = mx.full((T,), S, dtype=mx.int32)
    different = count_different(ids)
    options: dict[str, Any] = {
        "sliding_window": reach,
        "at": at,
        "formats": _FORMATS,
        "turns_q": True,
    }

    def attend(q: mx.array, rows: tuple[mx.array, mx.array]) -> mx.array:
        # A ring for one query, as decoding has it, and rows in their order for more.
        window = WindowRows(rows[0], None if T == 1 else 0)
        chosen = SelectedRows(rows[1], visible, ids)
        return attention.sparse_attention(q, reach - 1, window, chosen, sinks, **options)

    row_bytes = 4 * S * COMPRESSED.words(D)
    return _work(
        numbers.normal(T, H, D),
        attend,
        [
            (
                WINDOW.pack(numbers.normal(reach + T - 1, D)),
                COMPRESSED.pack(numbers.normal(S, D)),
            )
            for _ in range(min(copies(s, row_bytes), 16))
        ],
        attention.sparse_attention_bytes(
            (T, H, D),
            R,
            window_rows=reach + T - 1,
            compressed_rows=different,
            most_rows=reach + k,
            chosen=T * k,
            value_bytes=2,
            turns_q=True,
        ),
    )


def _engram(s: Sizes, T: int, numbers: Numbers) -> Work:
    D, width = s.hidden_size, s.engram_columns * s.engram_head_dim
    shape = (T, s.engram_columns, s.engram_head_dim)
    codes = numbers.words(*shape[:2], shape[2] // 4).view(mx.uint8)
    scales = numbers.scales(*shape[:2], shape[2] // 32, middle=120)
    N = (HC + 1) * D
    return _work(
        numbers.normal(T, HC, D),
        lambda streams, w: engram.engram_gate(streams, codes, scales, w, _EPS),
        [
            EngramWeights(numbers.fp8(N, width), numbers.normal(HC, D), numbers.normal(HC, D))
            for _ in range(copies(s, N * width))
        ],
        sum(engram.engram_gate_bytes(T, HC, D, width, value_bytes=2)),
    )


def _draw(s: Sizes, _: int, numbers: Numbers) -> Work:
    return _work(
        numbers.normal(s.vocab_size, dtype=mx.float32),
        lambda logits, key: draw(logits, key, temperature=1.0, top_p=0.95, min_p=0.0),
        [mx.random.key(seed) for seed in range(16)],
        sum(draw_bytes(s.vocab_size, has_top_p=True)),
    )


# Family, operation, how many of one, few and many tokens, calls of a decode step, inputs.
_TABLE: tuple[tuple[str, str, int, float, Callable[[Sizes, int, Numbers], Work]], ...] = (
    ("mhc", "into the attention", 3, 40, _between),
    ("router", "into the experts, with scores", 2, 40, _route),
    ("linear", "wq_a and wkv", 2, 40, _fp8_pair),
    (
        *("linear", "wq_b", 3, 40),
        partial(_fp8, N=lambda s: s.num_attention_heads * s.head_dim, K=lambda s: s.q_lora_rank),
    ),
    ("linear", "output", 3, 40, _output),
    ("linear", "an eighth of the head", 2, 8, _head),
    ("experts", "all of an FFN", 3, 40, _moe),
    ("front", "norms and window row", 3, 40, _front),
    ("front", "compressed row", 1, 4, _pooled),
    ("front", "index key", 1, 4, _encoded),
    ("front", "index queries", 2, 8, _index_queries),
    ("indexer", "among all keys", 2, 4, partial(_choose, has_candidates=False)),
    ("indexer", "among candidates", 2, 4, partial(_choose, has_candidates=True)),
    ("attention", "window and chosen rows", 3, 40, _attention),
    ("engram", "rows and gate", 2, 2, _engram),
    ("sampling", "a draw with top-p", 1, 1, _draw),
)


def cases(sizes: Sizes) -> list[Case]:
    """Every operation for one token, for a few, and for many where prefill has its own kernel."""
    tokens = (1, sizes.few_tokens, sizes.many_tokens)
    return [
        Case(family, name, T, per_token if T == 1 else 0, prepare)
        for family, name, count, per_token, prepare in _TABLE
        for T in tokens[:count]
    ]
