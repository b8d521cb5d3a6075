// Sparse attention over packed rows that are keys and values at once (docs/model.md, section 3.4).
//
//     score(h, row) = q[h] . row / sqrt(D)
//     out[h] = sum over rows of w(h, row) * row, its last R channels turned back by the position
//     w(h, .) = softmax over the query's rows and one sink of the head, which has no value
//
// q [Q, H, D] in T; which rows a query sees, and how they lie, packed and in the tile, is told in
// packed_rows.metal. D is a multiple of 64, R of 4, HEADS of 8; H is any. All sums are f32; out is
// rounded to T once.
//
// attend: threadgroups of 256 threads, one for each (HEADS heads, slice of the rows, query). It
// unpacks TILE rows into threadgroup memory once for all of its heads, multiplies by 8 x 8
// matrices, and keeps the output in registers: a simdgroup holds D/8 channels of every head. For
// D = 512 that is 19 KiB of threadgroup memory with 8 heads and 27 KiB with 32.
// A decode step has 8 groups of 8 heads, so the rows are cut into 10 slices of 64: 80 threadgroups
// for 80 cores. store_part writes each slice's sums and merge adds them, 256 threadgroups of one
// simdgroup. From 80 groups of heads on (10 queries), nothing is cut and store_out ends the work.
// 640 rows are 215 KB and 84 MFLOP for 64 heads, 390 FLOP for each byte of a row; with the sums of
// the slices, written by one launch and read by the next, 28 for each byte.
// Every tile reads its heads' q again, and turns it again.

constant constexpr int THREADS = 256;
constant constexpr int SIMDGROUPS = THREADS / 32;
// Of the quarters of D in a score one simdgroup sums one, for half of the tile's rows.
constant constexpr int QUARTERS = SIMDGROUPS * 8 / TILE;
// Stands for minus infinity where exp must not see one.
constant constexpr float BELOW_ALL = -1e30f;

using Matrix = simdgroup_matrix<float, 8, 8>;

inline Matrix matrix_of(float first, float second) {
    Matrix matrix;
    matrix.thread_elements()[0] = first;
    matrix.thread_elements()[1] = second;
    return matrix;
}

inline float2 elements_of(thread Matrix& matrix) {
    return float2(matrix.thread_elements()[0], matrix.thread_elements()[1]);
}

// Which elements of a matrix a lane holds: (row, column) and (row, column + 1).
#ifndef SIMDGROUP_MATRIX_ROW
#define SIMDGROUP_MATRIX_ROW(lane) ((lane / 4 & 4) + lane / 2 % 4)
#define SIMDGROUP_MATRIX_COLUMN(lane) ((lane / 4 & 2) * 2 + lane % 2 * 2)
#endif
inline int matrix_row(uint lane) {
    return int(SIMDGROUP_MATRIX_ROW(lane));
}
inline int matrix_column(uint lane) {
    return int(SIMDGROUP_MATRIX_COLUMN(lane));
}

// A pair of channels turned by its position's angle, or back. `cos` and `sin` point at the pair's
// entries of the table, in which sin has the sign of each half.
template <bool IS_INVERSE, typename Table>
inline float2 turned(float2 x, Table cos, Table sin) {
    const float2 sine = IS_INVERSE ? float2(-sin[0], -sin[1]) : float2(sin[0], sin[1]);
    return float2(x.x * cos[0] + x.y * sine.x, x.y * cos[1] + x.x * sine.y);
}

// Softmax sums of some rows, relative to the largest score. A simdgroup has D/8 channels of `out`
// for every head; `top` and `total` are those of the heads that head_of gives its lanes.
template <int D, int HEADS>
struct Attended {
    Matrix out[HEADS / 8][D / 64];
    float top[(HEADS + 15) / 16];
    float total[(HEADS + 15) / 16];
};

// The softmax of a head is the work of half a simdgroup: one lane for each row of the tile.
inline int head_of(int i, uint simdgroup, uint lane) {
    return 16 * i + 2 * int(simdgroup) + int(lane) / TILE;
}

inline float half_max(float value) {
    for (ushort step = TILE / 2; step > 0; step /= 2) {
        value = max(value, simd_shuffle_xor(value, step));
    }
    return value;
}

inline float half_sum(float value) {
    for (ushort step = TILE / 2; step > 0; step /= 2) {
        value += simd_shuffle_xor(value, step);
    }
    return value;
}

// Attend to the rows [begin, end) of a query with the heads from `head` on. `q` points at that
// query's heads, `heads` of them in all; `cos` and `sin` f32 [R] are its position's, by which q is
// turned here if TURNS and rounded to T, as an operation before would do. Threadgroup memory:
// `tile` TILE rows of tile_pitch(D) words, `scores` QUARTERS * HEADS * TILE, `weights`
// HEADS * TILE, `factors` HEADS, `seen` TILE.
template <
    typename T, int D, int R, int HEADS, int CHOSEN, bool TURNS, typename Chosen, typename Table>
