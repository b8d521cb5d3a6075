"""What `kernel_bench` runs: each operation with kernels, at a model's widths on random data.

Owns the table of cases, their inputs and the bytes that they must move; checks and times nothing.
What is read comes in several copies, so that a chain of calls reads it from memory, as decoding
does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import mlx.core as mx

from mlx_engine import kernel_state_cases as state
from mlx_engine.kernel_inputs import Numbers, Sizes, Work, copies, count_each, work
from mlx_engine.ops import engram, experts, linear, mhc
from mlx_engine.ops.engram_bytes import engram_gate_traffic
from mlx_engine.ops.experts_bytes import moe_traffic, tiles_traffic
from mlx_engine.ops.linear_bytes import fp8_linear_traffic, linear_f32_traffic
from mlx_engine.ops.mhc import MhcSublayer, Mixing
from mlx_engine.ops.mhc_bytes import HC, mhc_between_traffic
from mlx_engine.ops.router import Router, Routing, mhc_route
from mlx_engine.ops.router_bytes import choose_traffic, router_scores_traffic
from mlx_engine.ops.sampling import draw
from mlx_engine.ops.sampling_bytes import draw_traffic
from mlx_engine.ops.traffic import added
from mlx_engine.weights import EngramWeights, FfnWeights, Fp8, MhcWeights

_EPS = 1e-20

Prepare: TypeAlias = Callable[[Sizes, int, Numbers], Work]


@dataclass(frozen=True)
class Case:
    """An operation for so many tokens; a decode step of the release calls it `per_token` times."""

    family: str
    name: str
    tokens: int
    per_token: float
    prepare: Prepare


def _between(s: Sizes, T: int, numbers: Numbers, *, has_router: bool = False) -> Work:
    """Between two sublayers, or with a router into a layer's experts."""
    D, E, columns = s.hidden_size, s.n_routed_experts, (2 + HC) * HC
    streams = numbers.normal(T, HC, D)
    shares = mx.softmax(numbers.normal(T, 2 + HC, HC, dtype=mx.float32), axis=-1)
    last = Mixing(shares[:, 0], shares[:, 1], shares[:, 2:])
    first, second = mhc_between_traffic(T, D, value_bytes=2)
    own_bytes = 4 * columns * HC * D
    if has_router:
        second = router_scores_traffic(T, E, D, value_bytes=2)
        own_bytes += 2 * E * D

    def sublayer() -> MhcSublayer:
        fn = numbers.normal(columns, HC * D, dtype=mx.float32) * (HC * D) ** -0.5
        base, scale = numbers.normal(columns, dtype=mx.float32), mx.array([0.5, 0.5, 0.5])
        weights = MhcWeights(fn, base, scale)
        return MhcSublayer(weights, numbers.normal(D), s.hc_sinkhorn_iters, 1e-6, _EPS)

    def router() -> Router | None:
        return _router(s, numbers.normal(E, D)) if has_router else None

    def compute(h: mx.array, to: tuple[MhcSublayer, Router | None]) -> Any:
        between = (h, streams, last, last.pre, to[0])
        if to[1] is None:
            return mhc.mhc_between(*between)
        *found, routing = mhc_route(*between, to[1])
        return (*found, routing.scores)

    return work(
        numbers.normal(T, D),
        compute,
        [(sublayer(), router()) for _ in range(copies(s, own_bytes))],
        added(first, second).unique_bytes,
        own_bytes,
    )


def _router(s: Sizes, weight: mx.array) -> Router:
    bias = mx.zeros((weight.shape[0],))
    return Router(weight, bias, s.num_experts_per_tok, weight.shape[1] ** 0.5, True, 1.5)


def _fp8(
    s: Sizes, T: int, numbers: Numbers, *, N: Callable[[Sizes], int], K: Callable[[Sizes], int]
) -> Work:
    n, k = N(s), K(s)
    return work(
        numbers.normal(T, k),
        linear.fp8_linear,
        [numbers.fp8(n, k) for _ in range(copies(s, n * k))],
        fp8_linear_traffic(T, n, K=k, value_bytes=2).unique_bytes,
        n * k,
    )


