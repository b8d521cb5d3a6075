"""Between two layers: the streams, and what the next attention begins with (sections 3.2, 3.4).

For a single token on NVIDIA GPUs its first two products share a launch with `mhc_between`'s second:
a block of 16 outputs of either weight makes x where it reads it, and the last block makes the
coefficients and keeps x. Shapes: T tokens, hc streams, D hidden_size.
"""

import mlx.core as mx

from mlx_engine.ops import launch
from mlx_engine.ops.launch import Kernel
from mlx_engine.ops.linear import fp8_linear_pair
from mlx_engine.ops.linear_native import split_of
from mlx_engine.ops.mhc import (
    MhcSublayer,
    Mixing,
    between_slices,
    is_on,
    mhc_between,
)
from mlx_engine.ops.mhc_bytes import HC
from mlx_engine.weights import Fp8, MhcWeights

_TILE_ROWS = 16
_CHUNK = 64

_PROJECT = Kernel(
    family="linear",
    name="mhc_project",
    inputs=(
        *("sums", "base", "scale", "epsilons", "collapsed", "norm_weight"),
        *("weight_a", "scale_a", "weight_b", "scale_b"),
    ),
    outputs=("out_a", "out_b", "pre", "post", "comb", "x"),
    body="""
    __shared__ float scratch[SPLIT * 128];
    __shared__ float totals[SUMS];
    // A lane's share of x from the collapsed input, as scale_to_norm makes it.
    struct NormedX {
        const bfloat16_t* collapsed;
        const bfloat16_t* norm_weight;
        float r;
        inline void load(int, int k, bool is_inside, uint* pairs) const {
            uint words[E4m3::CODES / 2];
#pragma unroll
            for (int i = 0; i < E4m3::CODES / 8; i++) {
                uint4 v = uint4(0), weight = uint4(0);
                if (is_inside) {
                    v = reinterpret_cast<const uint4*>(collapsed + k)[i];
                    weight = reinterpret_cast<const uint4*>(norm_weight + k)[i];
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    words[4 * i + j] = normed_pair(v[j], r, weight[j]);
                }
            }
#pragma unroll
            for (int i = 0; i < E4m3::CODES / 2; i += E4m3::PAIRS) {
                E4m3::arrange(words + i, pairs + i);
            }
        }
    };
    const int block = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (block == TILES) {
        total_sums<K, SPLIT>(sums, totals, warp, lane);
        if (warp == 0) {
            coefficients<K, ITERS>(totals, base, scale, epsilons, pre, post, comb, lane);
        }
        scale_to_norm<bfloat16_t, bfloat16_t, K, SPLIT * 32>(
            collapsed, norm_weight, totals[COLUMNS + 1], epsilons[1], x, threadIdx.x);
        return;
    }
    const NormedX from{collapsed, norm_weight, norm_factor<K>(sums, epsilons[1], lane)};
    if (block < FIRST) {
        fp8_rows<1, NA, K, 1, SPLIT>(
            from, weight_a, scale_a, out_a, scratch, block, 0, warp, lane);
    } else {
        fp8_rows<1, NB, K, 1, SPLIT>(
            from, weight_b, scale_b, out_b, scratch, block - FIRST, 0, warp, lane);
    }""",
    also=("mhc",),
    is_native=True,
)


@launch.falls_back
def mhc_project(
    h: mx.array, streams: mx.array, last: Mixing, pre: mx.array, to: MhcSublayer, a: Fp8, b: Fp8
) -> tuple[mx.array, mx.array, Mixing, tuple[mx.array, mx.array] | None]:
    """`mhc_between`, and x times two weights of D inputs where that costs no launch, else None.

    Returns streams, x [T, D], coefficients and the products [T, N_a] and [T, N_b].
    """
    dtypes = {h.dtype, streams.dtype, to.norm_weight.dtype}
    is_one = streams.shape[0] == 1 and launch.is_native("linear") and is_on(streams)
    if not is_one or dtypes != {mx.bfloat16}:
        return *mhc_between(h, streams, last, pre, to), None
    streams, collapsed, sums = between_slices(h, streams, last, pre, to)
    D, outputs = collapsed.shape[1], [w.weight.shape[0] for w in (a, b)]
    first, second = (-(-N // _TILE_ROWS) for N in outputs)
    split = split_of(first + second, -(-D // _CHUNK))
    threads = 32 * split
    out_a, out_b, *mixing, x = _PROJECT(
        [
            *(sums, to.w.base, to.w.scale, to.epsilons, collapsed, to.norm_weight),
            *(a.weight, a.scale, b.weight, b.scale),
        ],
        template=[
            *(("K", D), ("NA", outputs[0]), ("NB", outputs[1]), ("SPLIT", split)),
            *(("FIRST", first), ("TILES", first + second), ("ITERS", to.iters)),
        ],
        grid=((first + second + 1) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        shapes=[(1, outputs[0]), (1, outputs[1]), (1, HC), (1, HC), (1, HC, HC), (1, D)],
        dtypes=[mx.bfloat16, mx.bfloat16, *[mx.float32] * 3, mx.bfloat16],
    )
    return streams, x, Mixing(*mixing), (out_a, out_b)


@launch.probe("linear")
def agrees() -> bool:
    """Whether one launch gives what two do. Where it is not written for, nothing differs."""
    if not (launch.is_native("linear") and launch.is_on("mhc")):
        return True
    D = 256
    keys = iter(mx.random.split(mx.random.key(9), 8))
    streams, h = (
        mx.random.normal(s, key=next(keys)).astype(mx.bfloat16) for s in ((1, HC, D), (1, D))
    )
    shares = mx.softmax(mx.random.normal((1, 2 + HC, HC), key=next(keys)), axis=-1)
    last = Mixing(shares[:, 0], shares[:, 1], shares[:, 2:])
    w = MhcWeights(
        mx.random.normal(((2 + HC) * HC, HC * D), key=next(keys)) / D,
        mx.random.normal(((2 + HC) * HC,), key=next(keys)),
        mx.array([0.5, 0.25, 0.125]),
    )
    norm_weight = mx.random.normal((D,), key=next(keys)).astype(mx.bfloat16)
    to = MhcSublayer(w, norm_weight, iters=3, hc_eps=0.02, norm_eps=1e-20)
    words = mx.random.randint(0, 1 << 32, (128, D // 4), mx.uint32, key=next(keys)) & 0xFEFEFEFE
    scales = mx.random.randint(112, 118, (4, D // 32), mx.uint8, key=next(keys))
    a, b = Fp8(words[:96], scales[:3]), Fp8(words[96:], scales[3:])
    out, x, mixing, products = mhc_project(h, streams, last, last.pre, to, a, b)
    right, wanted, coefficients = mhc_between(h, streams, last, last.pre, to)
    assert products is not None
    pairs = [
        *((out, right), (x, wanted), (mixing.pre, coefficients.pre)),
        *((mixing.post, coefficients.post), (mixing.comb, coefficients.comb)),
        *zip(products, fp8_linear_pair(x, a, b), strict=True),
    ]
    return all(mx.allclose(p, q, rtol=2.0**-7, atol=1e-3).item() for p, q in pairs)
