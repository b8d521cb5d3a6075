// Products with the dense weights, out[m, n] = sum_k x[m, k] w[n, k], for each of G groups.
//
//   x       T [M, G, K]                 bf16 or f32
//   weight  W [G, N, K]                 e4m3 codes (W = uchar), bf16 or f32, read as it is stored
//   scale   uchar [G, ceil(N/32), K/32] e8m0, one per 32 x 32 tile of e4m3 codes
//   out     O [M, G, N]                 T for e4m3 weights, f32 for the others
//
// K is a multiple of 32, x and the weight start at a multiple of 16 bytes. Sums are f32 and are
// rounded once, to O.
//
// Few rows: bound by the bytes of the weight, each of which is read once for up to 8 rows.
//   A simdgroup makes 4 outputs of M rows; its lanes, and SPLIT simdgroups, share K in pieces of 16
//   bytes. Grid: threadgroups of max(4, SPLIT) simdgroups, over N; then G; then blocks of M rows,
//   since up to 32 rows fill the GPU better so, the weight coming from its caches for all blocks
//   but one. Threadgroup memory: 128 bytes a simdgroup, at most 1 KiB. Arithmetic: 2 M operations a
//   byte of e4m3, and about 2 to decode it. Geometry: 80 cores want some 1280 simdgroups to keep
//   their loads in flight. N/4 falls short of it where N < 5120, there SPLIT, up to 8, makes up for
//   it. Two products of one x are one launch, whose first threadgroups make the one and the others
//   the other: 1792 simdgroups for wq_a with wkv, 2048 for a compressor's two. Short of it is the
//   index keys' product alone, 64 on 128 KB. x is loaded 8 bytes at a time, from places 32 apart.
//
// Many rows: bound by arithmetic, in simdgroup matrices. A threadgroup of 4 simdgroups makes
//   64 x 64 outputs, each simdgroup 32 x 32 in 16 matrices. It walks K in tiles of 32, the width of
//   a scale: both operands are staged in threadgroup memory in the type C, weights decoded and
//   scaled, which is exact in bf16 too. Grid: M, N, G. C is bf16 when x and the weight lose nothing
//   by it, else f32. Threadgroup memory: 14 KiB in bf16, 22 KiB in f32. Arithmetic: 64 operations a
//   byte of x in bf16 and 128 a byte of e4m3, 43 together, above the 34 at which 28 TFLOP/s meet
//   819 GB/s. Geometry: 2048 rows and N = 512 are 256 threadgroups, three a core. Short of 80
//   cores' work: 33 to 64 rows of N < 5120, which only the last piece of a prompt has.

constant constexpr uint TILE = 32;
// Outputs of a simdgroup: a divisor of TILE, so that they share a scale.
constant constexpr uint ROWS = 4;

// Sixteen bytes of a weight's row: four values of them at a time, in units of UNIT.
template <typename W>
struct Piece {
    static constant constexpr float UNIT = 1.0f;
    static inline float4 quad(uint4 bits, uint) { return as_type<float4>(bits); }
};

template <>
struct Piece<bfloat16_t> {
    static constant constexpr float UNIT = 1.0f;
    static inline float4 quad(uint4 bits, uint i) {
        const uint low = bits[2 * i];
        const uint high = bits[2 * i + 1];
        return as_type<float4>(uint4(low << 16, low & 0xffff0000u, high << 16, high & 0xffff0000u));
    }
};

template <>
struct Piece<uchar> {
    static constant constexpr float UNIT = 256.0f;
    static inline float4 quad(uint4 bits, uint i) {
        // As in e4m3(), two codes at once: odd bytes already lie where an f16 has its upper one.
        const uint odd = bits[i];
        const uint even = odd << 8;
        const half2 a = as_type<half2>((even & 0x80008000u) | (even & 0x7f007f00u) >> 1);
        const half2 b = as_type<half2>((odd & 0x80008000u) | (odd & 0x7f007f00u) >> 1);
        return float4(float(a.x), float(b.x), float(a.y), float(b.y));
    }
};

