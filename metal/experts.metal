// The mixture of experts: FP4 routed experts and the FP8 shared one, in two launches.
//
//   act[t, s] = w[t, s] * silu(min(gate, limit)) * clip(up, -limit, limit)
//       gate = w1[ids[t, s]] x[t], up = w3[ids[t, s]] x[t]; the shared expert is slot k, weight 1
//   out[t] = sum over s < k of w2[ids[t, s]] act[t, s], plus shared_w2 act[t, k]
//
// x: T [tokens, D], ids: int [tokens, k], different within a token, w: f32 [tokens, k], both from
// the router's scores f32 [tokens, E] and bias f32 [E],
// act: T [tokens, k + 1, I], out: T [tokens, D]; T is float or bfloat. Codes in words and e8m0
// scales as released: w1, w3 [E, I, D], w2 [E, D, I] with a scale per 32 inputs, the shared ones
// with a scale per 32 x 32 tile. Products and the sum over experts are f32, rounded once to T.
//
// For 1 to 8 tokens. The step of a lane is a chunk, 16 weights of a row: 8 bytes of FP4 or 16 of
// FP8, so that a simdgroup reads 256 or 512 bytes in a row. Codes become halves two at a time by
// masks and shifts, about 3 integer operations a weight, and meet x as a mixed product. An expert
// that several tokens chose is read once, for all of them: 2 flops a weight and token, 3.8 a byte
// of FP4 at one token.
//
// gate_up: a simdgroup makes GATE_ROWS rows of act for one expert, threadgroups of 256 threads,
// grid (I / GATE_ROWS * 32, tokens * k + 1): at the released widths 8,064 simdgroups for one
// token, 100 for each of 80 cores, more than can run at once. Each threadgroup first chooses the
// experts by the scores, a simdgroup a token, which router.metal does. That is repeated 1,008
// times for one token, on 3 KB that stay in the cache, 3 MB in all beside 100 MB of weights, and
// saves a launch. Threadgroup memory: 8 bytes for each of tokens * k places.
// down: a simdgroup makes DOWN_ROWS rows of out over all experts of all tokens, so that nothing is
// added up between threadgroups: 2,560 simdgroups, 32 a core, each with the loads of two rows under
// way. Threadgroup memory: 12 bytes for each of tokens * k ids.
// A simdgroup reads activations for its two rows alone: in down that is 1.7 times the bytes of the
// weights, which may come from a cache.

constant constexpr uint CHUNK = 16;
constant constexpr uint GATE_ROWS = 2;
constant constexpr uint DOWN_ROWS = 2;
constant constexpr uint NO_SLOT = 15;

// The two formats: a chunk's words, how far apart in a row the two weights of a pair lie, and what
// a decoded half must be multiplied with.
struct Fp4Format {
    typedef uint2 Words;
    static constant constexpr uint WORDS = 2;
    static constant constexpr uint APART = 4;
    static constant constexpr float UNIT = E2M1_UNIT;
};
struct Fp8Format {
    typedef uint4 Words;
    static constant constexpr uint WORDS = 4;
    static constant constexpr uint APART = 2;
    static constant constexpr float UNIT = 256.0f;
};

// Two codes that lie 16 bits apart in a word become halves at once.
inline void decode(uint2 words, thread half2* w) {
    DS41_UNROLL
    for (uint i = 0; i < 8; i++) {
        w[i] = e2m1_pair(words[i / 4], i % 4);
    }
}

// Exponent and mantissa of e4m3 moved to a half's place are the value times 2^-8, subnormals
// included.
inline void decode(uint4 words, thread half2* w) {
    DS41_UNROLL
    for (uint i = 0; i < 8; i++) {
        const uint q = words[i / 2] << (8 - i % 2 * 8);
        w[i] = as_type<half2>((q & 0x80008000u) | (q >> 1 & 0x3f803f80u));
    }
}

// A chunk of R rows: `codes` and `scales` point to the first one's; a row has `words` words, and
// the next row's scales lie STRIDE further, or are the same ones.
template <typename F, uint R, uint STRIDE, typename Scales>
inline void load_weights(
    const device uint* codes,
    uint words,
    Scales scales,
    uint chunk,
    thread half2* w,
    thread float* scale) {
    DS41_UNROLL
    for (uint r = 0; r < R; r++) {
        const device uint* row = codes + r * words + chunk * F::WORDS;
        decode(*reinterpret_cast<const device typename F::Words*>(row), w + r * CHUNK / 2);
        scale[r] = r > 0 && STRIDE == 0 ? scale[0] : e8m0(uint(scales[r * STRIDE + chunk / 2]));
    }
}

template <typename T>
inline void load_chunk(const device T* x, thread float* out) {
    DS41_UNROLL
    for (uint i = 0; i < CHUNK; i += 4) {
        const vec<T, 4> v = *reinterpret_cast<const device vec<T, 4>*>(x + i);
        DS41_UNROLL
        for (uint j = 0; j < 4; j++) {
            out[i + j] = float(v[j]);
        }
    }
}

