"""The router for a few tokens on NVIDIA GPUs, in bf16: the kernel of cuda/router.cu."""

from mlx_engine.ops.launch import Kernel

# Inputs, outputs, template and geometry are those of `router`'s own.
SCORES = Kernel(
    family="router",
    name="router_scores",
    inputs=(
        *("sums", "base", "scale", "epsilons", "collapsed", "norm_weight"),
        *("gate", "gate_temp"),
    ),
    outputs=("scores", "pre", "post", "comb", "x"),
    body="""
    static_assert(THREADS == SCORE_THREADS, "both are of one geometry");
    __shared__ float scratch[SCORE_WARPS][TOKENS];
    __shared__ float factors[TOKENS];
    __shared__ float totals[SUMS];
    const int block = blockIdx.x, token = block - E;
    if (block < E) {
        router_scores<TOKENS, D, E>(
            sums, epsilons[1], collapsed, norm_weight, gate, gate_temp, scores, x, scratch, factors,
            block, threadIdx.x);
    } else {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        total_sums<D, SCORE_WARPS>(
            sums + size_t(token) * ((D + SLICE - 1) / SLICE) * SUMS, totals, warp, lane);
        if (warp == 0) {
            coefficients<D, ITERS>(
                totals, base, scale, epsilons, pre + token * HC, post + token * HC,
                comb + token * HC * HC, lane);
        }
    }""",
    also=("mhc",),
    is_native=True,
)