// The scale of a tile. Small arrays lie in the constant space: the pointer's type is a parameter.
template <typename P>
struct TileScale {
    P bytes;
    uint columns;
    float at(uint row, uint column) const { return e8m0(bytes[row * columns + column]); }
    TileScale group(uint g, uint N) const {
        return TileScale{bytes + g * ((N + TILE - 1) / TILE) * columns, columns};
    }
};

template <typename P>
inline TileScale<P> tile_scale(P bytes, uint K) {
    return TileScale<P>{bytes, K / TILE};
}

struct NoScale {
    float at(uint, uint) const { return 1.0f; }
    NoScale group(uint, uint) const { return NoScale(); }
};

template <typename T>
inline float4 load4(const device T* x) {
    return float4(*(const device vec<T, 4>*)x);
}

// Few rows. TEAMS teams of SPLIT simdgroups are a threadgroup, `scratch` holds 32 floats for each
// of them; `at` is the threadgroup among those of N, g, and the block of M among `rows` rows.
template <typename T, typename W, int M, int N, int K, int G, int SPLIT, int TEAMS, typename S,
          typename O>
inline void few_rows(
    const device T* x,
    const device uint4* weight,
    S scale,
    device O* out,
    uint rows,
    threadgroup float* scratch,
    uint3 at,
    uint simdgroup,
    uint lane) {
    constexpr uint VALUES = 16 / sizeof(W);
    constexpr uint PIECES = K / VALUES;
    const uint team = simdgroup / SPLIT;
    const uint part = simdgroup % SPLIT;
    const uint first = (at.x * TEAMS + team) * ROWS;
    const S tiles = scale.group(at.y, N);
    x += at.y * K;
    weight += at.y * N * PIECES;

    float sum[M][ROWS] = {};
    for (uint piece = part * SIMD + lane; piece < PIECES; piece += SIMD * SPLIT) {
        // Past the last output and row the last one is made again, and not stored.
        uint4 bits[ROWS];
        DS41_UNROLL
        for (uint r = 0; r < ROWS; r++) {
            bits[r] = weight[min(first + r, uint(N - 1)) * PIECES + piece];
        }
        float products[M][ROWS] = {};
        DS41_UNROLL
        for (uint i = 0; i < VALUES / 4; i++) {
            float4 w[ROWS];
            DS41_UNROLL
            for (uint r = 0; r < ROWS; r++) {
                w[r] = Piece<W>::quad(bits[r], i);
            }
            DS41_UNROLL
            for (uint m = 0; m < M; m++) {
                const uint row = min(at.z * M + m, rows - 1);
                const float4 v = load4(x + row * G * K + piece * VALUES + 4 * i);
                DS41_UNROLL
                for (uint r = 0; r < ROWS; r++) {
                    products[m][r] += dot(w[r], v);
                }
            }
        }
        const float s = tiles.at(min(first, uint(N - 1)) / TILE, piece * VALUES / TILE);
        DS41_UNROLL
        for (uint m = 0; m < M; m++) {
            DS41_UNROLL
            for (uint r = 0; r < ROWS; r++) {
                // The unit first: it times the largest scale would overflow.
                sum[m][r] += products[m][r] * Piece<W>::UNIT * s;
            }
        }
    }

    // Lane m * ROWS + r keeps the sum of row m and output r.
    float mine = 0.0f;
    DS41_UNROLL
    for (uint m = 0; m < M; m++) {
        DS41_UNROLL
        for (uint r = 0; r < ROWS; r++) {
            const float total = simd_sum(sum[m][r]);
            mine = lane == m * ROWS + r ? total : mine;
        }
    }
    if (SPLIT > 1) {
        scratch[simdgroup * SIMD + lane] = mine;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint other = 1; other < SPLIT; other++) {
            mine += scratch[(team * SPLIT + (part + other) % SPLIT) * SIMD + lane];
        }
    }
    const uint n = first + lane % ROWS;
    const uint row = at.z * M + lane / ROWS;
    if (part == 0 && lane < M * ROWS && row < rows && n < N) {
        out[(row * G + at.y) * N + n] = O(mine);
    }
}

// The outputs of a threadgroup, each way, its threads, and the pitch of a staged row.
constant constexpr uint BLOCK = 64;
constant constexpr uint BLOCK_THREADS = 128;
template <typename C>
constexpr uint pitch() {
    return TILE + 16 / sizeof(C);
}