// Adds the products of a chunk of R rows with a chunk of x to R sums.
template <typename F, uint R>
inline void add_products(
    const thread half2* w, const thread float* scale, const thread float* x, thread float* sum) {
    DS41_UNROLL
    for (uint r = 0; r < R; r++) {
        float dot = 0.0f;
        DS41_UNROLL
        for (uint i = 0; i < CHUNK / 2; i++) {
            const uint low = i / F::APART * 2 * F::APART + i % F::APART;
            const half2 pair = w[r * CHUNK / 2 + i];
            dot += x[low] * float(pair.x);
            dot += x[low + F::APART] * float(pair.y);
        }
        sum[r] += dot * F::UNIT * scale[r];
    }
}

// The sums over K of GATE_ROWS rows of w1 and of w3 for every token with a slot: sum[t][row].
template <typename F, typename T, uint TOKENS, uint K, uint STRIDE, typename Scales>
inline void gate_up_products(
    const device T* x,
    const thread uint* slot,
    const device uint* w1,
    const device uint* w3,
    Scales w1_scale,
    Scales w3_scale,
    uint lane,
    thread float* sum) {
    constexpr uint R = GATE_ROWS;
    constexpr uint WORDS = K / CHUNK * F::WORDS;
    for (uint chunk = lane; chunk < K / CHUNK; chunk += SIMD) {
        half2 w[2 * R * CHUNK / 2];
        float scale[2 * R];
        load_weights<F, R, STRIDE>(w1, WORDS, w1_scale, chunk, w, scale);
        load_weights<F, R, STRIDE>(w3, WORDS, w3_scale, chunk, w + R * CHUNK / 2, scale + R);
        DS41_UNROLL
        for (uint t = 0; t < TOKENS; t++) {
            if (slot[t] != NO_SLOT) {
                float values[CHUNK];
                load_chunk(x + t * K + chunk * CHUNK, values);
                add_products<F, 2 * R>(w, scale, values, sum + t * 2 * R);
            }
        }
    }
}

