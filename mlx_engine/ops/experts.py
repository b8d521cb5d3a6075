"""The mixture of experts: FP4 routed experts and the FP8 shared one (section 3.7).

Shapes: T tokens, k chosen experts, E experts, D hidden_size, I moe_intermediate_size.
"""

from collections.abc import Callable

import mlx.core as mx

from mlx_engine.ops import launch
from mlx_engine.ops.expert_tiles import MAX_EXPERTS, routed_tiles_metal
from mlx_engine.ops.experts_native import moe_few_tokens
from mlx_engine.ops.launch import Kernel
from mlx_engine.ops.linear import fp8_linear
from mlx_engine.ops.router import Router, Routing, choose_reference
from mlx_engine.weights import FfnWeights, Fp4, Fp8

# From this many expert rows on, sorting them by expert pays for itself.
_SORT_ROWS = 64
# Up to this many tokens the kernels read weights for all tokens at once, a row a simdgroup.
_FEW_TOKENS = 8
# Slots are 4 bits in the kernels, of which 15 says none.
_MAX_SLOTS = 14


@launch.falls_back
def moe(x: mx.array, routing: Routing, ffn: FfnWeights, *, limit: float) -> mx.array:
    """Sum of the chosen experts' outputs and the shared expert's.

    x: [T, D], routing: who is chosen and with what weight -> [T, D] in x's dtype. The weight
    multiplies an expert's activation before the down product; the sum is f32.
    """
    T, E = routing.scores.shape
    is_few = T <= _FEW_TOKENS and routing.router.k <= _MAX_SLOTS and launch.is_on("experts")
    is_native = launch.is_native("experts") and x.dtype == mx.bfloat16
    if is_few:
        compute = moe_few_tokens if is_native else moe_metal
        return compute(x, routing, ffn, limit=limit)
    ids, weights = routing.chosen()
    if T > _FEW_TOKENS and E <= MAX_EXPERTS and launch.is_on("expert_tiles"):
        return _moe_in_tiles(x, ids, weights, ffn, limit=limit)
    return moe_reference(x, ids, weights, ffn, limit=limit)


