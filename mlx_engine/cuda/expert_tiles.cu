// The routed experts for many tokens in bf16: metal/expert_tiles.metal says what is computed, and
// its list_tiles finds the tiles, of TOKENS pairs here.
//
// Weights are the left operand, decoded in registers as they are read, once for a tile; tokens the
// right one, in eights, of which only those that a tile has are multiplied. A block of 8 warps
// stages a tile's rows of x, 128 channels at a time and three times over, by cp.async; each warp
// multiplies 16 rows of two weights, w1 and w3 or neighbours of w2. Rows of x and act lie arranged:
// in a chunk of 128 channels the eight of word i of lane j's codes come at 4 i + j, as the codes'
// pairs want them, so that a lane reads its operands by 16 bytes.
// Geometry: grid (I / 128 or D / 256 blocks, tiles). Shared memory: 60 KiB of stages.

constexpr int TOKENS = 64;
constexpr int CHUNK = 128;
constexpr int STAGES = 3;
constexpr int THREADS = 256;
// 16 bytes times an odd multiple of 4: rows of an eight start in both halves of the banks.
constexpr int PITCH = 320;

// Where channel k of a chunk lies in an arranged one.
inline int arranged(int k) {
    return k / 8 % 4 * 32 + k / 32 * 8 + k % 4 * 2 + k / 4 % 2;
}

