// Sparse attention over packed rows in bf16: metal/attention.metal says what it computes and the
// arrays' layout. merge_slices is that file's own.
//
// A block takes HEADS heads of one query and a slice of its rows, TILE rows at a time, in HEADS / 4
// warps. Rows are unpacked to bf16, exactly, once for all heads of the block. Scores: a warp takes
// 16 heads and a quarter of the channels, whose queries stay in its registers. Weights are the
// softmax's f32 in two bf16 parts, so that only sums round. Output: a warp holds 16 D / HEADS
// channels of every head, f32 in registers. Shared memory: shared_bytes().

constexpr int TILE = 32;
constexpr float BELOW_ALL = -1e30f;
constexpr int NO_ROWS = 0;
constexpr int VISIBLE_ROWS = 1;
constexpr int LISTED_ROWS = 2;

constexpr int tile_pitch(int width) {
    return width + 8;  // values; rows start in different banks
}
constexpr int WEIGHT_PITCH = TILE + 8;
constexpr int QUARTERS = 4;

inline void ldmatrix(uint* r, const void* from) {
    const uint at = uint(__cvta_generic_to_shared(from));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
inline void ldmatrix_turned(uint* r, const void* from) {
    const uint at = uint(__cvta_generic_to_shared(from));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

inline uint bf16_pair(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return as_type<uint>(pair);
}
inline float low_of(uint pair) {
    return as_type<float>(pair << 16);
}
inline float high_of(uint pair) {
    return as_type<float>(pair & 0xffff0000u);
}

template <bool IS_INVERSE>
inline float2 turned(float2 x, const float* cos, const float* sin) {
    const float s0 = IS_INVERSE ? -sin[0] : sin[0], s1 = IS_INVERSE ? -sin[1] : sin[1];
    return float2(x.x * cos[0] + x.y * s0, x.y * cos[1] + x.x * s1);
}

// Sixteen values of a row from their codes and scale. The factors are split in two powers of two,
// since one alone would leave bf16.
inline void unpack_window(uint4 codes, uint scale, uint4* out) {
    const uint factor = power_pair(scale + 60), rest = power_pair(127 + 60);
    uint words[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint w = codes[i];
        const uint even = times(times((w << 8 & 0x80008000u) | (w << 4 & 0x07f007f0u), rest), factor);
        const uint odd = times(times((w & 0x80008000u) | (w >> 4 & 0x07f007f0u), rest), factor);
        words[2 * i] = __byte_perm(even, odd, 0x5410);
        words[2 * i + 1] = __byte_perm(even, odd, 0x7632);
    }
    out[0] = uint4(words[0], words[1], words[2], words[3]);
    out[1] = uint4(words[4], words[5], words[6], words[7]);
}

inline void unpack_compressed(uint4 codes, uint scale, uint4* out) {
    // e4m3 has 4 bits of mantissa and e2m1 two: their product is exact.
    const uint factor = (as_type<uint>(e4m3(scale) * 67108864.0f) >> 16) * 0x00010001u;  // 2^26
    const uint rest = power_pair(127 + 100);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint w = codes[i];
        const uint a = times(times((w << 12 & 0x80008000u) | (w << 6 & 0x01c001c0u), rest), factor);
        const uint b = times(times((w << 8 & 0x80008000u) | (w << 2 & 0x01c001c0u), rest), factor);
        const uint c = times(times((w << 4 & 0x80008000u) | (w >> 2 & 0x01c001c0u), rest), factor);
        const uint d = times(times((w & 0x80008000u) | (w >> 6 & 0x01c001c0u), rest), factor);
        out[i] = uint4(
            __byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410), __byte_perm(a, b, 0x7632),
            __byte_perm(c, d, 0x7632));
    }
}

constexpr int window_words(int width) {
    return (width + width / 32 + 3) / 4;
}
constexpr int compressed_words(int width) {
    return (width / 2 + width / 16 + 3) / 4;
}

