// The mixture of experts for 1 to 8 tokens, in two launches: see metal/experts.metal for the formula
// and the arrays. x, act and out are bf16.
//
// Both are bound by the codes' bytes, each read once for all tokens. gate_up: a block of 4 warps makes
// 16 rows of act for one expert, from 16 rows of w1 and of w3; the warps share K, chunk by chunk. At
// the released widths 1,008 blocks for one token. down: a block of 8 warps makes 16 rows of out over
// all experts, whose chunks its warps share: 320 blocks. Shared memory: 4 KiB of sums.

constexpr int GATE_WARPS = 4;
constexpr int DOWN_WARPS = 8;
constexpr int NO_SLOT = 15;

// Sums over K of 16 rows of two weights. Pointers are this lane's in its two rows, `x` its own
// token's or null; `next_scale`: from a chunk's scale to the next chunk's.
template <typename F, int K, int DEPTH>
inline void add_pair(
    float* gate,
    float* up,
    const uchar* w1,
    const uchar* w3,
    size_t to_high,  // bytes from the lower row to the upper
    const uchar* w1_scale,
    const uchar* w3_scale,
    size_t scale_to_high,
    int next_scale,
    const bfloat16_t* x,
    int column,
    int warp) {
    constexpr int COLUMNS = chunk_columns<F>();
    constexpr int CHUNKS = (K + COLUMNS - 1) / COLUMNS;
    uint4 words[DEPTH][4];
    uint scale[DEPTH][4];
    const auto load = [&](int i, int chunk) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            words[i][r] = uint4(0);
            scale[i][r] = 0;
            if (chunk * COLUMNS + column < K) {
                const size_t from = chunk * 64 + r % 2 * to_high;
                words[i][r] = load_once((r < 2 ? w1 : w3) + from);
                scale[i][r] =
                    (r < 2 ? w1_scale : w3_scale)[chunk * next_scale + r % 2 * scale_to_high];
            }
        }
    };
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        load(i, warp + i * GATE_WARPS);
    }
    for (int first = warp; first < CHUNKS; first += GATE_WARPS * DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int k = (first + i * GATE_WARPS) * COLUMNS + column;
            uint pairs[F::CODES / 2];
            load_x<F>(x != nullptr && k < K ? x + k : nullptr, pairs);
            add_products<F>(
                gate, words[i][0], words[i][1], F::factor(scale[i][0]), F::factor(scale[i][1]),
                pairs);
            add_products<F>(
                up, words[i][2], words[i][3], F::factor(scale[i][2]), F::factor(scale[i][3]),
                pairs);
            load(i, first + (i + DEPTH) * GATE_WARPS);
        }
    }
}

// Which pairs of a few tokens have an expert, a bit each: all lanes of a warp.
template <int PAIRS>
inline ulong pairs_of(const int* ids, int expert, uint lane) {
    static_assert(PAIRS <= 64, "a bit a pair");
    const bool low = lane < PAIRS && ids[lane] == expert;
    ulong pairs = __ballot_sync(ALL_LANES, low);
    if constexpr (PAIRS > 32) {
        const bool high = lane + 32 < PAIRS && ids[lane + 32] == expert;
        pairs |= ulong(__ballot_sync(ALL_LANES, high)) << 32;
    }
    return pairs;
}

// A token's slot among them.
template <int K>
inline int slot_of(ulong pairs, int token) {
    const uint own = uint(pairs >> token * K) & ((1u << K) - 1);
    return own == 0 ? NO_SLOT : __ffs(own) - 1;
}

