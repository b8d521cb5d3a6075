// The second launch between two sublayers: metal/mhc.metal says what it computes and from what.
//
// A block of THREADS threads a token. Warps share the 26 sums; then one warp makes the coefficients
// while all normalise. What takes time is the chain of Sinkhorn's rounds, so that they divide by
// reciprocals of 1 ulp. Shared memory: 104 bytes.

constexpr int HC = 4;
constexpr int COLUMNS = (2 + HC) * HC;
constexpr int SUMS = COLUMNS + 2;
constexpr int SLICE = 64;

template <int D, int WARPS>
inline void total_sums(const float* sums, float* totals, int warp, int lane) {
    constexpr int SLICES = (D + SLICE - 1) / SLICE;
    constexpr int ROUNDS = (SUMS + WARPS - 1) / WARPS;
    float own[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        own[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < (SLICES + 31) / 32; i++) {
            if (i * 32 + lane < SLICES && r * WARPS + warp < SUMS) {
                own[r] += sums[(i * 32 + lane) * SUMS + r * WARPS + warp];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const float total = simd_sum(own[r]);
        if (lane == 0 && r * WARPS + warp < SUMS) {
            totals[r * WARPS + warp] = total;
        }
    }
    __syncthreads();
}

inline float exchanged(float x, int mask) {
    return __shfl_xor_sync(ALL_LANES, x, mask);
}

// The mixing weights of a token from its totals, in one warp; pointers are the token's.
template <int D, int ITERS>
inline void coefficients(
    const float* totals,
    const float* base,
    const float* scale,
    const float* epsilons,
    float* pre,
    float* post,
    float* comb,
    int lane) {
    const float hc_eps = epsilons[0];
    const float r = rsqrtf(totals[COLUMNS] / float(HC * D) + epsilons[1]);
    if (lane < 2 * HC) {
        const float m = totals[lane] * r * scale[lane / HC] + base[lane];
        const float power = expf(-fabsf(m));
        const float gate = (m < 0.0f ? power : 1.0f) / (1.0f + power);
        if (lane < HC) {
            pre[lane] = gate + hc_eps;
        } else {
            post[lane - HC] = 2.0f * gate;
        }
    }
    // Lane 4 i + j holds comb[i, j]; the upper lanes repeat the lower ones.
    const int cell = lane % (HC * HC);
    float c = totals[2 * HC + cell] * r * scale[2] + base[2 * HC + cell];
    float top = fmaxf(c, exchanged(c, 1));
    top = fmaxf(top, exchanged(top, 2));
    c = expf(c - top);
    float total = c + exchanged(c, 1);
    total += exchanged(total, 2);
    c = __fdividef(c, total) + hc_eps;
#pragma unroll 1
    for (int i = 0; i < ITERS; i++) {
        if (i > 0) {
            total = c + exchanged(c, 1);
            total += exchanged(total, 2);
            c = __fdividef(c, total + hc_eps);
        }
        total = c + exchanged(c, 4);
        total += exchanged(total, 8);
        c = __fdividef(c, total + hc_eps);
    }
    if (lane < HC * HC) {
        comb[lane] = c;
    }
}

// The norm of a collapsed input whose squares have the sum `squares`; pointers are the token's.
template <typename T, typename W, int D, int THREADS>
inline void scale_to_norm(
    const T* collapsed, const W* weight, float squares, float eps, T* x, int thread_index) {
    const float r = rsqrtf(squares / float(D) + eps);
#pragma unroll
    for (int i = 0; i < (D / 2 + THREADS - 1) / THREADS; i++) {
        const int d = 2 * (thread_index + i * THREADS);
        if (d < D) {
            x[d] = T(float(collapsed[d]) * r * float(weight[d]));
            x[d + 1] = T(float(collapsed[d + 1]) * r * float(weight[d + 1]));
        }
    }
}

// One over the root of the mean of a collapsed input's squares, from its slices: all of a warp.
template <int D>
inline float norm_factor(const float* sums, float norm_eps, int lane) {
    constexpr int SLICES = (D + SLICE - 1) / SLICE;
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < (SLICES + 31) / 32; i++) {
        if (i * 32 + lane < SLICES) {
            own += sums[(i * 32 + lane) * SUMS + COLUMNS + 1];
        }
    }
    return rsqrtf(simd_sum(own) / float(D) + norm_eps);
}

// Two values of x from two of a collapsed input and of the norm's weight.
inline uint normed_pair(uint collapsed, float r, uint weight) {
    const float low = as_type<float>(collapsed << 16) * r * as_type<float>(weight << 16);
    const float high =
        as_type<float>(collapsed & 0xffff0000u) * r * as_type<float>(weight & 0xffff0000u);
    return as_type<uint>(__floats2bfloat162_rn(low, high));
}