inline float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    }
    return x;
}

// The rows of one query: `in_window` from `first` on, then `selected` ones.
struct QueryRows {
    int first;
    int in_window;
    int selected;
};

template <int D, int HEADS>
struct Shared {
    bfloat16_t tile[TILE * tile_pitch(D)];
    float scores[QUARTERS * HEADS * TILE];
    bfloat16_t weights[2][HEADS * WEIGHT_PITCH];
    float factors[HEADS];
    int seen[TILE];  // ids, -1 for none
};

// Attend to the rows [begin, end) of a query with the heads from `head` on of `heads`; q points at
// the query's. The sums relative to `top` stay in `sums`, as mma.sync's: [HEADS / 16] tiles of 16
// heads by the warp's channels, 8 at a time; `top` and `total` are those of heads warp * 4 + i.
template <int D, int R, int HEADS, int CHOSEN, bool TURNS, typename Chosen>
inline void attend(
    const bfloat16_t* q,
    int head,
    int heads,
    const uint* window,
    const uint* compressed,
    Chosen chosen,
    const float* cos,
    const float* sin,
    QueryRows rows,
    int begin,
    int end,
    Shared<D, HEADS>& shared,
    float (&sums)[HEADS / 16][D / (2 * HEADS)][4],
    float (&top)[4],
    float (&total)[4],
    int thread_index) {
    constexpr int WARPS = HEADS / 4;
    constexpr int THREADS = WARPS * 32;
    constexpr int PITCH = tile_pitch(D);
    constexpr int HEAD_TILES = HEADS / 16;
    constexpr int STEPS = D / QUARTERS / 16;
    constexpr int CHANNELS = D / (2 * HEADS);  // of a warp, in eights
    const int warp = thread_index / 32, lane = thread_index % 32;
    const float scale = rsqrtf(float(D));

    // This warp's queries: 16 heads, a quarter of the channels.
    const int head_tile = warp % HEAD_TILES, quarter = warp / HEAD_TILES;
    uint query[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int h = head + head_tile * 16 + lane / 4 + i % 2 * 8;
            const int channel = quarter * (D / QUARTERS) + step * 16 + lane % 4 * 2 + i / 2 * 8;
            uint pair = 0;
            if (h < heads) {
                pair = *reinterpret_cast<const uint*>(q + size_t(h) * D + channel);
                const int turn = channel - (D - R);
                if (TURNS && turn >= 0) {
                    const float2 x =
                        turned<false>(float2(low_of(pair), high_of(pair)), cos + turn, sin + turn);
                    pair = bf16_pair(x.x, x.y);
                }
            }
            query[step][i] = pair;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        top[i] = BELOW_ALL;
        total[i] = 0.0f;
    }
#pragma unroll
    for (int h = 0; h < HEAD_TILES; h++) {
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            sums[h][c][0] = sums[h][c][1] = sums[h][c][2] = sums[h][c][3] = 0.0f;
        }
    }

    for (int first = begin; first < end; first += TILE) {
        // 1. Unpack; rows that the query does not see become zeros. A warp takes whole rows, and
        // asks for BATCH of them before it unpacks the first.
        if (thread_index < TILE) {
            const int at = first + thread_index;
            int id = -1;
            if (at < end) {
                id = at < rows.in_window ? rows.first + at : at - rows.in_window;
                if constexpr (CHOSEN == LISTED_ROWS) {
                    id = at < rows.in_window ? id : chosen[id];
                }
            }
            shared.seen[thread_index] = id;
        }
        __syncthreads();
        constexpr int PARTS = D / 16;
        constexpr int EACH = TILE * PARTS / THREADS;
        constexpr int BATCH = HEADS == 16 ? EACH : 2;
        for (int batch = 0; batch < EACH; batch += BATCH) {
            uint4 codes[BATCH];
            uint scales[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int at = thread_index + (batch + i) * THREADS, part = at % PARTS;
                const int id = shared.seen[at / PARTS];
                codes[i] = uint4(0);
                scales[i] = 0;
                if (id >= 0 && first + at / PARTS < rows.in_window) {
                    const uint* row = window + size_t(id) * window_words(D);
                    codes[i] = reinterpret_cast<const uint4*>(row)[part];
                    scales[i] = reinterpret_cast<const uchar*>(row + D / 4)[part / 2];
                } else if (id >= 0) {
                    const uint* row = compressed + size_t(id) * compressed_words(D);
                    const uint2 two = reinterpret_cast<const uint2*>(row)[part];
                    codes[i].x = two.x;
                    codes[i].y = two.y;
                    scales[i] = reinterpret_cast<const uchar*>(row + D / 8)[part];
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int at = thread_index + (batch + i) * THREADS, slot = at / PARTS;
                uint4* out = reinterpret_cast<uint4*>(shared.tile + slot * PITCH + 16 * (at % PARTS));
                if (first + slot < rows.in_window) {
                    unpack_window(codes[i], scales[i], out);
                } else {
                    unpack_compressed(codes[i], scales[i], out);
                }
            }
        }
        __syncthreads();

        // 2. Scores of 16 heads with all rows over a quarter of the channels.
        {
            float score[TILE / 8][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const int channel = quarter * (D / QUARTERS) + step * 16;
#pragma unroll
                for (int n = 0; n < TILE / 16; n++) {
                    // Four matrices: 8 rows by 8 channels, then the next channels, the next rows.
                    uint keys[4];
                    const int row = n * 16 + lane % 8 + lane / 16 * 8;
                    ldmatrix(keys, shared.tile + row * PITCH + channel + lane / 8 % 2 * 8);
                    mma(score[2 * n], query[step][0], query[step][1], query[step][2],
                        query[step][3], keys[0], keys[1]);
                    mma(score[2 * n + 1], query[step][0], query[step][1], query[step][2],
                        query[step][3], keys[2], keys[3]);
                }
            }
            float* out = shared.scores + (quarter * HEADS + head_tile * 16 + lane / 4) * TILE
                + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
                *reinterpret_cast<float2*>(out + 8 * n) = float2(score[n][0], score[n][1]);
                *reinterpret_cast<float2*>(out + 8 * TILE + 8 * n) =
                    float2(score[n][2], score[n][3]);
            }
        }
        __syncthreads();

        // 3. Weights, relative to the largest score so far: a lane a row.
        const bool is_seen = shared.seen[lane] >= 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int h = warp * 4 + i;
            float score = 0.0f;
#pragma unroll
            for (int part = 0; part < QUARTERS; part++) {
                score += shared.scores[(part * HEADS + h) * TILE + lane];
            }
            score = is_seen ? score * scale : BELOW_ALL;
            const float new_top = fmaxf(top[i], warp_max(score));
            const float weight = is_seen ? __expf(score - new_top) : 0.0f;
            const float factor = __expf(top[i] - new_top);
            total[i] = total[i] * factor + simd_sum(weight);
            top[i] = new_top;
            const bfloat16_t coarse = bfloat16_t(weight);
            shared.weights[0][h * WEIGHT_PITCH + lane] = coarse;
            shared.weights[1][h * WEIGHT_PITCH + lane] = bfloat16_t(weight - float(coarse));
            if (lane == 0) {
                shared.factors[h] = factor;
            }
        }
        __syncthreads();

        // 4. Weighted rows, each warp for its channels.
        uint weight[HEAD_TILES][2][4];