inline void attend(
    const device T* q,
    int head,
    int heads,
    const device uint* window,
    const device uint* compressed,
    Chosen chosen,
    Table cos,
    Table sin,
    QueryRows rows,
    int begin,
    int end,
    threadgroup uint4* tile,
    threadgroup float* scores,
    threadgroup float* weights,
    threadgroup float* factors,
    threadgroup uchar* seen,
    thread Attended<D, HEADS>& sums,
    uint thread_index,
    uint simdgroup,
    uint lane) {
    constexpr int PITCH = tile_pitch(D);
    constexpr int CHANNELS = D / 64;  // matrices of a simdgroup's channels
    constexpr int OWNED = (HEADS + 15) / 16;
    const float scale = rsqrt(float(D));
    const threadgroup uint* pairs = reinterpret_cast<const threadgroup uint*>(tile);
    const int row = matrix_row(lane);
    const int column = matrix_column(lane);

    DS41_UNROLL
    for (int i = 0; i < OWNED; i++) {
        sums.top[i] = BELOW_ALL;
        sums.total[i] = 0.0f;
    }
    DS41_UNROLL
    for (int h = 0; h < HEADS / 8; h++) {
        DS41_UNROLL
        for (int c = 0; c < CHANNELS; c++) {
            sums.out[h][c] = matrix_of(0.0f, 0.0f);
        }
    }
    for (int first = begin; first < end; first += TILE) {
        // 1. Unpack.
        unpack_tile<D, CHOSEN>(
            window, compressed, chosen, rows, first, end, tile, seen, thread_index, THREADS);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // 2. Scores of 8 rows over a quarter of the channels.
        {
            const int half_tile = int(simdgroup) % (TILE / 8);
            const int quarter = int(simdgroup) / (TILE / 8);
            Matrix score[HEADS / 8];
            DS41_UNROLL
            for (int h = 0; h < HEADS / 8; h++) {
                score[h] = matrix_of(0.0f, 0.0f);
            }
            for (int k = 0; k < D / QUARTERS; k += 8) {
                const int channel = quarter * (D / QUARTERS) + k;
                const threadgroup uint* key =
                    pairs + (8 * half_tile + column) * PITCH + (channel + row) / 2;
                const Matrix keys =
                    matrix_of(bf16_half(key[0], row % 2), bf16_half(key[PITCH], row % 2));
                DS41_UNROLL
                for (int h = 0; h < HEADS / 8; h++) {
                    float2 query = float2(0.0f);
                    if (head + 8 * h + row < heads) {
                        const vec<T, 2> two = *reinterpret_cast<const device vec<T, 2>*>(
                            q + size_t(head + 8 * h + row) * D + channel + column);
                        query = float2(float(two.x), float(two.y));
                    }
                    const int pair = channel + column - (D - R);
                    if (TURNS && pair >= 0) {
                        query = turned<false>(query, cos + pair, sin + pair);
                        query = float2(float(T(query.x)), float(T(query.y)));
                    }
                    simdgroup_multiply_accumulate(
                        score[h], matrix_of(query.x, query.y), keys, score[h]);
                }
            }
            DS41_UNROLL
            for (int h = 0; h < HEADS / 8; h++) {
                threadgroup float* out = scores + (quarter * HEADS + 8 * h + row) * TILE
                    + 8 * half_tile + column;
                const float2 two = elements_of(score[h]);
                out[0] = two.x;
                out[1] = two.y;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // 3. Weights, relative to the largest score so far.
        DS41_UNROLL
        for (int i = 0; i < OWNED; i++) {
            const int h = head_of(i, simdgroup, lane);
            if (16 * i + 2 * int(simdgroup) < HEADS) {
                const int slot = int(lane) % TILE;
                float score = 0.0f;
                for (int quarter = 0; quarter < QUARTERS; quarter++) {
                    score += scores[(quarter * HEADS + h) * TILE + slot];
                }
                const bool is_seen = seen[slot] != 0;
                score = is_seen ? score * scale : BELOW_ALL;
                const float top = max(sums.top[i], half_max(score));
                const float weight = is_seen ? exp(score - top) : 0.0f;
                const float factor = exp(sums.top[i] - top);
                sums.total[i] = sums.total[i] * factor + half_sum(weight);
                sums.top[i] = top;
                weights[h * TILE + slot] = weight;
                if (slot == 0) {
                    factors[h] = factor;
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // 4. Weighted rows, each simdgroup for its channels.
        DS41_UNROLL
        for (int h = 0; h < HEADS / 8; h++) {
            const float factor = factors[8 * h + row];
            DS41_UNROLL
            for (int c = 0; c < CHANNELS; c++) {
                sums.out[h][c].thread_elements()[0] *= factor;
                sums.out[h][c].thread_elements()[1] *= factor;
            }
        }
        for (int k = 0; k < TILE; k += 8) {
            Matrix weight[HEADS / 8];
            DS41_UNROLL
            for (int h = 0; h < HEADS / 8; h++) {
                const threadgroup float* at = weights + (8 * h + row) * TILE + k + column;
                weight[h] = matrix_of(at[0], at[1]);
            }
            DS41_UNROLL
            for (int c = 0; c < CHANNELS; c++) {
                const int channel = 8 * (int(simdgroup) * CHANNELS + c) + column;
                const uint pair = pairs[(k + row) * PITCH + channel / 2];
                const Matrix values = matrix_of(bf16_half(pair, 0), bf16_half(pair, 1));
                DS41_UNROLL
                for (int h = 0; h < HEADS / 8; h++) {
                    simdgroup_multiply_accumulate(
                        sums.out[h][c], weight[h], values, sums.out[h][c]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// Write the sums of a slice: `parts` f32 [heads, D], `stats` f32 [heads, 2], both of that slice.
template <int D, int HEADS>
inline void store_part(
    thread Attended<D, HEADS>& sums,
    int head,
    int heads,
    device float* parts,
    device float* stats,
    uint simdgroup,
    uint lane) {
    constexpr int CHANNELS = D / 64;
    DS41_UNROLL
    for (int h = 0; h < HEADS / 8; h++) {
        const int to = head + 8 * h + matrix_row(lane);
        DS41_UNROLL
        for (int c = 0; c < CHANNELS; c++) {
            const int channel = 8 * (int(simdgroup) * CHANNELS + c) + matrix_column(lane);
            if (to < heads) {
                *reinterpret_cast<device float2*>(parts + size_t(to) * D + channel) =
                    elements_of(sums.out[h][c]);
            }
        }
    }
    DS41_UNROLL
    for (int i = 0; i < (HEADS + 15) / 16; i++) {
        const int h = head_of(i, simdgroup, lane);
        if (h < HEADS && head + h < heads && lane % TILE == 0) {
            stats[2 * (head + h)] = sums.top[i];
            stats[2 * (head + h) + 1] = sums.total[i];
        }
    }
}

// Divide by the softmax's sum with the sink, turn back, round: `out` T [heads, D] of the query,
// `cos` and `sin` f32 [R] of its position.
template <typename T, int D, int R, int HEADS, typename Sinks, typename Table>
inline void store_out(
    thread Attended<D, HEADS>& sums,
    int head,
    int heads,
    Sinks sinks,
    Table cos,
    Table sin,
    device T* out,
    threadgroup float* factors,
    uint simdgroup,
    uint lane) {
    constexpr int CHANNELS = D / 64;
    DS41_UNROLL
    for (int i = 0; i < (HEADS + 15) / 16; i++) {
        const int h = head_of(i, simdgroup, lane);
        if (h < HEADS && head + h < heads && lane % TILE == 0) {
            const float sink = sinks[head + h];
            const float top = max(sums.top[i], sink);
            const float share = exp(sums.top[i] - top);
            factors[h] = share / (sums.total[i] * share + exp(sink - top));
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    DS41_UNROLL
    for (int h = 0; h < HEADS / 8; h++) {
        const int of_group = 8 * h + matrix_row(lane);
        if (head + of_group < heads) {
            const float factor = factors[of_group];
            DS41_UNROLL
            for (int c = 0; c < CHANNELS; c++) {
                const int channel = 8 * (int(simdgroup) * CHANNELS + c) + matrix_column(lane);
                float2 x = factor * elements_of(sums.out[h][c]);
                if (channel >= D - R) {
                    x = turned<true>(x, cos + channel - (D - R), sin + channel - (D - R));
                }
                *reinterpret_cast<device vec<T, 2>*>(
                    out + size_t(head + of_group) * D + channel) = vec<T, 2>(T(x.x), T(x.y));
            }
        }
    }
}

// Add the slices of one head for four channels, with the sink, and end as store_out does. `parts`
// and `stats` point at the query's first slice, `out` at the head.
template <typename T, int D, int R, typename Stats, typename Table>
inline void merge(
    const device float* parts,
    Stats stats,
    int slices,
    int head,
    int heads,
    float sink,
    Table cos,
    Table sin,
    device T* out,
    int channel) {
    float top = sink;
    for (int slice = 0; slice < slices; slice++) {
        top = max(top, stats[2 * (slice * heads + head)]);
    }
    float total = exp(sink - top);
    float4 sum = float4(0.0f);
    for (int slice = 0; slice < slices; slice++) {
        const int at = slice * heads + head;
        const float share = exp(stats[2 * at] - top);
        total += share * stats[2 * at + 1];
        sum += share * *reinterpret_cast<const device float4*>(parts + size_t(at) * D + channel);
    }
    sum /= total;
    if (channel >= D - R) {
        const int pair = channel - (D - R);
        sum.xy = turned<true>(sum.xy, cos + pair, sin + pair);
        sum.zw = turned<true>(sum.zw, cos + pair + 2, sin + pair + 2);
    }
    *reinterpret_cast<device vec<T, 4>*>(out + channel) =
        vec<T, 4>(T(sum.x), T(sum.y), T(sum.z), T(sum.w));
}