// The choice for each of a few tokens: `ids` and `weights` [TOKENS, K], for all of a threadgroup.
template <uint TOKENS, uint K, uint E, bool NORM, typename Scores, typename Bias>
inline void choose_experts(
    Scores scores,
    Bias bias,
    float scaling,
    threadgroup int* ids,
    threadgroup float* weights,
    uint simdgroups,
    uint simdgroup,
    uint lane) {
    for (uint t = simdgroup; t < TOKENS; t += simdgroups) {
        router_choose<K, E, NORM>(
            scores + t * E, bias, scaling, ids + t * K, weights + t * K, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// One simdgroup's rows of act, from `row` on. `place` 0 is the shared expert, others the pairs of
// ids in turn; a pair whose expert an earlier one has too leaves its work to that one.
template <
    typename T, uint TOKENS, uint K, uint D, uint I, typename Ids, typename Floats, typename Tiles>
inline void gate_up(
    const device T* x,
    Ids ids,
    Floats weights,
    const device uint* w1,
    const device uchar* w1_scale,
    const device uint* w3,
    const device uchar* w3_scale,
    const device uint* shared_w1,
    Tiles shared_w1_scale,
    const device uint* shared_w3,
    Tiles shared_w3_scale,
    float limit,
    device T* act,
    uint place,
    uint row,
    uint lane) {
    constexpr uint R = GATE_ROWS;
    uint slot[TOKENS];
    float sum[TOKENS * 2 * R];
    DS41_UNROLL
    for (uint i = 0; i < TOKENS * 2 * R; i++) {
        sum[i] = 0.0f;
    }
    if (place == 0) {
        DS41_UNROLL
        for (uint t = 0; t < TOKENS; t++) {
            slot[t] = K;
        }
        const uint codes = row * (D / 4), tile = row / 32 * (D / 32);
        gate_up_products<Fp8Format, T, TOKENS, D, 0>(
            x, slot, shared_w1 + codes, shared_w3 + codes, shared_w1_scale + tile,
            shared_w3_scale + tile, lane, sum);
    } else {
        const uint expert = uint(ids[place - 1]);
        bool is_first = true;
        DS41_UNROLL
        for (uint t = 0; t < TOKENS; t++) {
            slot[t] = NO_SLOT;
            for (uint s = 0; s < K; s++) {
                if (uint(ids[t * K + s]) == expert) {
                    slot[t] = s;
                    is_first = is_first && t * K + s >= place - 1;
                }
            }
        }
        if (!is_first) {
            return;
        }
        const uint codes = (expert * I + row) * (D / 8), group = (expert * I + row) * (D / 32);
        gate_up_products<Fp4Format, T, TOKENS, D, D / 32>(
            x, slot, w1 + codes, w3 + codes, w1_scale + group, w3_scale + group, lane, sum);
    }
    DS41_UNROLL
    for (uint t = 0; t < TOKENS; t++) {
        if (slot[t] == NO_SLOT) {
            continue;
        }
        const float weight = place == 0 ? 1.0f : weights[t * K + slot[t]];
        DS41_UNROLL
        for (uint r = 0; r < R; r++) {
            const float gate = simd_sum(sum[t * 2 * R + r]);
            const float up = simd_sum(sum[t * 2 * R + R + r]);
            if (lane == 0) {
                act[(t * (K + 1) + slot[t]) * I + row + r] =
                    T(clamped_swiglu(gate, up, limit) * weight);
            }
        }
    }
}

// The different experts of a few tokens, in the order of their first pair, and the slot that each
// has in each token, 4 bits a token: the count. The lists hold TOKENS * K entries each.
template <uint TOKENS, uint K, typename Ids>
inline uint list_experts(
    Ids ids,
    threadgroup uint* expert,
    threadgroup uint* slots,
    threadgroup uint* is_first,
    uint thread_index,
    uint threads) {
    constexpr uint PAIRS = TOKENS * K;
    for (uint p = thread_index; p < PAIRS; p += threads) {
        const int own = ids[p];
        uint first = 1;
        for (uint q = 0; q < p; q++) {
            first = ids[q] == own ? 0 : first;
        }
        is_first[p] = first;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint count = 0;
    for (uint p = 0; p < PAIRS; p++) {
        if (is_first[p] == 0) {
            continue;
        }
        if (p % threads == thread_index) {
            const int own = ids[p];
            uint of_tokens = 0;
            for (uint t = 0; t < TOKENS; t++) {
                uint slot = NO_SLOT;
                for (uint s = 0; s < K; s++) {
                    slot = ids[t * K + s] == own ? s : slot;
                }
                of_tokens |= slot << 4 * t;
            }
            expert[count] = uint(own);
            slots[count] = of_tokens;
        }
        count++;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return count;
}

// One simdgroup's rows of out, from `row` on. `lists` holds 3 * TOKENS * K words.
template <typename T, uint TOKENS, uint K, uint D, uint I, typename Ids, typename Tiles>
inline void down(
    const device T* act,
    Ids ids,
    const device uint* w2,
    const device uchar* w2_scale,
    const device uint* shared_w2,
    Tiles shared_w2_scale,
    device T* out,
    threadgroup uint* lists,
    uint row,
    uint thread_index,
    uint threads,
    uint lane) {
    constexpr uint R = DOWN_ROWS;
    constexpr uint CHUNKS = I / CHUNK;
    threadgroup uint* expert = lists;
    threadgroup uint* slots = lists + TOKENS * K;
    uint count = K;
    if (TOKENS > 1) {
        count = list_experts<TOKENS, K>(
            ids, expert, slots, lists + 2 * TOKENS * K, thread_index, threads);
    }
    float sum[TOKENS * R];
    DS41_UNROLL
    for (uint i = 0; i < TOKENS * R; i++) {
        sum[i] = 0.0f;
    }
    half2 w[R * CHUNK / 2];
    float scale[R];
    float values[CHUNK];
    // The rows of all experts are one long row, since a row of one fills the lanes 4.5 times only.
    for (uint i = lane; i < count * CHUNKS; i += SIMD) {
        const uint u = i / CHUNKS, chunk = i % CHUNKS;
        const uint from = (TOKENS > 1 ? expert[u] : uint(ids[u])) * D + row;
        load_weights<Fp4Format, R, I / 32>(
            w2 + from * (I / 8), I / 8, w2_scale + from * (I / 32), chunk, w, scale);
        DS41_UNROLL
        for (uint t = 0; t < TOKENS; t++) {
            const uint slot = TOKENS > 1 ? slots[u] >> 4 * t & 15 : u;
            if (slot != NO_SLOT) {
                load_chunk(act + (t * (K + 1) + slot) * I + chunk * CHUNK, values);
                add_products<Fp4Format, R>(w, scale, values, sum + t * R);
            }
        }
    }
    for (uint chunk = lane; chunk < CHUNKS; chunk += SIMD) {
        load_weights<Fp8Format, R, 0>(
            shared_w2 + row * (I / 4), I / 4, shared_w2_scale + row / 32 * (I / 32), chunk, w,
            scale);
        DS41_UNROLL
        for (uint t = 0; t < TOKENS; t++) {
            load_chunk(act + (t * (K + 1) + K) * I + chunk * CHUNK, values);
            add_products<Fp8Format, R>(w, scale, values, sum + t * R);
        }
    }
    DS41_UNROLL
    for (uint i = 0; i < TOKENS * R; i++) {
        const float total = simd_sum(sum[i]);
        if (lane == 0) {
            out[i / R * D + row + i % R] = T(total);
        }
    }
}
