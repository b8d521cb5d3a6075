"""The router: which experts see a token, and with what weight (section 3.7).

The experts' first kernel makes the choice itself, so it is handed on as scores. Shapes: T tokens, k
chosen of E experts, D hidden_size.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlx_engine.ops import launch, router_native
from mlx_engine.ops.launch import Kernel
from mlx_engine.ops.linear import linear_f32
from mlx_engine.ops.mhc import (
    MhcSublayer,
    Mixing,
    between_slices,
    is_on,
    mhc_between,
    mhc_between_reference,
)
from mlx_engine.ops.mhc_bytes import HC
from mlx_engine.ops.topk import top_k
from mlx_engine.weights import MhcWeights


@dataclass(frozen=True)
class Router:
    """weight: bf16 [E, D]; bias: f32 [E]; k experts are chosen by biased score."""

    weight: mx.array
    bias: mx.array
    k: int
    gate_temp: float
    norm_topk_prob: bool
    scaling_factor: float


@dataclass(frozen=True)
class Routing:
    """The scores f32 [T, E] of every expert, without the bias, and by whom."""

    scores: mx.array
    router: Router

    @launch.falls_back
    def chosen(self) -> tuple[mx.array, mx.array]:
        """Choose k of E experts by biased score, weigh them by the plain one.

        ids int32 [T, k] ascending in each token, weights f32 [T, k]. Of equal experts the lowest is
        chosen.
        """
        return _choose_metal(self) if launch.is_on("router") else choose_reference(self)


@launch.falls_back
def mhc_route(
    h: mx.array, streams: mx.array, last: Mixing, pre: mx.array, to: MhcSublayer, router: Router
) -> tuple[mx.array, mx.array, Mixing, Routing]:
    """`mhc_between` for a layer's experts, and their scores: streams, x, coefficients, routing.

    Up to 8 tokens take the two launches of `mhc_between` alone.
    """
    T, _, D = streams.shape
    is_few = T <= _FEW_TOKENS and D % 8 == 0 and launch.is_on("router")
    if is_few and is_on(streams):
        return _mhc_route_metal(h, streams, last, pre, to, router)
    streams, x, mixing = mhc_between(h, streams, last, pre, to)
    return streams, x, mixing, route(x, router)


def route(x: mx.array, router: Router) -> Routing:
    """The scores of x [T, D]: sqrt(softplus(logits)).

    For many tokens MLX makes them: its f32 product in tiles does more for a byte than ours.
    """
    logits = linear_f32(x, router.weight) / router.gate_temp
    softplus = mx.maximum(logits, 0) + mx.log1p(mx.exp(-mx.abs(logits)))
    return Routing(mx.sqrt(softplus), router)


def choose_reference(routing: Routing) -> tuple[mx.array, mx.array]:
    """`Routing.chosen` in MLX's operations."""
    scores, router = routing.scores, routing.router
    ids = top_k(scores + router.bias, router.k)
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if router.norm_topk_prob:
        weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids, weights * router.scaling_factor


_SCORES = Kernel(
    family="router",
    name="router_scores",
    inputs=(
        *("sums", "base", "scale", "epsilons", "collapsed", "norm_weight"),
        *("gate", "gate_temp"),
    ),
    outputs=("scores", "pre", "post", "comb", "x"),
    body="""
        threadgroup float scratch[SIMD];
        const uint group = threadgroup_position_in_grid.x;
        const uint thread_index = thread_index_in_threadgroup;
        const uint simdgroup = simdgroup_index_in_threadgroup;
        const uint lane = thread_index_in_simdgroup;
        if (group < E) {
            router_scores<T, N, W, TOKENS, D, E>(
                sums, epsilons[1], collapsed, norm_weight, gate, gate_temp, scores, scratch, group,
                thread_index, THREADS, simdgroup, lane);
        } else {
            finish<T, N, D, ITERS>(
                sums, base, scale, epsilons, collapsed, norm_weight, pre, post, comb, x, scratch,
                group - E, THREADS, thread_index, simdgroup, lane);
        }
    """,
    also=("mhc",),
)
_CHOOSE = Kernel(
    family="router",
    name="router_choose",
    inputs=("scores", "bias", "scaling"),
    outputs=("ids", "weights"),
    body="""
        const uint t = thread_position_in_grid.y;
        router_choose<K, E, NORM>(
            scores + t * E, bias, scaling, ids + t * K, weights + t * K,
            thread_index_in_simdgroup);
    """,
    also=("mhc",),
)
# Threads that share an expert's row, and the most tokens for which they read it at once.
THREADS = 128
_FEW_TOKENS = 8


