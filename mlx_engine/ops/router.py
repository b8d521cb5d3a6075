"""The router: which experts see a token, and with what weight (section 3.7).

Shapes: T tokens, k chosen of E experts, D hidden_size.
"""

import mlx.core as mx

from mlx_engine.ops import launch
from mlx_engine.ops.launch import Kernel
from mlx_engine.ops.linear import linear_f32
from mlx_engine.ops.topk import top_k


def route(
    x: mx.array,
    gate_weight: mx.array,
    gate_bias: mx.array,
    *,
    k: int,
    gate_temp: float,
    norm_topk_prob: bool,
    scaling_factor: float,
) -> tuple[mx.array, mx.array]:
    """Choose k of E experts by biased score, weigh them by the plain one.

    x: [T, D], gate_weight: bf16 [E, D], gate_bias: f32 [E] -> ids int32 [T, k] ascending in each
    token, weights f32 [T, k]. Of equal experts the lowest is chosen.
    """
    compute = route_metal if launch.is_on("router") else route_reference
    return compute(
        x,
        gate_weight,
        gate_bias,
        k=k,
        gate_temp=gate_temp,
        norm_topk_prob=norm_topk_prob,
        scaling_factor=scaling_factor,
    )


def route_reference(
    x: mx.array,
    gate_weight: mx.array,
    gate_bias: mx.array,
    *,
    k: int,
    gate_temp: float,
    norm_topk_prob: bool,
    scaling_factor: float,
) -> tuple[mx.array, mx.array]:
    """`route` in MLX's operations."""
    scores = _scores(x, gate_weight, gate_temp)
    ids = top_k(scores + gate_bias, k)
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if norm_topk_prob:
        weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids, weights * scaling_factor


def _scores(x: mx.array, gate_weight: mx.array, gate_temp: float) -> mx.array:
    logits = linear_f32(x, gate_weight) / gate_temp
    softplus = mx.maximum(logits, 0) + mx.log1p(mx.exp(-mx.abs(logits)))
    return mx.sqrt(softplus)


_SCORES = Kernel(
    family="router",
    name="router_scores",
    inputs=("x", "gate", "gate_temp"),
    outputs=("scores",),
    body="""
        threadgroup float scratch[SIMD];
        router_scores<T, W, TOKENS, D, E>(
            x, gate, gate_temp, scores, scratch, threadgroup_position_in_grid.x,
            thread_index_in_threadgroup, threads_per_threadgroup.x,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
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
)
# Threads that share an expert's row, and the most tokens for which they read it at once.
_THREADS = 128
_FEW_TOKENS = 8


def route_metal(
    x: mx.array,
    gate_weight: mx.array,
    gate_bias: mx.array,
    *,
    k: int,
    gate_temp: float,
    norm_topk_prob: bool,
    scaling_factor: float,
) -> tuple[mx.array, mx.array]:
    """`route` in two launches for at most 8 tokens; D is a multiple of 8.

    For more tokens MLX makes the scores: its f32 product in tiles does more for a byte than ours.
    """
    (T, D), E = x.shape, gate_weight.shape[0]
    if T <= _FEW_TOKENS:
        (scores,) = _SCORES(
            [x, gate_weight, mx.array(gate_temp)],
            template=[
                *(("T", x.dtype), ("W", gate_weight.dtype)),
                *(("TOKENS", T), ("D", D), ("E", E)),
            ],
            grid=(E * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            shapes=[(T, E)],
            dtypes=[mx.float32],
        )
    else:
        scores = _scores(x, gate_weight, gate_temp)
    ids, weights = _CHOOSE(
        [scores, gate_bias, mx.array(scaling_factor)],
        template=[("K", k), ("E", E), ("NORM", norm_topk_prob)],
        grid=(32, T, 1),
        threadgroup=(32, 1, 1),
        shapes=[(T, k), (T, k)],
        dtypes=[mx.int32, mx.float32],
    )
    return ids, weights


def route_bytes(T: int, k: int, E: int, D: int, itemsize: int) -> int:
    """Bytes that `route_metal` reads and writes for up to 8 tokens, with a bf16 gate."""
    scores = 4 * T * E
    return (2 * E * D + T * D * itemsize + 4 + scores) + (scores + 4 * E + 4 + 8 * T * k)


@launch.probe("router")
def _probe() -> bool:
    key = mx.random.key(3)
    x, gate = mx.random.normal((3, 64), key=key), mx.random.normal((37, 64), key=key)
    inputs = x.astype(mx.bfloat16), gate.astype(mx.bfloat16), mx.zeros((37,))
    (ids, weights), (wanted, wanted_weights) = (
        compute(*inputs, k=5, gate_temp=2.0, norm_topk_prob=True, scaling_factor=1.5)
        for compute in (route_metal, route_reference)
    )
    same = mx.array_equal(ids, wanted) & mx.allclose(weights, wanted_weights, rtol=1e-4)
    return bool(same.item())