def _fp8_pair(s: Sizes, T: int, numbers: Numbers) -> Work:
    D, outputs = s.hidden_size, (s.q_lora_rank, s.head_dim)
    own_bytes = sum(outputs) * D
    return work(
        numbers.normal(T, D),
        lambda x, w: linear.fp8_linear_pair(x, *w),
        [tuple(numbers.fp8(N, D) for N in outputs) for _ in range(copies(s, own_bytes))],
        fp8_linear_traffic(T, *outputs, K=D, value_bytes=2).unique_bytes,
        own_bytes,
    )


def _plain_pair(s: Sizes, T: int, numbers: Numbers) -> Work:
    N, D = s.head_dim, s.hidden_size
    own_bytes = 4 * N * D
    return work(
        numbers.normal(T, D),
        lambda x, w: linear.linear_f32_pair(x, *w),
        [(numbers.normal(N, D), numbers.normal(N, D)) for _ in range(copies(s, own_bytes))],
        linear_f32_traffic(T, N, N, K=D, value_bytes=2).unique_bytes,
        own_bytes,
    )


def _output(s: Sizes, T: int, numbers: Numbers) -> Work:
    G, rank, D = s.o_groups, s.o_lora_rank, s.hidden_size
    K = s.num_attention_heads * s.head_dim // G
    products = (
        fp8_linear_traffic(T, rank, K=K, value_bytes=2, G=G),
        fp8_linear_traffic(T, D, K=G * rank, value_bytes=2),
    )
    own_bytes = G * rank * (K + D)
    return work(
        numbers.normal(T, s.num_attention_heads, s.head_dim),
        lambda o, w: linear.grouped_output(o, *w),
        [
            (numbers.fp8(rank, K, groups=G), numbers.fp8(D, G * rank))
            for _ in range(copies(s, own_bytes))
        ],
        added(*products).unique_bytes,
        own_bytes,
    )


def _head(s: Sizes, T: int, numbers: Numbers) -> Work:
    V, D = s.head_rows, s.hidden_size
    return work(
        numbers.normal(T, D),
        linear.linear_f32,
        [numbers.normal(V, D) for _ in range(copies(s, 2 * V * D))],
        linear_f32_traffic(T, V, K=D, value_bytes=2).unique_bytes,
        2 * V * D,
    )


def _moe(s: Sizes, T: int, numbers: Numbers) -> Work:
    E, k, D, I_D = s.experts, s.num_experts_per_tok, s.hidden_size, s.moe_intermediate_size
    router = _router(s, mx.zeros((E, 1)))

    def shared_expert() -> dict[str, Fp8]:
        return {
            "shared_w1": numbers.fp8(I_D, D),
            "shared_w2": numbers.fp8(D, I_D),
            "shared_w3": numbers.fp8(I_D, D),
        }

    ffn = FfnWeights(
        *(router.weight, router.bias),
        *(numbers.fp4(E, I_D, D), numbers.fp4(E, D, I_D), numbers.fp4(E, I_D, D)),
        **shared_expert(),
    )
    x = numbers.normal(T, D)

    def compute(x: mx.array, scores: mx.array, ffn: FfnWeights) -> mx.array:
        return experts.moe(x, Routing(scores, router), ffn, limit=s.swiglu_limit)

    if T > s.few_tokens:
        ids = numbers.choices(T, k, E)
        # The shared expert's products are launches of their own.
        shared = ((I_D, D), (I_D, D), (D, I_D))
        n_bytes = added(
            choose_traffic(T, k, E),
            # Nearly all pairs are met, a thousandth of the bytes.
            *tiles_traffic(T, k, E, D, I_D, 2, pairs_of=count_each(ids), met=T * k),
            *(fp8_linear_traffic(T, N, K=K, value_bytes=2) for N, K in shared),
        ).unique_bytes
        # Some launches need x alone, some the scores.
        inputs = x, numbers.scores(ids, E)
        return Work(inputs, lambda both, _: [compute(both[0], both[1], ffn)], 1, n_bytes, n_bytes)
    # Different experts for each token, so that the bytes are known, and other ones in each copy.
    own_bytes = 3 * D * I_D * (T * k * 17 + 32) // 32
    ids = numbers.shares(copies(s, own_bytes), T * k, E).reshape(-1, T, k)
    return work(
        x,
        lambda x, w: compute(x, *w),
        [(numbers.scores(some, E), replace(ffn, **shared_expert())) for some in ids],
        added(*moe_traffic(T, k, E, D, I_D, 2)).unique_bytes,
        own_bytes,
    )


