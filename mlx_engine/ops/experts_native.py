"""The mixture of experts for a few tokens on NVIDIA GPUs, in bf16: the kernels of cuda/experts.cu.

Shapes: T tokens, k of E experts chosen, D hidden_size, I moe_intermediate_size.
"""

import mlx.core as mx

from mlx_engine.ops.launch import Kernel
from mlx_engine.ops.router import Routing
from mlx_engine.weights import FfnWeights, Fp4, Fp8

# Rows of a block, and its threads: of GATE_WARPS and DOWN_WARPS in experts.cu.
_ROWS = 16
_GATE_THREADS = 128
_DOWN_THREADS = 256

_GATE_UP = Kernel(
    family="experts",
    name="moe_gate_up",
    inputs=(
        *("x", "scores", "bias", "scaling", "w1", "w1_scale", "w3", "w3_scale"),
        *("shared_w1", "shared_w1_scale", "shared_w3", "shared_w3_scale", "limit"),
    ),
    outputs=("act", "ids"),
    body="""
    __shared__ float scratch[2 * GATE_WARPS * 4 * 32];
    __shared__ int chosen[TOKENS * K];
    __shared__ float weights[TOKENS * K];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (blockIdx.y > 0 || blockIdx.x == 0) {  // the shared expert needs no choice
        for (int t = warp; t < TOKENS; t += GATE_WARPS) {
            choose_experts<K, E, NORM>(
                scores + t * E, bias, scaling, chosen + t * K, weights + t * K, lane);
        }
        __syncthreads();
    }
    if (blockIdx.x + blockIdx.y == 0 && threadIdx.x < TOKENS * K) {
        ids[threadIdx.x] = chosen[threadIdx.x];
    }
    gate_up<TOKENS, K, D, I>(
        x, chosen, weights, w1, w1_scale, w3, w3_scale, shared_w1, shared_w1_scale, shared_w3,
        shared_w3_scale, limit, act, scratch, blockIdx.y, blockIdx.x, warp, lane);""",
    also=("mhc", "router"),
    is_native=True,
    blocks=5,
)
_DOWN = Kernel(
    family="experts",
    name="moe_down",
    inputs=("act", "ids", "w2", "w2_scale", "shared_w2", "shared_w2_scale"),
    outputs=("out",),
    body="""
    __shared__ float scratch[DOWN_WARPS * 4 * 32];
    __shared__ int expert[TOKENS * K];
    __shared__ ulong pairs[TOKENS * K];
    down<TOKENS, K, D, I>(
        act, ids, w2, w2_scale, shared_w2, shared_w2_scale, out, scratch, expert, pairs,
        blockIdx.x, threadIdx.x / 32, threadIdx.x % 32);""",
    is_native=True,
    blocks=3,
)


def moe_few_tokens(x: mx.array, routing: Routing, ffn: FfnWeights, *, limit: float) -> mx.array:
    """`experts.moe` for at most 8 tokens in bf16 in two launches; D and I are multiples of 32."""
    (T, D), E, router = x.shape, routing.scores.shape[1], routing.router
    I_D = ffn.w1.weight.shape[1]
    template = [("TOKENS", T), ("K", router.k), ("D", D), ("I", I_D)]
    act, ids = _GATE_UP(
        [
            *(x, routing.scores, router.bias, router.scaling_factor),
            *(*_parts(ffn.w1), *_parts(ffn.w3)),
            *(*_parts(ffn.shared_w1), *_parts(ffn.shared_w3), limit),
        ],
        template=[*template, ("E", E), ("NORM", router.norm_topk_prob)],
        grid=(I_D // _ROWS * _GATE_THREADS, T * router.k + 1, 1),
        threadgroup=(_GATE_THREADS, 1, 1),
        shapes=[(T, router.k + 1, I_D), (T, router.k)],
        dtypes=[mx.bfloat16, mx.int32],
    )
    (out,) = _DOWN(
        [act, ids, *_parts(ffn.w2), *_parts(ffn.shared_w2)],
        template=template,
        grid=(D // _ROWS * _DOWN_THREADS, 1, 1),
        threadgroup=(_DOWN_THREADS, 1, 1),
        shapes=[(T, D)],
        dtypes=[mx.bfloat16],
    )
    return out


def _parts(w: Fp4 | Fp8) -> tuple[mx.array, mx.array]:
    return w.weight, w.scale
