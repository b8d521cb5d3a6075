"""The routed experts for many tokens on NVIDIA GPUs, in bf16: the kernels of cuda/expert_tiles.cu.

Shapes: T tokens, k chosen of E experts, D hidden_size, I moe_intermediate_size.
"""

import mlx.core as mx

from mlx_engine.ops.launch import Kernel
from mlx_engine.weights import FfnWeights

# Pairs of a tile, threads of a block, and rows that it makes of act and of the output.
TILE_PAIRS = 64
_THREADS = 256
_ACT_ROWS = 128
_OUT_ROWS = 256
_CHUNK = 128
_STAGE_BYTES = 3 * TILE_PAIRS * 320

_ARRANGE = Kernel(
    family="expert_tiles",
    name="arrange",
    inputs=("x",),
    outputs=("out",),
    body="""
    arrange(x, out, (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8);""",
    is_native=True,
)
_MEMORY = """
    extern __shared__ uint4 memory[];
    __shared__ int place[TOKENS];
    uchar* stages = reinterpret_cast<uchar*>(memory);"""
_GATE_UP = Kernel(
    family="expert_tiles",
    name="moe_gate_up_tiles",
    inputs=("x", "order", "weights", "tiles", "w1", "w1_scale", "w3", "w3_scale", "limit"),
    outputs=("act",),
    body=_MEMORY
    + """
    gate_up_tile<K, D, I>(
        x, order, weights, tiles + 4 * blockIdx.y, w1, w1_scale, w3, w3_scale, limit, act, stages,
        place, blockIdx.x, threadIdx.x);""",
    is_native=True,
    shared_bytes=_STAGE_BYTES,
    blocks=2,
)
_DOWN = Kernel(
    family="expert_tiles",
    name="moe_down_tiles",
    inputs=("act", "order", "tiles", "w2", "w2_scale"),
    outputs=("out",),
    body=_MEMORY
    + """
    down_tile<D, I>(
        act, order, tiles + 4 * blockIdx.y, w2, w2_scale, out, stages, place, blockIdx.x,
        threadIdx.x);""",
    is_native=True,
    shared_bytes=_STAGE_BYTES,
    blocks=2,
)


def fits(D: int, I_D: int) -> bool:
    """Whether the widths are whole blocks of these kernels."""
    return D % _OUT_ROWS == 0 and I_D % _ACT_ROWS == 0 and I_D >= 2 * _CHUNK


def routed(
    x: mx.array,
    order: mx.array,
    weights: mx.array,
    tiles: mx.array,
    ffn: FfnWeights,
    *,
    limit: float,
) -> mx.array:
    """What the chosen experts of every pair give, weighted: f32 [T * k, D].

    x: bf16 [T, D], order: uint32 [T * k], the pairs sorted by expert, weights: f32 [T, k], tiles:
    uint32 [tiles, 4] of TILE_PAIRS pairs.
    """
    (T, D), k = x.shape, weights.shape[1]
    I_D, pairs, count = ffn.w1.weight.shape[1], T * k, tiles.shape[0]
    (rows,) = _ARRANGE(
        [x],
        grid=(T * D // 8, 1, 1),
        threadgroup=(D // 8 if D <= 8192 else _OUT_ROWS // 8, 1, 1),
        shapes=[x.shape],
        dtypes=[mx.bfloat16],
    )
    (act,) = _GATE_UP(
        [
            *(rows, order, weights, tiles, ffn.w1.weight, ffn.w1.scale),
            *(ffn.w3.weight, ffn.w3.scale, limit),
        ],
        template=[("K", k), ("D", D), ("I", I_D)],
        grid=(I_D // _ACT_ROWS * _THREADS, count, 1),
        threadgroup=(_THREADS, 1, 1),
        shapes=[(pairs, I_D)],
        dtypes=[mx.bfloat16],
    )
    (out,) = _DOWN(
        [act, order, tiles, ffn.w2.weight, ffn.w2.scale],
        template=[("D", D), ("I", I_D)],
        grid=(D // _OUT_ROWS * _THREADS, count, 1),
        threadgroup=(_THREADS, 1, 1),
        shapes=[(pairs, D)],
        dtypes=[mx.float32],
    )
    return out