template <int TOKENS, int K, int D, int I>
inline void gate_up(
    const bfloat16_t* x,
    const int* ids,
    const float* weights,
    const uint* w1,
    const uchar* w1_scale,
    const uint* w3,
    const uchar* w3_scale,
    const uint* shared_w1,
    const uchar* shared_w1_scale,
    const uint* shared_w3,
    const uchar* shared_w3_scale,
    float limit,
    bfloat16_t* act,
    float* scratch,  // [2][GATE_WARPS][4][32]
    int place,
    int tile,
    int warp,
    uint lane) {
    const int expert = place == 0 ? 0 : ids[place - 1];
    const ulong pairs = place == 0 ? 0 : pairs_of<TOKENS * K>(ids, expert, lane);
    if (place > 0 && __ffsll(pairs) != place) {
        return;  // the first pair's block does it for all
    }
    const int row = tile * TILE_ROWS + int(lane) / 4, quarter = int(lane) % 4;
    const bfloat16_t* own = int(lane) / 4 < TOKENS ? x + int(lane) / 4 * D : nullptr;
    float gate[4] = {}, up[4] = {};
    if (place == 0) {
        const size_t from = size_t(row) * D + quarter * 16;
        const size_t tile_from = row / 32 * (D / 32) + quarter / 2;
        add_pair<E4m3, D, 2>(
            gate, up, reinterpret_cast<const uchar*>(shared_w1) + from,
            reinterpret_cast<const uchar*>(shared_w3) + from, size_t(8) * D,
            shared_w1_scale + tile_from, shared_w3_scale + tile_from, 0, 2, own, quarter * 16,
            warp);
    } else {
        const size_t of_expert = size_t(expert) * I + row;
        const size_t from = of_expert * (D / 2) + quarter * 16;
        const size_t group = of_expert * (D / 32) + quarter;
        add_pair<E2m1, D, 2>(
            gate, up, reinterpret_cast<const uchar*>(w1) + from,
            reinterpret_cast<const uchar*>(w3) + from, size_t(8) * (D / 2), w1_scale + group,
            w3_scale + group, size_t(8) * (D / 32), 4, own, quarter * 32, warp);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        scratch[(warp * 4 + i) * 32 + lane] = gate[i];
        scratch[((GATE_WARPS + warp) * 4 + i) * 32 + lane] = up[i];
    }
    __syncthreads();
    if (warp < 4) {
        const int token = sum_token(lane, warp), n = tile * TILE_ROWS + sum_row(lane, warp);
        float gate_sum = 0.0f, up_sum = 0.0f;
#pragma unroll
        for (int w = 0; w < GATE_WARPS; w++) {
            gate_sum += scratch[(w * 4 + warp) * 32 + lane];
            up_sum += scratch[((GATE_WARPS + w) * 4 + warp) * 32 + lane];
        }
        if (token < TOKENS) {
            const int slot = place == 0 ? K : slot_of<K>(pairs, token);
            if (slot != NO_SLOT) {
                const float weight = place == 0 ? 1.0f : weights[token * K + slot];
                const float value = clamped_swiglu(gate_sum * UNIT, up_sum * UNIT, limit) * weight;
                act[(token * (K + 1) + slot) * I + n] = bfloat16_t(value);
            }
        }
    }
}

// The different experts of the tokens, in the order of their first pairs, and which pairs have each:
// how many. All of the block; a warp a pair.
template <int TOKENS, int K>
inline int list_experts(const int* ids, int* expert, ulong* pairs, int warp, uint lane) {
    constexpr int PAIRS = TOKENS * K;
    if constexpr (TOKENS == 1) {
        // A token's experts differ.
        if (warp == 0 && lane < K) {
            expert[lane] = ids[lane];
            pairs[lane] = ulong(1) << lane;
        }
        __syncthreads();
        return K;
    }
    __shared__ ulong pairs_with[PAIRS];
    for (int p = warp; p < PAIRS; p += DOWN_WARPS) {
        const ulong with = pairs_of<PAIRS>(ids, ids[p], lane);
        if (lane == 0) {
            pairs_with[p] = with;
        }
    }
    __syncthreads();
    int count = 0;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        const ulong with = pairs_with[p];
        if (__ffsll(with) - 1 == p) {
            if (warp == 0 && lane == 0) {
                expert[count] = ids[p];
                pairs[count] = with;
            }
            count++;
        }
    }
    __syncthreads();
    return count;
}

// Sums of 16 rows of out over a warp's share of `end` chunks, DEPTH of them under way: `at` loads a
// chunk's codes and scales of this lane's two rows, and has its x.
template <typename F, int DEPTH, typename At>
inline void add_chunks(float* sum, int warp, int end, At at) {
    uint4 words[DEPTH][2];
    uint scale[DEPTH][2];
    const auto load = [&](int i, int chunk) {
        words[i][0] = words[i][1] = uint4(0);
        scale[i][0] = scale[i][1] = 0;
        if (chunk < end) {
            at.load(chunk, words[i], scale[i]);
        }
    };
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        load(i, warp + i * DOWN_WARPS);
    }
    for (int first = warp; first < end; first += DOWN_WARPS * DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int chunk = first + i * DOWN_WARPS;
            uint pairs[F::CODES / 2];
            load_x<F>(chunk < end ? at.x(chunk) : nullptr, pairs);
            add_products<F>(
                sum, words[i][0], words[i][1], F::factor(scale[i][0]), F::factor(scale[i][1]),
                pairs);
            load(i, chunk + DEPTH * DOWN_WARPS);
        }
    }
}