#pragma unroll
        for (int h = 0; h < HEAD_TILES; h++) {
            const float low = shared.factors[h * 16 + lane / 4];
            const float high = shared.factors[h * 16 + lane / 4 + 8];
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) {
                sums[h][c][0] *= low;
                sums[h][c][1] *= low;
                sums[h][c][2] *= high;
                sums[h][c][3] *= high;
            }
        }
#pragma unroll
        for (int k = 0; k < TILE; k += 16) {
#pragma unroll
            for (int h = 0; h < HEAD_TILES; h++) {
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    ldmatrix(
                        weight[h][part],
                        shared.weights[part] + (h * 16 + lane % 16) * WEIGHT_PITCH + k
                            + lane / 16 * 8);
                }
            }
#pragma unroll
            for (int c = 0; c < CHANNELS; c += 2) {
                // 16 rows by 16 channels: rows, rows + 8, then the next 8 channels.
                uint values[4];
                const int channel = (warp * CHANNELS + c) * 8;
                ldmatrix_turned(
                    values, shared.tile + (k + lane % 16) * PITCH + channel + lane / 16 * 8);
#pragma unroll
                for (int h = 0; h < HEAD_TILES; h++) {
#pragma unroll
                    for (int part = 0; part < 2; part++) {
                        const uint* w = weight[h][part];
                        mma(sums[h][c], w[0], w[1], w[2], w[3], values[0], values[1]);
                        mma(sums[h][c + 1], w[0], w[1], w[2], w[3], values[2], values[3]);
                    }
                }
            }
        }
        __syncthreads();
    }
}

