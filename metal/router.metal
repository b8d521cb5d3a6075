// The router: which experts see a token, and with what weight (docs/model.md, section 3.7).
//
//   score[t, e] = sqrt(softplus(gate[e] x[t] / temp))
//   ids[t] = the k experts of the largest score + bias, ties to the lowest, ascending
//   weights[t, j] = score[t, ids[t, j]] / (their sum + 1e-20 if NORM, else 1) * scaling
//
// x[t] is made where it is read, T(collapsed * r * norm_weight) as in mhc.metal, whose sums over
// slices are read for r. collapsed: T [tokens, D], norm_weight N [D], gate: W [E, D], T, N and W
// float or bfloat, bias: float [E]; scores: float [tokens, E], ids: int [tokens, k], weights:
// float [tokens, k]. All sums are f32.
//
// router_scores: a threadgroup of 128 threads an expert, which reads its row once for up to 8
// tokens; grid (E + tokens) * 128, where the last ones are mhc.metal's second launch, one for each
// token, with 4 simdgroups instead of 16: they run beside the others. At the released widths 3.9 MB
// over 384 threadgroups of 4 simdgroups, 19 simdgroups for each of 80 cores; one simdgroup a row
// would be 5. Each also makes x, from 20 KB that stay in the cache. 2 operations for each 2 bytes
// of the gate at one token, and about 4 to make a value of x. Threadgroup memory: 128 bytes.
// router_choose: a simdgroup a token, E / 32 neighbouring scores in each lane's registers; k rounds
// of two simd operations. It reads 1.5 KB a token; experts.metal calls it in each threadgroup that
// needs the choice. About 2 operations a byte and round, no threadgroup memory. By itself, for a
// prefill's tokens, it is a threadgroup of one simdgroup a token, 26 a core in a chunk of 2,048.

constant constexpr uint VALUES = 8;

// log(1 + x) for x from 0 to 1: 2 atanh(x / (2 + x)) by its series, whose next term is below 2^-27.
inline float log_one_plus(float x) {
    const float z = x / (2.0f + x), s = z * z;
    float sum = 1.0f / 15.0f;
    sum = sum * s + 1.0f / 13.0f;
    sum = sum * s + 1.0f / 11.0f;
    sum = sum * s + 1.0f / 9.0f;
    sum = sum * s + 1.0f / 7.0f;
    sum = sum * s + 1.0f / 5.0f;
    sum = sum * s + 1.0f / 3.0f;
    sum = sum * s + 1.0f;
    return 2.0f * z * sum;
}

// The scores of one expert for TOKENS tokens.
template <
    typename T, typename N, typename W, uint TOKENS, uint D, uint E>
inline void router_scores(
    const device float* sums,
    float norm_eps,
    const device T* collapsed,
    const device N* norm_weight,
    const device W* gate,
    float temp,
    device float* scores,
    threadgroup float* scratch,
    uint expert,
    uint thread_index,
    uint threads,
    uint simdgroup,
    uint lane) {
    const device W* row = gate + expert * D;
    float sum[TOKENS];
    float r[TOKENS];
    DS41_UNROLL
    for (uint t = 0; t < TOKENS; t++) {
        sum[t] = 0.0f;
        r[t] = norm_factor<D>(total_sum<D>(sums, t, COLUMNS + 1, lane), norm_eps);
    }
    for (uint d = thread_index * VALUES; d < D; d += threads * VALUES) {
        float w[VALUES];
        float norm[VALUES];
        DS41_UNROLL
        for (uint i = 0; i < VALUES; i += 4) {
            const vec<W, 4> v = *reinterpret_cast<const device vec<W, 4>*>(row + d + i);
            const vec<N, 4> n = *reinterpret_cast<const device vec<N, 4>*>(norm_weight + d + i);
            DS41_UNROLL
            for (uint j = 0; j < 4; j++) {
                w[i + j] = float(v[j]);
                norm[i + j] = float(n[j]);
            }
        }
        DS41_UNROLL
        for (uint t = 0; t < TOKENS; t++) {
            DS41_UNROLL
            for (uint i = 0; i < VALUES; i += 4) {
                const vec<T, 4> v =
                    *reinterpret_cast<const device vec<T, 4>*>(collapsed + t * D + d + i);
                DS41_UNROLL
                for (uint j = 0; j < 4; j++) {
                    sum[t] += float(T(float(v[j]) * r[t] * norm[i + j])) * w[i + j];
                }
            }
        }
    }
    DS41_UNROLL
    for (uint t = 0; t < TOKENS; t++) {
        const float logit = group_sum(sum[t], scratch, threads / SIMD, simdgroup, lane) / temp;
        if (thread_index == 0) {
            const float softplus = max(logit, 0.0f) + log_one_plus(exp(-abs(logit)));
            scores[t * E + expert] = sqrt(softplus);
        }
    }
}

// An integer in the order of floats, above 0. The zeros differ, but no sum of a score, which is at
// least +0, is -0.
inline uint float_order(float x) {
    const uint bits = as_type<uint>(x);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// One simdgroup chooses the experts of one token; the pointers are the token's.
template <
    uint K, uint E, bool NORM, typename Scores, typename Bias, typename Ids, typename Weights>
inline void router_choose(
    Scores scores,
    Bias bias,
    float scaling,
    Ids ids,
    Weights weights,
    uint lane) {
    constexpr uint OWN = (E + SIMD - 1) / SIMD;
    float score[OWN];
    uint key[OWN];
    bool chosen[OWN];
    DS41_UNROLL
    for (uint i = 0; i < OWN; i++) {
        const uint e = lane * OWN + i;
        score[i] = e < E ? scores[e] : 0.0f;
        key[i] = e < E ? float_order(score[i] + bias[e]) : 0;
        chosen[i] = false;
    }
    for (uint round = 0; round < K; round++) {
        uint best = 0;
        DS41_UNROLL
        for (uint i = 0; i < OWN; i++) {
            best = chosen[i] ? best : max(best, key[i]);
        }
        const uint top = simd_max(best);
        // The first of equals: lanes hold neighbouring experts, in order.
        bool is_mine = simd_min(best == top ? lane : SIMD) == lane;
        DS41_UNROLL
        for (uint i = 0; i < OWN; i++) {
            const bool take = is_mine && !chosen[i] && key[i] == top;
            chosen[i] = chosen[i] || take;
            is_mine = is_mine && !take;
        }
    }
    uint count = 0;
    float sum = 0.0f;
    DS41_UNROLL
    for (uint i = 0; i < OWN; i++) {
        count += chosen[i] ? 1 : 0;
        sum += chosen[i] ? score[i] : 0.0f;
    }
    const float total = NORM ? simd_sum(sum) + 1e-20f : 1.0f;
    uint place = simd_prefix_exclusive_sum(count);
    DS41_UNROLL
    for (uint i = 0; i < OWN; i++) {
        if (chosen[i]) {
            ids[place] = int(lane * OWN + i);
            weights[place] = score[i] / total * scaling;
            place++;
        }
    }
}
