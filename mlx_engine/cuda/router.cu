// The router's scores for up to 8 tokens, x and gate in bf16: metal/router.metal says what they are.
//
// A block an expert, whose row its 128 threads ask for at once, 16 bytes each. Shared memory: 128
// bytes.

constexpr int THREADS = 128;

template <int TOKENS, int D, int E>
inline void router_scores(
    const bfloat16_t* x,
    const bfloat16_t* gate,
    float temp,
    float* scores,
    float (&scratch)[THREADS / 32][TOKENS],
    int expert,
    int thread_index) {
    constexpr int EACH = (D / 8 + THREADS - 1) / THREADS;
    const int warp = thread_index / 32, lane = thread_index % 32;
    uint4 words[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = thread_index + i * THREADS;
        words[i] = at < D / 8 ? load_once(gate + size_t(expert) * D + at * 8) : uint4(0);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = thread_index + i * THREADS;
            if (at < D / 8) {
                const uint4 v = *reinterpret_cast<const uint4*>(x + t * D + at * 8);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sum += as_type<float>(v[j] << 16) * as_type<float>(words[i][j] << 16);
                    sum += as_type<float>(v[j] & 0xffff0000u)
                        * as_type<float>(words[i][j] & 0xffff0000u);
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
        for (int w = 0; w < THREADS / 32; w++) {
            logit += scratch[w][thread_index];
        }
        logit /= temp;
        scores[thread_index * E + expert] = sqrtf(fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit))));
    }
}