template <int TOKENS, int K, int D, int I>
struct RoutedChunks {
    static constexpr int CHUNKS = (I + 127) / 128;
    const bfloat16_t* act;
    const uchar* codes;  // of this lane's row of expert 0, and its quarter
    const uchar* scales;
    const int* expert;
    const ulong* pairs;
    int quarter;
    int token;
    bool is_inside(int chunk) const { return chunk % CHUNKS * 128 + quarter * 32 < I; }
    void load(int chunk, uint4* words, uint* scale) const {
        if (is_inside(chunk)) {
            const size_t e = expert[chunk / CHUNKS];
            const uchar* from = codes + e * D * (I / 2) + chunk % CHUNKS * 64;
            words[0] = load_once(from);
            words[1] = load_once(from + 8 * (I / 2));
            const uchar* group = scales + e * D * (I / 32) + chunk % CHUNKS * 4;
            scale[0] = group[0];
            scale[1] = group[8 * (I / 32)];
        }
    }
    const bfloat16_t* x(int chunk) const {
        if (token >= TOKENS || !is_inside(chunk)) {
            return nullptr;
        }
        const int slot = slot_of<K>(pairs[chunk / CHUNKS], token);
        const int at = (token * (K + 1) + slot) * I + chunk % CHUNKS * 128 + quarter * 32;
        return slot == NO_SLOT ? nullptr : act + at;
    }
};

template <int TOKENS, int K, int D, int I>
struct SharedChunks {
    static constexpr int CHUNKS = (I + 63) / 64;
    const bfloat16_t* act;
    const uchar* codes;
    const uchar* scales;
    int quarter;
    int token;
    bool is_inside(int chunk) const { return chunk * 64 + quarter * 16 < I; }
    void load(int chunk, uint4* words, uint* scale) const {
        if (is_inside(chunk)) {
            words[0] = load_once(codes + chunk * 64);
            words[1] = load_once(codes + size_t(8) * I + chunk * 64);
            scale[0] = scale[1] = scales[chunk * 2];
        }
    }
    const bfloat16_t* x(int chunk) const {
        const bool is_some = token < TOKENS && is_inside(chunk);
        return is_some ? act + (token * (K + 1) + K) * I + chunk * 64 + quarter * 16 : nullptr;
    }
};

template <int TOKENS, int K, int D, int I>
inline void down(
    const bfloat16_t* act,
    const int* ids,
    const uint* w2,
    const uchar* w2_scale,
    const uint* shared_w2,
    const uchar* shared_w2_scale,
    bfloat16_t* out,
    float* scratch,  // [DOWN_WARPS][4][32]
    int* expert,
    ulong* pairs,
    int tile,
    int warp,
    uint lane) {
    const int count = list_experts<TOKENS, K>(ids, expert, pairs, warp, lane);
    const int row = tile * TILE_ROWS + int(lane) / 4, quarter = int(lane) % 4;
    const RoutedChunks<TOKENS, K, D, I> routed{
        act,
        reinterpret_cast<const uchar*>(w2) + size_t(row) * (I / 2) + quarter * 16,
        w2_scale + size_t(row) * (I / 32) + quarter,
        expert,
        pairs,
        quarter,
        int(lane) / 4};
    const SharedChunks<TOKENS, K, D, I> shared{
        act,
        reinterpret_cast<const uchar*>(shared_w2) + size_t(row) * I + quarter * 16,
        shared_w2_scale + row / 32 * (I / 32) + quarter / 2,
        quarter,
        int(lane) / 4};
    float sum[4] = {};
    add_chunks<E2m1, 4>(sum, warp, count * routed.CHUNKS, routed);
    add_chunks<E4m3, 4>(sum, warp, shared.CHUNKS, shared);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        scratch[(warp * 4 + i) * 32 + lane] = sum[i];
    }
    __syncthreads();
    if (warp < 4) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < DOWN_WARPS; w++) {
            total += scratch[(w * 4 + warp) * 32 + lane];
        }
        const int token = sum_token(lane, warp);
        if (token < TOKENS) {
            out[token * D + tile * TILE_ROWS + sum_row(lane, warp)] = bfloat16_t(total * UNIT);
        }
    }
}
