"""Products with FP8 weights on NVIDIA GPUs, in bf16: the kernels of cuda/linear.cu.

Shapes: T tokens, K inputs, N outputs, G groups. Up to 32 rows read every byte of the weight once;
for more the weight is unpacked, which loses nothing, and MLX multiplies.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import mlx.core as mx

from mlx_engine.ops.launch import Kernel
from mlx_engine.weights import Fp8

MAX_ROWS = 32
# Outputs of a warp, K of its step, steps that it has under way, and the warps that fill a GPU.
_OUTPUTS = 16
_COLUMNS = 64
_DEPTH = 4
_BUSY_WARPS = 1200
_MAX_SPLIT = 16
_WARPS_OF_A_MULTIPROCESSOR = 20
_UNPACK_THREADS = 256
_UNPACK_CODES = 16

_CALL = """
    fp8_rows<M, {N}, K, G, SPLIT>(
        PlainX<K, G>{{x, int(blockIdx.y)}}, {weight}, {scale}, {out},
        scratch + team * (SPLIT * 128 * ((M + 7) / 8)), {tile}, blockIdx.y, warp % SPLIT, lane);"""
_BODY = """
    __shared__ float scratch[TEAMS * SPLIT * 128 * ((M + 7) / 8)];
    const int warp = threadIdx.x / 32, team = warp / SPLIT;
    const uint lane = threadIdx.x % 32;
    const int tile = blockIdx.x * TEAMS + team;"""
_ROWS = Kernel(
    "linear",
    "fp8_rows",
    ("x", "weight", "scale"),
    ("out",),
    _BODY + _CALL.format(N="N", weight="weight", scale="scale", out="out", tile="tile"),
    is_native=True,
)
_FIRST = _CALL.format(N="NA", weight="weight_a", scale="scale_a", out="out_a", tile="tile")
_SECOND = _CALL.format(N="NB", weight="weight_b", scale="scale_b", out="out_b", tile="tile - FIRST")
_PAIR = Kernel(
    "linear",
    "fp8_rows_pair",
    ("x", "weight_a", "scale_a", "weight_b", "scale_b"),
    ("out_a", "out_b"),
    f"{_BODY}\n    if (tile < FIRST) {{{_FIRST}\n    }} else {{{_SECOND}\n    }}",
    is_native=True,
)
_UNPACK = Kernel(
    "linear",
    "unpack_fp8",
    ("weight", "scale"),
    ("out",),
    """
    const size_t at = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
    if (at < size_t(G) * N * K) {
        unpack_fp8<N, K>(weight, scale, out, at);
    }""",
    is_native=True,
)


def fp8_rows(x: mx.array, w: Fp8) -> mx.array:
    """x bf16 [T, ..], G * K values a token, times each group's w [G, N, K] or [N, K]: [T, G * N].

    Its shapes are those that callers have, since a reshape costs the host as much as half a launch.
    """
    (out,) = _launch(_ROWS, x, (w,))
    return out


def fp8_rows_pair(x: mx.array, a: Fp8, b: Fp8) -> tuple[mx.array, mx.array]:
    """x bf16 [T, K] times two weights of the same K in one launch: [T, N_a] and [T, N_b]."""
    out_a, out_b = _launch(_PAIR, x, (a, b))
    return out_a, out_b


def fp8_product(x: mx.array, w: Fp8) -> mx.array:
    """x bf16 [T, G, K] times w as in `fp8_rows`, for many rows: [T, G, N]."""
    T, G, K = x.shape
    wide = unpacked(w)
    if G == 1:
        return (x.reshape(T, K) @ wide.reshape(-1, K).T).reshape(T, 1, -1)
    return mx.contiguous((x.swapaxes(0, 1) @ wide.swapaxes(-1, -2)).swapaxes(0, 1))


def unpacked(w: Fp8) -> mx.array:
    """A weight [G, N, K] or [N, K] as bf16, exactly."""
    *lead, N, words = w.weight.shape
    G, K = lead[0] if lead else 1, words * 4
    lanes = G * N * K // _UNPACK_CODES
    (out,) = _UNPACK(
        [w.weight, w.scale],
        template=[("G", G), ("N", N), ("K", K)],
        grid=(-(-lanes // _UNPACK_THREADS) * _UNPACK_THREADS, 1, 1),
        threadgroup=(_UNPACK_THREADS, 1, 1),
        shapes=[(*lead, N, K)],
        dtypes=[mx.bfloat16],
    )
    return out


def _launch(kernel: Kernel, x: mx.array, weights: Sequence[Fp8]) -> list[mx.array]:
    *lead, _, words = weights[0].weight.shape
    T, G, K = x.shape[0], lead[0] if lead else 1, 4 * words
    assert x.size == T * G * K, f"x {x.shape} does not fit the weight {weights[0].weight.shape}"
    outputs = [w.weight.shape[-2] for w in weights]
    tiles = [-(-N // _OUTPUTS) for N in outputs]
    split = split_of(G * sum(tiles), -(-K // _COLUMNS))
    # A block of a pair must not hold tiles of both weights.
    teams = 1 if len(weights) > 1 else max(1, 4 // split)
    if len(weights) == 1:
        sizes = [("N", outputs[0])]
    else:
        sizes = [("NA", outputs[0]), ("NB", outputs[1]), ("FIRST", tiles[0])]
    threads = 32 * split * teams
    # For 8 rows a multiprocessor can have room for so many warps; more rows take more registers.
    blocks = max(1, _WARPS_OF_A_MULTIPROCESSOR * 32 // threads) if T <= 8 else 1
    return _with_blocks(kernel, blocks)(
        [x, *(array for w in weights for array in (w.weight, w.scale))],
        template=[("M", T), ("K", K), ("G", G), ("SPLIT", split), ("TEAMS", teams), *sizes],
        grid=(-(-sum(tiles) // teams) * threads, G, 1),
        threadgroup=(threads, 1, 1),
        shapes=[(T, G * N) for N in outputs],
        dtypes=[mx.bfloat16] * len(outputs),
    )


@cache
def _with_blocks(kernel: Kernel, blocks: int) -> Kernel:
    return replace(kernel, blocks=blocks)


def split_of(tiles: int, chunks: int) -> int:
    """How many warps share K: enough to keep the memory busy, each with its steps under way."""
    split = 1
    while split < _MAX_SPLIT and tiles * split < _BUSY_WARPS and chunks >= split * _DEPTH * 2:
        split *= 2
    return split
