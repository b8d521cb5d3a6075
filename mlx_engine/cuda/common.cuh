// What the kernels written for CUDA share: packed weights as fragments of mma.sync, products of them.
//
// A warp takes 16 rows of weights and up to 8 tokens a product: m16n8k16, weights left, x right, f32
// sums. The order of K is free as long as both sides have the same: a lane loads 16 bytes in a row
// of codes, four lanes stand side by side in it, and what two codes 16 bits apart become is a pair.
//
// Codes become bf16 by placing exponent and mantissa, which is the value times a power of two, and
// by one product with a power of two that restores it and applies the scale. All of that is exact
// for scales from 2^-60 to 2^57. Values are 2^-56 of the real ones until the sum is made, so that
// neither the factor nor the product leaves bf16's range.

constexpr int UNIT_LOG2 = 56;
constexpr float UNIT = 72057594037927936.0f;  // 2^56

constexpr int TILE_ROWS = 16;

// 16 bytes that no other block reads.
inline uint4 load_once(const void* from) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(from));
    return v;
}

inline uint times(uint pair, uint factor) {
    uint product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(product) : "r"(pair), "r"(factor), "r"(0x80008000u));
    return product;
}

// A power of two twice, by its exponent with bf16's bias.
inline uint power_pair(uint exponent) {
    return min(exponent, 254u) * 0x00800080u;
}

// sum[16 x 8] += a[16 x 16] b[16 x 8].
inline void mma(float* sum, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The two formats: codes in 16 bytes; the factor of an e8m0 scale; the pairs of a word of codes, and
// the values of x that meet them, from words of two neighbours.
struct E4m3 {
    static constexpr int CODES = 16;
    static constexpr int PAIRS = 2;
    static inline uint factor(uint scale) { return power_pair(scale + 120 - UNIT_LOG2); }
    static inline void decode(uint word, uint factor, uint* pair) {
        pair[0] = times((word << 8 & 0x80008000u) | (word << 4 & 0x07f007f0u), factor);
        pair[1] = times((word & 0x80008000u) | (word >> 4 & 0x07f007f0u), factor);
    }
    static inline void arrange(const uint* x, uint* pair) {
        pair[0] = __byte_perm(x[0], x[1], 0x5410);
        pair[1] = __byte_perm(x[0], x[1], 0x7632);
    }
};

struct E2m1 {
    static constexpr int CODES = 32;
    static constexpr int PAIRS = 4;
    static inline uint factor(uint scale) { return power_pair(scale + 126 - UNIT_LOG2); }
    static inline void decode(uint word, uint factor, uint* pair) {
        pair[0] = times((word << 12 & 0x80008000u) | (word << 6 & 0x01c001c0u), factor);
        pair[1] = times((word << 8 & 0x80008000u) | (word << 2 & 0x01c001c0u), factor);
        pair[2] = times((word << 4 & 0x80008000u) | (word >> 2 & 0x01c001c0u), factor);
        pair[3] = times((word & 0x80008000u) | (word >> 6 & 0x01c001c0u), factor);
    }
    static inline void arrange(const uint* x, uint* pair) {
        pair[0] = __byte_perm(x[0], x[2], 0x5410);
        pair[1] = __byte_perm(x[0], x[2], 0x7632);
        pair[2] = __byte_perm(x[1], x[3], 0x5410);
        pair[3] = __byte_perm(x[1], x[3], 0x7632);
    }
};

// K that a warp covers with 16 bytes a lane.
template <typename F>
constexpr int chunk_columns() {
    return 4 * F::CODES;
}

// A lane's share of x in a chunk, arranged: F::CODES values from `x` on, or zeros for null.
template <typename F>
inline void load_x(const bfloat16_t* x, uint* pairs) {
    uint words[F::CODES / 2];
#pragma unroll
    for (int i = 0; i < F::CODES / 8; i++) {
        const uint4 v = x == nullptr ? uint4(0) : reinterpret_cast<const uint4*>(x)[i];
        words[4 * i] = v.x;
        words[4 * i + 1] = v.y;
        words[4 * i + 2] = v.z;
        words[4 * i + 3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < F::CODES / 2; i += F::PAIRS) {
        F::arrange(words + i, pairs + i);
    }
}

// sum += the products of a chunk of 16 rows with x: `low` and `high` are this lane's bytes of the
// rows lane / 4 and lane / 4 + 8.
template <typename F>
inline void add_products(
    float* sum, uint4 low, uint4 high, uint low_factor, uint high_factor, const uint* x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint a[F::PAIRS], b[F::PAIRS];
        F::decode(low[i], low_factor, a);
        F::decode(high[i], high_factor, b);
#pragma unroll
        for (int p = 0; p < F::PAIRS; p += 2) {
            const uint* pairs = x + i * F::PAIRS + p;
            mma(sum, a[p], b[p], a[p + 1], b[p + 1], pairs[0], pairs[1]);
        }
    }
}

// The place of a sum's element `i` of a lane: row of the tile, token.
inline int sum_row(uint lane, int i) {
    return int(lane) / 4 + i / 2 * 8;
}
inline int sum_token(uint lane, int i) {
    return int(lane) % 4 * 2 + i % 2;
}
