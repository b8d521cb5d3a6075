// The router for up to 8 tokens in bf16: metal/router.metal says what its scores and choices are.
//
// router_scores: a block an expert, whose row its 128 threads ask for at once, 16 bytes each. x is
// made where it is read, as mhc.cu makes it, and the first block keeps it; beside these blocks one a
// token makes the coefficients of mhc.cu. choose_experts: a warp a token, E / 32 scores a lane, two
// reductions for each expert chosen; the experts' first kernel calls it in every block. Shared
// memory: 16 bytes a token.

constexpr int SCORE_THREADS = 128;
constexpr int SCORE_WARPS = SCORE_THREADS / 32;

template <int TOKENS, int D, int E>
inline void router_scores(
    const float* sums,
    float norm_eps,
    const bfloat16_t* collapsed,
    const bfloat16_t* norm_weight,
    const bfloat16_t* gate,
    float temp,
    float* scores,
    bfloat16_t* x,
    float (&scratch)[SCORE_WARPS][TOKENS],
    float (&factors)[TOKENS],
    int expert,
    int thread_index) {
    constexpr int EACH = (D / 8 + SCORE_THREADS - 1) / SCORE_THREADS;
    const int warp = thread_index / 32, lane = thread_index % 32;
    uint4 words[EACH], norms[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = thread_index + i * SCORE_THREADS;
        const bool is_inside = at < D / 8;
        words[i] = is_inside ? load_once(gate + size_t(expert) * D + at * 8) : uint4(0);
        norms[i] =
            is_inside ? *reinterpret_cast<const uint4*>(norm_weight + at * 8) : uint4(0);
    }
    constexpr int SLICES = (D + SLICE - 1) / SLICE;
    for (int t = warp; t < TOKENS; t += SCORE_WARPS) {
        const float r = norm_factor<D>(sums + t * SLICES * SUMS, norm_eps, lane);
        if (lane == 0) {
            factors[t] = r;
        }
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const float r = factors[t];
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = thread_index + i * SCORE_THREADS;
            if (at < D / 8) {
                const uint4 v = *reinterpret_cast<const uint4*>(collapsed + t * D + at * 8);
                uint4 made;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint pair = normed_pair(v[j], r, norms[i][j]);
                    made[j] = pair;
                    sum += as_type<float>(pair << 16) * as_type<float>(words[i][j] << 16);
                    sum += as_type<float>(pair & 0xffff0000u)
                        * as_type<float>(words[i][j] & 0xffff0000u);
                }
                if (expert == 0) {
                    *reinterpret_cast<uint4*>(x + t * D + at * 8) = made;
                }
            }
        }
        sum = simd_sum(sum);
        if (lane == 0) {
            scratch[warp][t] = sum;
        }
    }
    __syncthreads();
    if (thread_index < TOKENS) {
        float logit = 0.0f;
#pragma unroll
        for (int w = 0; w < SCORE_WARPS; w++) {
            logit += scratch[w][thread_index];
        }
        logit /= temp;
        scores[thread_index * E + expert] = sqrtf(fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit))));
    }
}

// An integer above 0 in the order of floats.
inline uint float_order(float x) {
    const uint bits = as_type<uint>(x);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The K experts of one token and their weights, by a warp; the pointers are the token's.
template <int K, int E, bool NORM>
inline void choose_experts(
    const float* scores, const float* bias, float scaling, int* ids, float* weights, int lane) {
    constexpr int EACH = (E + 31) / 32;
    uint order[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int e = i * 32 + lane;
        order[i] = e < E ? float_order(scores[e] + bias[e]) : 0;
    }
    int own = E;
#pragma unroll
    for (int k = 0; k < K; k++) {
        uint top = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            top = max(top, order[i]);
        }
        top = __reduce_max_sync(ALL_LANES, top);
        uint first = E;
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--) {
            first = order[i] == top ? uint(i * 32 + lane) : first;
        }
        first = __reduce_min_sync(ALL_LANES, first);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            order[i] = i * 32 + lane == int(first) ? 0 : order[i];
        }
        own = lane == k ? int(first) : own;
    }
    // Ascending: the place of an expert is how many of the chosen ones lie below it.
    const float score = lane < K ? scores[own] : 0.0f;
    int place = 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        place += __shfl_sync(ALL_LANES, own, k) < own;
    }
    const float total = NORM ? simd_sum(score) + 1e-20f : 1.0f;
    if (lane < K) {
        ids[place] = own;
        weights[place] = score / total * scaling;
    }
}
