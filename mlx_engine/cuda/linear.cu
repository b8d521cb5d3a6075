// Products with e4m3 weights for a few rows: out[m, n] = sum_k x[m, k] w[n, k], for each of G groups.
//
//   x       bf16 [M, G, K]        weight  uint4 [G, N, K / 16], e4m3 codes
//   out     bf16 [M, G, N]        scale   uchar [G, ceil(N/32), K/32], e8m0
//
// Bound by the weight's bytes, read once for all rows, up to 32 of them. A warp makes 16 outputs of
// all rows; SPLIT warps share K, chunk by chunk, so that a block reads 64 * SPLIT bytes of a row in
// a row. Each lane has DEPTH x 2 loads of 16 bytes under way. Shared memory: 512 bytes a warp and 8
// rows.
//
// unpack_fp8: the weight as bf16, exactly, for a product in MLX: a lane 16 codes.

constexpr int DEPTH = 4;

// A lane's share of a token's x in a chunk, from K values a token and group on.
template <int K, int G>
struct PlainX {
    const bfloat16_t* x;
    int g;
    inline void load(int token, int k, bool is_inside, uint* pairs) const {
        load_x<E4m3>(is_inside ? x + (token * G + g) * K + k : nullptr, pairs);
    }
};

template <int M, int N, int K, int G, int SPLIT, typename X>
inline void fp8_rows(
    X x,
    const uint* weight,
    const uchar* scale,
    bfloat16_t* out,
    float* scratch,  // of the team
    int tile,
    int g,
    int warp,
    uint lane) {
    constexpr int TOKENS = (M + 7) / 8;
    constexpr int CHUNKS = (K + 63) / 64;
    const int row = tile * TILE_ROWS + int(lane) / 4, column = int(lane) % 4 * 16;
    const uchar* codes = reinterpret_cast<const uchar*>(weight) + size_t(g) * N * K + column;
    const uchar* low = codes + size_t(min(row, N - 1)) * K;
    const uchar* high = codes + size_t(min(row + 8, N - 1)) * K;
    const uchar* scales =
        scale + (size_t(g) * ((N + 31) / 32) + min(row, N - 1) / 32) * (K / 32) + column / 32;

    uint4 words[DEPTH][2];
    uint scale_of[DEPTH];
    const auto load = [&](int i, int chunk) {
        words[i][0] = words[i][1] = uint4(0);
        scale_of[i] = 0;
        if (chunk * 64 + column < K) {
            words[i][0] = load_once(low + chunk * 64);
            words[i][1] = load_once(high + chunk * 64);
            scale_of[i] = scales[chunk * 2];
        }
    };
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        load(i, warp + i * SPLIT);
    }
    float sum[TOKENS][4] = {};
    for (int first = warp; first < CHUNKS; first += SPLIT * DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int k = (first + i * SPLIT) * 64 + column;
            uint pairs[TOKENS][8];
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                const int m = 8 * t + int(lane) / 4;
                x.load(m, k, m < M && k < K, pairs[t]);
            }
            const uint f = E4m3::factor(scale_of[i]);
#pragma unroll
            for (int q = 0; q < 4; q++) {
                uint a[2], b[2];
                E4m3::decode(words[i][0][q], f, a);
                E4m3::decode(words[i][1][q], f, b);
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    mma(sum[t], a[0], b[0], a[1], b[1], pairs[t][2 * q], pairs[t][2 * q + 1]);
                }
            }
            load(i, first + (i + DEPTH) * SPLIT);
        }
    }

    if (SPLIT > 1) {
#pragma unroll
        for (int i = 0; i < 4 * TOKENS; i++) {
            scratch[(warp * 4 * TOKENS + i) * 32 + lane] = sum[i / 4][i % 4];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4 * TOKENS; i++) {
        if (i % SPLIT != warp) {
            continue;
        }
        float total = sum[i / 4][i % 4];
        if (SPLIT > 1) {
            total = 0.0f;
#pragma unroll
            for (int w = 0; w < SPLIT; w++) {
                total += scratch[(w * 4 * TOKENS + i) * 32 + lane];
            }
        }
        const int n = tile * TILE_ROWS + sum_row(lane, i % 4);
        const int m = i / 4 * 8 + sum_token(lane, i % 4);
        if (m < M && n < N) {
            out[(m * G + g) * N + n] = bfloat16_t(total * UNIT);
        }
    }
}

// Sixteen values from code `at` on of [N, K].
template <int N, int K>
inline void unpack_fp8(const uint* weight, const uchar* scale, bfloat16_t* out, size_t at) {
    const uint4 words = load_once(weight + at / 4);
    const int row = int(at / K), column = int(at % K);
    const size_t tile_row = row / N * ((N + 31) / 32) + row % N / 32;
    // Times 2^120 by two factors, neither of which leaves bf16.
    const uint factor = power_pair(scale[tile_row * (K / 32) + column / 32] + 60);
    const uint rest = power_pair(127 + 60);
    uint4 half_of[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint word = words[i];
        const uint even =
            times(times((word << 8 & 0x80008000u) | (word << 4 & 0x07f007f0u), rest), factor);
        const uint odd = times(times((word & 0x80008000u) | (word >> 4 & 0x07f007f0u), rest), factor);
        half_of[i / 2][i % 2 * 2] = __byte_perm(even, odd, 0x5410);
        half_of[i / 2][i % 2 * 2 + 1] = __byte_perm(even, odd, 0x7632);
    }
    reinterpret_cast<uint4*>(out + at)[0] = half_of[0];
    reinterpret_cast<uint4*>(out + at)[1] = half_of[1];
}