// Eight channels of a row, from `at` on.
inline void arrange(const bfloat16_t* x, bfloat16_t* out, size_t at) {
    const uint4 v = *reinterpret_cast<const uint4*>(x + at);
    const int k = int(at % CHUNK);
    const uint words[4] = {v.x, v.y, v.z, v.w};
    uint pairs[4];
    E2m1::arrange(words, pairs);
    *reinterpret_cast<uint4*>(out + at - k + arranged(k)) =
        uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Starts the copies of chunk `chunk` of the rows that `place` names; those from `rows` on are zero.
template <int K>
inline void stage_rows(
    const bfloat16_t* x, const int* place, int rows, int chunk, uchar* stage, int thread_index) {
#pragma unroll
    for (int i = 0; i < TOKENS * CHUNK / 8 / THREADS; i++) {
        const int at = thread_index + i * THREADS, r = at / 16, piece = at % 16;
        if (r < (rows + 7) / 8 * 8) {
            const bfloat16_t* from =
                x + size_t(r < rows ? place[r] : 0) * K + chunk * CHUNK + piece * 8;
            const uint to = uint(__cvta_generic_to_shared(stage + r * PITCH + piece * 16));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         :: "r"(to), "l"(from), "r"(r < rows ? 16 : 0) : "memory");
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// sums[m][n] = 16 rows of the weight m times tokens 8 n to 8 n + 7 over K. `codes` and `scales` point
// at this lane's share of each weight's lower row.
template <int K>
inline void multiply(
    const bfloat16_t* x,
    const int* place,
    int rows,
    const uchar* const (&codes)[2],
    const uchar* const (&scales)[2],
    uchar* stages,
    float (&sums)[2][TOKENS / 8][4],
    int thread_index) {
    constexpr int CHUNKS = K / CHUNK;
    constexpr int STAGE = TOKENS * PITCH;
    const int lane = thread_index % 32;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[0][n][i] = sums[1][n][i] = 0.0f;
        }
    }
    stage_rows<K>(x, place, rows, 0, stages, thread_index);
    stage_rows<K>(x, place, rows, 1, stages + STAGE, thread_index);
    uint4 words[4];
    uint scale[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        words[r] = load_once(codes[r / 2] + r % 2 * 8 * (K / 2));
        scale[r] = scales[r / 2][r % 2 * 8 * (K / 32)];
    }
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        if (chunk + 2 < CHUNKS) {
            uchar* stage = stages + (chunk + 2) % STAGES * STAGE;
            stage_rows<K>(x, place, rows, chunk + 2, stage, thread_index);
        } else {
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        uint4 next[4];
        uint factor[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            factor[r] = E2m1::factor(scale[r]);
        }
        const uchar* stage =
            stages + chunk % STAGES * STAGE + lane / 4 * PITCH + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // Half a chunk ahead hides the memory and leaves the registers.
            if (i == 2) {
                const int ahead = min(chunk + 1, CHUNKS - 1);
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    next[r] = load_once(codes[r / 2] + r % 2 * 8 * (K / 2) + ahead * 64);
                    scale[r] = scales[r / 2][r % 2 * 8 * (K / 32) + ahead * 4];
                }
            }
            uint a[4][4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                E2m1::decode(words[r][i], factor[r], a[r]);
            }
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++) {
                if (n * 8 < rows) {
                    const uint4 b =
                        *reinterpret_cast<const uint4*>(stage + n * 8 * PITCH + i * 64);
                    mma(sums[0][n], a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
                    mma(sums[1][n], a[2][0], a[3][0], a[2][1], a[3][1], b.x, b.y);
                    mma(sums[0][n], a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
                    mma(sums[1][n], a[2][2], a[3][2], a[2][3], a[3][3], b.z, b.w);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            words[r] = next[r];
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

// act of a tile's pairs for 128 rows of w1 and w3, in sorted order, arranged: bf16 [pairs, I].
template <int K, int D, int I>
inline void gate_up_tile(
    const bfloat16_t* x,
    const uint* order,
    const float* weights,
    const uint* tile,
    const uint* w1,
    const uchar* w1_scale,
    const uint* w3,
    const uchar* w3_scale,
    float limit,
    bfloat16_t* act,
    uchar* stages,
    int* place,
    int block,
    int thread_index) {
    const int first = tile[1], rows = tile[2];
    if (rows == 0) {
        return;
    }
    if (thread_index < rows) {
        place[thread_index] = int(order[first + thread_index]) / K;
    }
    __syncthreads();
    const int warp = thread_index / 32, lane = thread_index % 32;
    const int of_block = warp * 16 + lane / 4;
    const size_t row = size_t(tile[0]) * I + block * CHUNK + of_block;
    const size_t code = row * (D / 2) + lane % 4 * 16, group = row * (D / 32) + lane % 4;
    const uchar* const codes[2] = {
        reinterpret_cast<const uchar*>(w1) + code, reinterpret_cast<const uchar*>(w3) + code};
    const uchar* const scales[2] = {w1_scale + group, w3_scale + group};
    float sums[2][TOKENS / 8][4];
    multiply<D>(x, place, rows, codes, scales, stages, sums, thread_index);
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = n * 8 + sum_token(lane, i);
            if (token < rows) {
                const float weight = weights[order[first + token]];
                const float value =
                    clamped_swiglu(sums[0][n][i] * UNIT, sums[1][n][i] * UNIT, limit) * weight;
                act[size_t(first + token) * I + block * CHUNK
                    + arranged(warp * 16 + sum_row(lane, i))] = bfloat16_t(value);
            }
        }
    }
}

// The experts' outputs for a tile's pairs and 256 rows of w2, at the pairs' own places:
// float [pairs, D].
template <int D, int I>
inline void down_tile(
    const bfloat16_t* act,
    const uint* order,
    const uint* tile,
    const uint* w2,
    const uchar* w2_scale,
    float* out,
    uchar* stages,
    int* place,
    int block,
    int thread_index) {
    const int first = tile[1], rows = tile[2];
    if (rows == 0) {
        return;
    }
    if (thread_index < rows) {
        place[thread_index] = first + thread_index;
    }
    __syncthreads();
    const int warp = thread_index / 32, lane = thread_index % 32;
    const int from = block * 256 + warp * 32;
    const size_t row = size_t(tile[0]) * D + from + lane / 4;
    const uchar* lowest = reinterpret_cast<const uchar*>(w2) + row * (I / 2) + lane % 4 * 16;
    const uchar* scale = w2_scale + row * (I / 32) + lane % 4;
    const uchar* const codes[2] = {lowest, lowest + 16 * (I / 2)};
    const uchar* const scales[2] = {scale, scale + 16 * (I / 32)};
    float sums[2][TOKENS / 8][4];
    multiply<I>(act, place, rows, codes, scales, stages, sums, thread_index);
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = n * 8 + sum_token(lane, i);
            if (token < rows) {
                float* to = out + size_t(order[first + token]) * D + from + sum_row(lane, i);
                to[0] = sums[0][n][i] * UNIT;
                to[16] = sums[1][n][i] * UNIT;
            }
        }
    }
}
