"""The routed experts for many tokens: sorted products of tiles, listed without a read-back.

Shapes: T tokens, k chosen of E experts, D hidden_size, I moe_intermediate_size. The shared expert
and the choice between this and other ways are in `experts`.
"""

import mlx.core as mx

from mlx_engine.ops import expert_tiles_native, launch
from mlx_engine.ops.launch import Kernel
from mlx_engine.weights import FfnWeights, Fp4

_LIST_TILES = Kernel(
    family="expert_tiles",
    name="moe_list_tiles",
    inputs=("ids", "order"),
    outputs=("tiles",),
    body="""
        threadgroup uint scratch[SIMD];
        const uint pairs = order_shape[0];
        list_tiles<M, E>(
            ids, order, tiles, scratch, pairs, pairs / M + min(pairs, uint(E)),
            thread_index_in_threadgroup, threads_per_threadgroup.x,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)
_GATE_UP_TILES = Kernel(
    family="expert_tiles",
    name="moe_gate_up_tiles",
    inputs=("x", "order", "weights", "tiles", "w1", "w1_scale", "w3", "w3_scale", "limit"),
    outputs=("act",),
    body="""
        threadgroup float memory[tile_words<T, M>()];
        gate_up_tile<T, M, K, D, I>(
            x, order, weights, tiles + 4 * threadgroup_position_in_grid.y, w1, w1_scale, w3,
            w3_scale, limit, act, memory, threadgroup_position_in_grid.x,
            thread_index_in_threadgroup, simdgroup_index_in_threadgroup);
    """,
)
_DOWN_TILES = Kernel(
    family="expert_tiles",
    name="moe_down_tiles",
    inputs=("act", "order", "tiles", "w2", "w2_scale"),
    outputs=("out",),
    body="""
        threadgroup float memory[tile_words<T, M>()];
        down_tile<T, M, D, I>(
            act, order, tiles + 4 * threadgroup_position_in_grid.y, w2, w2_scale, out, memory,
            threadgroup_position_in_grid.x, thread_index_in_threadgroup,
            simdgroup_index_in_threadgroup);
    """,
)
# TILE_THREADS and TILE_COLUMNS of expert_tiles.metal; one threadgroup of a thread an expert lists
# the tiles.
TILE_THREADS = 128
TILE_COLUMNS = 64
MAX_EXPERTS = 1024


def tile_rows(pairs: int, E: int) -> int:
    """Rows of a tile: 8, 16 or 32, which holds twice the mean number of pairs of an expert.

    Experts are chosen unevenly; larger tiles waste products, smaller ones read weights again.
    """
    return next((rows for rows in (8, 16) if rows * E >= 2 * pairs), 32)


def routed_tiles_metal(
    x: mx.array, ids: mx.array, weights: mx.array, ffn: FfnWeights, *, limit: float
) -> mx.array:
    """The weighted sum of the chosen experts' outputs alone, in three launches: f32 [T, D].

    MLX sorts the pairs, since one sort is as good as another, and adds up the slots; the shared
    expert is left to the dense product. D and I are multiples of 32, E is at most MAX_EXPERTS.
    """
    (T, D), k = x.shape, ids.shape[1]
    E, I_D = ffn.w1.weight.shape[:2]
    native = launch.is_native("expert_tiles") and x.dtype == mx.bfloat16
    native = native and expert_tiles_native.fits(D, I_D)
    pairs = T * k
    M = expert_tiles_native.TILE_PAIRS if native else tile_rows(pairs, E)
    order = mx.argsort(ids.reshape(-1))
    tile_count = pairs // M + min(pairs, E)
    threads = -(-E // 32) * 32
    template = [("T", x.dtype), ("M", M), ("D", D), ("I", I_D)]
    (tiles,) = _LIST_TILES(
        [ids, order],
        template=[("M", M), ("E", E)],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        shapes=[(tile_count, 4)],
        dtypes=[mx.uint32],
    )
    if native:
        out = expert_tiles_native.routed(x, order, weights, tiles, ffn, limit=limit)
        return mx.sum(out.reshape(T, k, D), axis=1)
    (act,) = _GATE_UP_TILES(
        [x, order, weights, tiles, *_parts(ffn.w1), *_parts(ffn.w3), limit],
        template=[*template, ("K", k)],
        grid=(I_D // (TILE_COLUMNS // 2) * TILE_THREADS, tile_count, 1),
        threadgroup=(TILE_THREADS, 1, 1),
        shapes=[(pairs, I_D)],
        dtypes=[x.dtype],
    )
    (out,) = _DOWN_TILES(
        [act, order, tiles, *_parts(ffn.w2)],
        template=template,
        grid=(-(-D // TILE_COLUMNS) * TILE_THREADS, tile_count, 1),
        threadgroup=(TILE_THREADS, 1, 1),
        shapes=[(pairs, D)],
        dtypes=[mx.float32],
    )
    return mx.sum(out.reshape(T, k, D), axis=1)


def _parts(w: Fp4) -> tuple[mx.array, mx.array]:
    return w.weight, w.scale