def _mhc_route_metal(
    h: mx.array, streams: mx.array, last: Mixing, pre: mx.array, to: MhcSublayer, router: Router
) -> tuple[mx.array, mx.array, Mixing, Routing]:
    """`mhc_route` for at most 8 tokens: the second launch scores and finishes side by side."""
    streams, collapsed, sums = between_slices(h, streams, last, pre, to)
    (T, D), E = collapsed.shape, router.weight.shape[0]
    is_bf16 = collapsed.dtype == to.norm_weight.dtype == router.weight.dtype == mx.bfloat16
    kernel = router_native.SCORES if launch.is_native("router") and is_bf16 else _SCORES
    scores, *mixing, x = kernel(
        [
            *(sums, to.w.base, to.w.scale, to.epsilons, collapsed, to.norm_weight),
            *(router.weight, router.gate_temp),
        ],
        template=[
            *(("T", collapsed.dtype), ("N", to.norm_weight.dtype), ("W", router.weight.dtype)),
            *(("TOKENS", T), ("D", D), ("E", E), ("ITERS", to.iters), ("THREADS", THREADS)),
        ],
        grid=((E + T) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        shapes=[(T, E), (T, HC), (T, HC), (T, HC, HC), (T, D)],
        dtypes=[*[mx.float32] * 4, collapsed.dtype],
    )
    return streams, x, Mixing(*mixing), Routing(scores, router)


def _choose_metal(routing: Routing) -> tuple[mx.array, mx.array]:
    """`Routing.chosen` in one launch."""
    (T, E), router = routing.scores.shape, routing.router
    ids, weights = _CHOOSE(
        [routing.scores, router.bias, router.scaling_factor],
        template=[("K", router.k), ("E", E), ("NORM", router.norm_topk_prob)],
        grid=(32, T, 1),
        threadgroup=(32, 1, 1),
        shapes=[(T, router.k), (T, router.k)],
        dtypes=[mx.int32, mx.float32],
    )
    return ids, weights


@launch.probe("router")
def agrees() -> bool:
    """Whether scores and choices are the reference's, and the rest of a launch `mhc_between`'s."""
    T, E, D = 3, 37, 64
    keys = iter(mx.random.split(mx.random.key(3), 8))
    streams, h = (mx.random.normal(s, key=next(keys)) for s in ((T, HC, D), (T, D)))
    gate = mx.random.normal((E, D), key=next(keys)).astype(mx.bfloat16)
    router = Router(gate, mx.zeros((E,)), 5, 2.0, True, 1.5)
    shares = mx.softmax(mx.random.normal((T, 2 + HC, HC), key=next(keys)), axis=-1)
    last = Mixing(shares[:, 0], shares[:, 1], shares[:, 2:])
    w = MhcWeights(
        mx.random.normal(((2 + HC) * HC, HC * D), key=next(keys)) / D,
        mx.random.normal(((2 + HC) * HC,), key=next(keys)),
        mx.array([0.5, 0.25, 0.125]),
    )
    # Those written for CUDA take bf16 alone.
    for dtype in (mx.float32, mx.bfloat16)[: 1 + launch.is_native("router")]:
        h, streams = h.astype(dtype), streams.astype(dtype)
        to = MhcSublayer(w, mx.ones((D,), dtype), iters=3, hc_eps=0.02, norm_eps=1e-20)
        _, x, mixing, routing = _mhc_route_metal(h, streams, last, last.pre, to, router)
        _, wanted, of_reference = mhc_between_reference(h, streams, last, last.pre, to)
        ids, weights = _choose_metal(routing)
        chosen, wanted_weights = choose_reference(route(x, router))
        pairs = [(mixing.comb, of_reference.comb), (weights, wanted_weights)]
        pairs.append((x.astype(mx.float32), wanted.astype(mx.float32)))
        rounding = 1e-4 if dtype == mx.float32 else 2.0**-6
        are_close = all(
            mx.allclose(a, b, rtol=rounding, atol=rounding / 10).item() for a, b in pairs
        )
        if not (mx.array_equal(ids, chosen).item() and are_close):
            return False
    return True