// The sums of a slice: `parts` f32 [heads, D], `stats` f32 [heads, 2], both of that slice.
template <int D, int HEADS>
inline void store_part(
    float (&sums)[HEADS / 16][D / (2 * HEADS)][4],
    float (&top)[4],
    float (&total)[4],
    int head,
    int heads,
    float* parts,
    float* stats,
    int thread_index) {
    constexpr int CHANNELS = D / (2 * HEADS);
    const int warp = thread_index / 32, lane = thread_index % 32;
#pragma unroll
    for (int h = 0; h < HEADS / 16; h++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int to = head + h * 16 + lane / 4 + half * 8;
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) {
                if (to < heads) {
                    const int channel = (warp * CHANNELS + c) * 8 + lane % 4 * 2;
                    *reinterpret_cast<float2*>(parts + size_t(to) * D + channel) =
                        float2(sums[h][c][2 * half], sums[h][c][2 * half + 1]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int to = head + warp * 4 + i;
        if (lane == 0 && to < heads) {
            stats[2 * to] = top[i];
            stats[2 * to + 1] = total[i];
        }
    }
}

// Divide by the softmax's sum with the sink, turn back, round: `out` bf16 [heads, D] of the query.
template <int D, int R, int HEADS>
inline void store_out(
    float (&sums)[HEADS / 16][D / (2 * HEADS)][4],
    float (&top)[4],
    float (&total)[4],
    int head,
    int heads,
    const float* sinks,
    const float* cos,
    const float* sin,
    bfloat16_t* out,
    Shared<D, HEADS>& shared,
    int thread_index) {
    constexpr int CHANNELS = D / (2 * HEADS);
    const int warp = thread_index / 32, lane = thread_index % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int h = warp * 4 + i;
        if (lane == 0 && head + h < heads) {
            const float sink = sinks[head + h];
            const float all = fmaxf(top[i], sink);
            const float share = expf(top[i] - all);
            shared.factors[h] = share / (total[i] * share + expf(sink - all));
        }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS / 16; h++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = h * 16 + lane / 4 + half * 8;
            if (head + own < heads) {
                const float factor = shared.factors[own];
#pragma unroll
                for (int c = 0; c < CHANNELS; c++) {
                    const int channel = (warp * CHANNELS + c) * 8 + lane % 4 * 2;
                    float2 x =
                        float2(sums[h][c][2 * half] * factor, sums[h][c][2 * half + 1] * factor);
                    const int turn = channel - (D - R);
                    if (turn >= 0) {
                        x = turned<true>(x, cos + turn, sin + turn);
                    }
                    *reinterpret_cast<uint*>(out + size_t(head + own) * D + channel) =
                        bf16_pair(x.x, x.y);
                }
            }
        }
    }
}
