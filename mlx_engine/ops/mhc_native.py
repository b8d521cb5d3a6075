"""The second launch between two sublayers on NVIDIA GPUs: the kernel of cuda/mhc.cu."""

from mlx_engine.ops.launch import Kernel

# Inputs, outputs, template and geometry are those of `mhc`'s own.
FINISH = Kernel(
    "mhc",
    "mhc_finish",
    ("sums", "base", "scale", "epsilons", "collapsed", "norm_weight"),
    ("pre", "post", "comb", "x"),
    """
    __shared__ float totals[SUMS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x;
    total_sums<D, THREADS / 32>(
        sums + size_t(token) * ((D + SLICE - 1) / SLICE) * SUMS, totals, warp, lane);
    if (warp == 0) {
        coefficients<D, ITERS>(
            totals, base, scale, epsilons, pre + token * HC, post + token * HC,
            comb + token * HC * HC, lane);
    }
    scale_to_norm<T, W, D, THREADS>(
        collapsed + size_t(token) * D, norm_weight, totals[COLUMNS + 1], epsilons[1],
        x + size_t(token) * D, threadIdx.x);""",
    is_native=True,
)