def _engram(s: Sizes, T: int, numbers: Numbers) -> Work:
    D, width = s.hidden_size, s.engram_columns * s.engram_head_dim
    shape = (T, s.engram_columns, s.engram_head_dim)
    codes = numbers.words(*shape[:2], shape[2] // 4).view(mx.uint8)
    scales = numbers.scales(*shape[:2], shape[2] // 32, middle=120)
    streams, N = numbers.normal(T, HC, D), (HC + 1) * D
    return work(
        codes,  # what the first launch waits for
        lambda codes, w: engram.engram_gate(streams, codes, scales, w, _EPS),
        [
            EngramWeights(numbers.fp8(N, width), numbers.normal(HC, D), numbers.normal(HC, D))
            for _ in range(copies(s, N * width))
        ],
        added(*engram_gate_traffic(T, HC, D, width, value_bytes=2)).unique_bytes,
        N * width,
    )


def _draw(s: Sizes, _: int, numbers: Numbers) -> Work:
    return work(
        numbers.normal(s.vocab_size, dtype=mx.float32),
        lambda logits, key: draw(logits, key, temperature=1.0, top_p=0.95, min_p=0.0),
        [mx.random.key(seed) for seed in range(16)],
        added(*draw_traffic(s.vocab_size, has_top_p=True)).unique_bytes,
    )


@dataclass(frozen=True)
class _Operation:
    """A row of the table: for one token alone, for few too, or also for many."""

    family: str
    name: str
    up_to: Literal["one", "few", "many"]
    per_token: float
    prepare: Prepare

    def tokens(self, sizes: Sizes) -> tuple[int, ...]:
        count = {"one": 1, "few": 2, "many": 3}[self.up_to]
        return (1, sizes.few_tokens, sizes.many_tokens)[:count]


_WQ_B = partial(_fp8, N=lambda s: s.num_attention_heads * s.head_dim, K=lambda s: s.q_lora_rank)

_TABLE = (
    _Operation("mhc", "into the attention", up_to="many", per_token=40, prepare=_between),
    _Operation(
        "router",
        "into the experts, with scores",
        up_to="few",
        per_token=40,
        prepare=partial(_between, has_router=True),
    ),
    _Operation("linear", "wq_a and wkv", up_to="few", per_token=40, prepare=_fp8_pair),
    _Operation("linear", "wq_b", up_to="many", per_token=40, prepare=_WQ_B),
    _Operation("linear", "output", up_to="many", per_token=40, prepare=_output),
    _Operation(
        "linear", "a compressor's kv and gate", up_to="few", per_token=3, prepare=_plain_pair
    ),
    _Operation("linear", "an eighth of the head", up_to="few", per_token=8, prepare=_head),
    _Operation("experts", "all of an FFN", up_to="many", per_token=40, prepare=_moe),
    _Operation(
        "front", "norms and window row", up_to="many", per_token=40, prepare=state.window_row
    ),
    _Operation("front", "compressed row", up_to="one", per_token=4, prepare=state.compressed_row),
    _Operation("front", "index key", up_to="one", per_token=4, prepare=state.index_key),
    _Operation("front", "index queries", up_to="few", per_token=8, prepare=state.index_queries),
    _Operation(
        "indexer",
        "among all keys",
        up_to="few",
        per_token=4,
        prepare=partial(state.choose, has_candidates=False),
    ),
    _Operation(
        "indexer",
        "among candidates",
        up_to="few",
        per_token=4,
        prepare=partial(state.choose, has_candidates=True),
    ),
    _Operation(
        "attention", "window and chosen rows", up_to="many", per_token=40, prepare=state.attend
    ),
    _Operation("engram", "rows and gate", up_to="few", per_token=2, prepare=_engram),
    _Operation("sampling", "a draw with top-p", up_to="one", per_token=1, prepare=_draw),
)


def cases(sizes: Sizes) -> list[Case]:
    """Every operation for one token, for a few, and for many where prefill has its own kernel."""
    return [
        Case(row.family, row.name, T, row.per_token if T == 1 else 0, row.prepare)
        for row in _TABLE
        for T in row.tokens(sizes)
    ]