// Many rows. `left` and `right` hold BLOCK rows of pitch values, `stripes` 256 floats a simdgroup;
// `at` is the threadgroup among those of M, of N, and g.
template <typename T, typename W, typename C, int N, int K, int G, typename S, typename O>
inline void many_rows(
    const device T* x,
    const device uint4* weight,
    S scale,
    device O* out,
    uint M,
    threadgroup C* left,
    threadgroup C* right,
    threadgroup float* stripes,
    uint3 at,
    uint thread_index,
    uint simdgroup,
    uint lane) {
    constexpr uint VALUES = 16 / sizeof(W);
    constexpr uint PIECES = K / VALUES;
    constexpr uint PITCH = pitch<C>();
    const uint first_m = at.x * BLOCK;
    const uint first_n = at.y * BLOCK;
    const S tiles = scale.group(at.z, N);
    x += at.z * K;
    weight += at.z * N * PIECES;
    const uint own_m = simdgroup / 2 * TILE;
    const uint own_n = simdgroup % 2 * TILE;

    simdgroup_matrix<float, 8, 8> sum[4][4];
    DS41_UNROLL
    for (uint i = 0; i < 4; i++) {
        DS41_UNROLL
        for (uint j = 0; j < 4; j++) {
            sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }
    for (uint k = 0; k < K; k += TILE) {
        // The tile before has been read by all.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = thread_index; i < BLOCK * TILE / 4; i += BLOCK_THREADS) {
            const uint m = i / (TILE / 4);
            const uint column = i % (TILE / 4) * 4;
            float4 v = float4(0.0f);
            if (first_m + m < M) {
                v = load4(x + (first_m + m) * G * K + k + column);
            }
            *(threadgroup vec<C, 4>*)(left + m * PITCH + column) = vec<C, 4>(v);
        }
        for (uint i = thread_index; i < BLOCK * TILE / VALUES; i += BLOCK_THREADS) {
            const uint row = i / (TILE / VALUES);
            const uint column = i % (TILE / VALUES) * VALUES;
            // Past the last output the last one is made again, and not stored.
            const uint n = min(first_n + row, uint(N - 1));
            const uint4 bits = weight[n * PIECES + (k + column) / VALUES];
            const float s = tiles.at(n / TILE, k / TILE);
            DS41_UNROLL
            for (uint q = 0; q < VALUES / 4; q++) {
                const float4 w = Piece<W>::quad(bits, q) * Piece<W>::UNIT * s;
                *(threadgroup vec<C, 4>*)(right + row * PITCH + column + 4 * q) = vec<C, 4>(w);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint step = 0; step < TILE; step += 8) {
            simdgroup_matrix<C, 8, 8> a[4];
            simdgroup_matrix<C, 8, 8> b[4];
            DS41_UNROLL
            for (uint i = 0; i < 4; i++) {
                simdgroup_load(a[i], left + (own_m + 8 * i) * PITCH + step, PITCH);
                simdgroup_load(
                    b[i], right + (own_n + 8 * i) * PITCH + step, PITCH, ulong2(0, 0), true);
            }
            DS41_UNROLL
            for (uint i = 0; i < 4; i++) {
                DS41_UNROLL
                for (uint j = 0; j < 4; j++) {
                    simdgroup_multiply_accumulate(sum[i][j], a[i], b[j], sum[i][j]);
                }
            }
        }
    }

    // Eight rows at a time pass through threadgroup memory: matrices of f32 are not stored as bf16.
    threadgroup float* stripe = stripes + simdgroup * 8 * TILE;
    const uint n = first_n + own_n + lane;
    DS41_UNROLL
    for (uint i = 0; i < 4; i++) {
        DS41_UNROLL
        for (uint j = 0; j < 4; j++) {
            simdgroup_store(sum[i][j], stripe + 8 * j, TILE);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint row = 0; row < 8; row++) {
            const uint m = first_m + own_m + 8 * i + row;
            if (m < M && n < N) {
                out[(m * G + at.z) * N + n] = O(stripe[row * TILE + lane]);
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}