def moe_reference(
    x: mx.array, ids: mx.array, weights: mx.array, ffn: FfnWeights, *, limit: float
) -> mx.array:
    """`moe` in MLX's operations, for any number of tokens and ids in any order."""
    T, k = ids.shape
    if T * k < _SORT_ROWS:
        # One row stands for its k experts: x [T, 1, 1, D], ids [T, k] -> [T, k, 1, D].
        routed = _experts(x[:, None, None, :], ids, weights[..., None, None], ffn, limit, False)
        routed = mx.sum(routed[:, :, 0, :], axis=1)
    else:
        # Rows of one expert lie together: x [T*k, 1, D], ids [T*k] -> [T*k, 1, D].
        order = mx.argsort(ids.reshape(-1))
        rows, scale = x[order // k][:, None, :], weights.reshape(-1)[order][:, None, None]
        routed = _experts(rows, ids.reshape(-1)[order], scale, ffn, limit, True)
        routed = mx.sum(routed[mx.argsort(order)].reshape(T, k, -1), axis=1)
    return _add_shared(routed, x, ffn, limit)


def _add_shared(routed: mx.array, x: mx.array, ffn: FfnWeights, limit: float) -> mx.array:
    gate, up = fp8_linear(x, ffn.shared_w1), fp8_linear(x, ffn.shared_w3)
    act = clamped_swiglu(gate.astype(mx.float32), up.astype(mx.float32), limit)
    shared = fp8_linear(act.astype(x.dtype), ffn.shared_w2)
    return (routed + shared.astype(mx.float32)).astype(x.dtype)


def _experts(
    x: mx.array, ids: mx.array, weights: mx.array, ffn: FfnWeights, limit: float, is_sorted: bool
) -> mx.array:
    gate = _expert_product(x, ids, ffn.w1, is_sorted)
    up = _expert_product(x, ids, ffn.w3, is_sorted)
    act = clamped_swiglu(gate, up, limit) * weights
    return _expert_product(act.astype(x.dtype), ids, ffn.w2, is_sorted)


def clamped_swiglu(gate: mx.array, up: mx.array, limit: float) -> mx.array:
    """silu(min(gate, limit)) * clip(up, -limit, limit), in f32."""
    gate = mx.minimum(gate, limit)
    return gate * mx.sigmoid(gate) * mx.clip(up, -limit, limit)


def _expert_product(x: mx.array, ids: mx.array, w: Fp4, is_sorted: bool) -> mx.array:
    """x [.., 1, K] times the experts `ids`, transposed, rounded to x's dtype: f32 [.., 1, N]."""
    # MLX's product on the CPU accumulates in its input's type; on the GPU in f32.
    y = mx.gather_qmm(
        x if mx.default_device() == mx.gpu else x.astype(mx.float32),
        w.weight,
        w.scale,
        rhs_indices=ids,
        transpose=True,
        group_size=32,
        bits=4,
        mode="mxfp4",
        sorted_indices=is_sorted,
    )
    return y.astype(x.dtype).astype(mx.float32)


_GATE_UP = Kernel(
    family="experts",
    name="moe_gate_up",
    inputs=(
        *("x", "scores", "bias", "scaling", "w1", "w1_scale", "w3", "w3_scale"),
        *("shared_w1", "shared_w1_scale", "shared_w3", "shared_w3_scale", "limit"),
    ),
    outputs=("act", "ids"),
    body="""
        threadgroup int chosen[TOKENS * K];
        threadgroup float weights[TOKENS * K];
        choose_experts<TOKENS, K, E, NORM>(
            scores, bias, scaling, chosen, weights, simdgroups_per_threadgroup,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
        if (threadgroup_position_in_grid.x + threadgroup_position_in_grid.y == 0) {
            for (uint i = thread_index_in_threadgroup; i < TOKENS * K; i += THREADS) {
                ids[i] = chosen[i];
            }
        }
        gate_up<T, TOKENS, K, D, I>(
            x, chosen, weights, w1, w1_scale, w3, w3_scale, shared_w1, shared_w1_scale, shared_w3,
            shared_w3_scale, limit, act, thread_position_in_grid.y,
            thread_position_in_grid.x / SIMD * GATE_ROWS, thread_index_in_simdgroup);
    """,
    also=("mhc", "router"),
)
_DOWN = Kernel(
    family="experts",
    name="moe_down",
    inputs=("act", "ids", "w2", "w2_scale", "shared_w2", "shared_w2_scale"),
    outputs=("out",),
    body="""
        threadgroup uint lists[3 * TOKENS * K];
        down<T, TOKENS, K, D, I>(
            act, ids, w2, w2_scale, shared_w2, shared_w2_scale, out, lists,
            thread_position_in_grid.x / SIMD * DOWN_ROWS, thread_index_in_threadgroup,
            threads_per_threadgroup.x, thread_index_in_simdgroup);
    """,
    also=("mhc", "router"),
)
# Rows that a simdgroup makes, GATE_ROWS and DOWN_ROWS of experts.metal.
ROWS = 2
# A simdgroup for each token's choice.
GATE_THREADS = 256
DOWN_THREADS = 64


def moe_metal(x: mx.array, routing: Routing, ffn: FfnWeights, *, limit: float) -> mx.array:
    """`moe` for at most 8 tokens in two launches; D and I are multiples of 32.

    The first makes the choice too, in each of its threadgroups.
    """
    (T, D), router = x.shape, routing.router
    I_D = ffn.w1.weight.shape[1]
    template = [("T", x.dtype), ("TOKENS", T), ("K", router.k), ("D", D), ("I", I_D)]
    act, ids = _GATE_UP(
        [
            *(x, routing.scores, router.bias, router.scaling_factor),
            *(*_parts(ffn.w1), *_parts(ffn.w3)),
            *(*_parts(ffn.shared_w1), *_parts(ffn.shared_w3), limit),
        ],
        template=[
            *template,
            *(("E", routing.scores.shape[1]), ("NORM", router.norm_topk_prob)),
            ("THREADS", GATE_THREADS),
        ],
        grid=(I_D // ROWS * 32, T * router.k + 1, 1),
        threadgroup=(GATE_THREADS, 1, 1),
        shapes=[(T, router.k + 1, I_D), (T, router.k)],
        dtypes=[x.dtype, mx.int32],
    )
    (out,) = _DOWN(
        [act, ids, *_parts(ffn.w2), *_parts(ffn.shared_w2)],
        template=template,
        grid=(D // ROWS * 32, 1, 1),
        threadgroup=(DOWN_THREADS, 1, 1),
        shapes=[(T, D)],
        dtypes=[x.dtype],
    )
    return out


def _parts(w: Fp4 | Fp8) -> tuple[mx.array, mx.array]:
    return w.weight, w.scale


def _moe_in_tiles(
    x: mx.array, ids: mx.array, weights: mx.array, ffn: FfnWeights, *, limit: float
) -> mx.array:
    routed = routed_tiles_metal(x, ids, weights, ffn, limit=limit)
    return _add_shared(routed, x, ffn, limit)


@launch.probe("experts")
def _few_tokens_agree() -> bool:
    forms = (moe_few_tokens, moe_metal) if launch.is_native("experts") else (moe_metal,)
    return all(_agrees(form, T) for form in forms for T in (1, 3))


@launch.probe("expert_tiles")
def _many_tokens_agree() -> bool:
    def in_tiles(x: mx.array, routing: Routing, ffn: FfnWeights, *, limit: float) -> mx.array:
        return _moe_in_tiles(x, *choose_reference(routing), ffn, limit=limit)

    return _agrees(in_tiles, 20)


def _agrees(compute: Callable[..., mx.array], T: int) -> bool:
    """Whether `compute` is the reference, apart from roundings, on T tokens of a small layer."""
    k, E, D, I_D = 2, 5, 64, 96
    keys = iter(mx.random.split(mx.random.key(5), 16))

    def words(*shape: int) -> mx.array:
        # A byte with its lowest bit clear is a number in both formats.
        return mx.random.randint(0, 1 << 32, shape, mx.uint32, key=next(keys)) & 0xFEFEFEFE

    def scales(*shape: int) -> mx.array:
        return mx.random.randint(112, 118, shape, mx.uint8, key=next(keys))

    def fp4(N: int, K: int) -> Fp4:
        return Fp4(words(E, N, K // 8), scales(E, N, K // 32) + 5)

    def fp8(N: int, K: int) -> Fp8:
        return Fp8(words(N, K // 4), scales(N // 32, K // 32))

    none = mx.zeros((1,))
    experts = fp4(I_D, D), fp4(D, I_D), fp4(I_D, D), fp8(I_D, D), fp8(D, I_D), fp8(I_D, D)
    ffn = FfnWeights(none, none, *experts)
    x = mx.random.normal((T, D), key=next(keys)).astype(mx.bfloat16)
    scores = mx.random.uniform(shape=(T, E), key=next(keys))
    routing = Routing(scores, Router(none, mx.zeros((E,)), k, 1.0, True, 1.5))
    wanted = moe_reference(x, *choose_reference(routing), ffn, limit=2.0).astype(mx.float32)
    error = mx.abs(compute(x, routing, ffn, limit=2.0).astype(mx.float32) - wanted)
    return (mx.max(error) < 2**-6 * mx.max(mx.abs(wanted))).item() is True
