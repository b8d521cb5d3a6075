// The routed experts for many tokens: pairs of a token and a chosen expert, sorted by expert, in
// tiles of up to M pairs.
//
//   act[i] = w[p] * silu(min(gate, limit)) * clip(up, -limit, limit), p = order[i]
//       gate = w1[ids[p]] x[p / k], up = w3[ids[p]] x[p / k]
//   out[p] = w2[ids[p]] act[i]
//
// x: T [tokens, D], order: uint [pairs], the pairs in the order of their experts, ids: int and
// w: float [tokens, k], act: T [pairs, I], out: float [pairs, D]; T is float or bfloat. Codes in
// words and e8m0 scales as released: w1, w3 [E, I, D], w2 [E, D, I]. Products are f32.
//
// list_tiles: one threadgroup finds each expert's range of the sorted pairs and writes the tiles
// that have pairs, then empty ones up to the number that the launches after it must allow for:
// nobody reads a count back. Threadgroup memory: 128 bytes. It is one core's work, two searches a
// thread and 12 KB of tiles for a chunk of 2,048 tokens: a launch's time before products of
// milliseconds, with about 1 operation a byte.
// multiply_tile: sums[M][TILE_COLUMNS] = M rows of x times TILE_COLUMNS rows of weights over K, by
// four simdgroups with 8 x 8 matrices, in steps of 32 inputs, one group of scales. Codes become T,
// which holds them exactly, in threadgroup memory: 2 M flops for a weight of 17/32 bytes, so at 32
// rows the products bound it, not the reading. An operand is used from registers 2 or 4 times.
// Threadgroup memory: the operands and, later in the same place, the sums, tile_words<T, M>():
// 15,360 bytes for f32 and 8,704 for bf16 at M = 32.
// gate_up_tile, down_tile: a threadgroup of 128 threads a tile and TILE_COLUMNS columns, grid
// (I / 32 or D / 64 groups, tiles): 43,200 and 48,000 threadgroups for 600 tiles at the released
// widths.

constant constexpr uint TILE_COLUMNS = 64;
constant constexpr uint TILE_THREADS = 128;
constant constexpr uint GROUP = 32;
// Rows start in different banks, and at multiples of 16 bytes.
constant constexpr uint OPERAND_STRIDE = GROUP + 8;
constant constexpr uint SUM_STRIDE = TILE_COLUMNS + 4;

template <typename T, uint M>
constexpr uint tile_words() {
    const uint operands = (M + TILE_COLUMNS) * OPERAND_STRIDE * sizeof(T) / 4;
    const uint sums = M * SUM_STRIDE;
    return operands > sums ? operands : sums;
}

// The first of `pairs` places in the sorted order whose expert is at least `expert`.
template <typename Ids, typename Order>
inline uint first_pair(Ids ids, Order order, uint pairs, uint expert) {
    uint low = 0;
    // The same number of steps whatever it finds, so that lanes stay together.
    for (uint left = pairs; left > 1; left -= left / 2) {
        low += uint(ids[order[low + left / 2 - 1]]) < expert ? left / 2 : 0;
    }
    return low + (uint(ids[order[low]]) < expert ? 1 : 0);
}

// Tiles of four words: expert, first place in the sorted order, pairs, nothing. A thread an expert;
// `count` says how many tiles there are room for.
template <uint M, uint E, typename Ids, typename Order>
inline void list_tiles(
    Ids ids,
    Order order,
    device uint* tiles,
    threadgroup uint* scratch,
    uint pairs,
    uint count,
    uint expert,
    uint threads,
    uint simdgroup,
    uint lane) {
    const uint first = first_pair(ids, order, pairs, min(expert, E));
    const uint end = first_pair(ids, order, pairs, min(expert + 1, E));
    const uint own = (end - first + M - 1) / M;
    uint place = simd_prefix_exclusive_sum(own);
    if (lane == SIMD - 1) {
        scratch[simdgroup] = place + own;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint of_simdgroup = lane < threads / SIMD ? scratch[lane] : 0;
    place += simd_sum(lane < simdgroup ? of_simdgroup : 0);
    const uint total = simd_sum(of_simdgroup);
    for (uint i = 0; i < own; i++) {
        device uint* tile = tiles + 4 * (place + i);
        tile[0] = expert;
        tile[1] = first + i * M;
        tile[2] = min(end - first - i * M, M);
        tile[3] = 0;
    }
    for (uint i = total * 4 + expert; i < count * 4; i += threads) {
        tiles[i] = 0;
    }
}

// A thread's share of a group of x: row `thread_index / 8` and on, 4 values each. Rows from `rows`
// on are zero. `place` gives a row's place in x.
template <typename T, uint M>
inline void stage_rows(
    const device T* x,
    threadgroup T* to,
    const thread uint* place,
    uint K,
    uint rows,
    uint from,
    uint thread_index) {
    constexpr uint STEP = TILE_THREADS / 8;
    const uint column = thread_index % 8 * 4;
    DS41_UNROLL
    for (uint i = 0; i * STEP < M; i++) {
        const uint r = thread_index / 8 + i * STEP;
        if (r < M) {
            vec<T, 4> v = vec<T, 4>(T(0.0f));
            if (r < rows) {
                v = *reinterpret_cast<const device vec<T, 4>*>(x + place[i] * K + from + column);
            }
            *reinterpret_cast<threadgroup vec<T, 4>*>(to + r * OPERAND_STRIDE + column) = v;
        }
    }
}

// A thread's share of a group of weights: half of one row's. `codes` and `scales` point to the row.
template <typename T>
inline void stage_weights(
    const device uint* codes,
    const device uchar* scales,
    threadgroup T* to,
    uint group,
    uint half_row) {
    const uint2 words = reinterpret_cast<const device uint2*>(codes)[2 * group + half_row];
    const float scale = e8m0(uint(scales[group]));
    DS41_UNROLL
    for (uint i = 0; i < 2; i++) {
        vec<T, 4> low, high;
        DS41_UNROLL
        for (uint j = 0; j < 4; j++) {
            const half2 pair = e2m1_pair(words[i], j);
            low[j] = T(float(pair.x) * E2M1_UNIT * scale);
            high[j] = T(float(pair.y) * E2M1_UNIT * scale);
        }
        threadgroup vec<T, 4>* out = reinterpret_cast<threadgroup vec<T, 4>*>(to + 8 * i);
        out[0] = low;
        out[1] = high;
    }
}

// `place`: of this thread's rows in x; `codes`, `scales`: of this thread's row of weights, row
// `thread_index / 2` of the tile. The sums lie in `memory`, SUM_STRIDE a row, for all to read.
template <typename T, uint M, uint K>
inline void multiply_tile(
    const device T* x,
    const thread uint* place,
    uint rows,
    const device uint* codes,
    const device uchar* scales,
    threadgroup float* memory,
    uint thread_index,
    uint simdgroup) {
    // A simdgroup makes DOWN x ACROSS matrices.
    constexpr uint DOWN = M < 16 ? 1 : 2;
    constexpr uint SIDE = TILE_THREADS / SIMD / (M / (8 * DOWN));
    constexpr uint ACROSS = TILE_COLUMNS / 8 / SIDE;
    const uint row = simdgroup / SIDE * 8 * DOWN, column = simdgroup % SIDE * 8 * ACROSS;
    threadgroup T* left = reinterpret_cast<threadgroup T*>(memory);
    threadgroup T* right = left + M * OPERAND_STRIDE;
    simdgroup_matrix<float, 8, 8> sum[DOWN][ACROSS];
    DS41_UNROLL
    for (uint i = 0; i < DOWN; i++) {
        DS41_UNROLL
        for (uint j = 0; j < ACROSS; j++) {
            sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }
    for (uint group = 0; group < K / GROUP; group++) {
        stage_rows<T, M>(x, left, place, K, rows, group * GROUP, thread_index);
        const uint half_row = thread_index % 2;
        threadgroup T* to = right + thread_index / 2 * OPERAND_STRIDE + half_row * (GROUP / 2);
        stage_weights(codes, scales, to, group, half_row);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint k = 0; k < GROUP; k += 8) {
            simdgroup_matrix<T, 8, 8> a[DOWN], b[ACROSS];
            DS41_UNROLL
            for (uint i = 0; i < DOWN; i++) {
                simdgroup_load(a[i], left + (row + 8 * i) * OPERAND_STRIDE + k, OPERAND_STRIDE);
            }
            DS41_UNROLL
            for (uint j = 0; j < ACROSS; j++) {
                simdgroup_load(
                    b[j], right + (column + 8 * j) * OPERAND_STRIDE + k, OPERAND_STRIDE,
                    ulong2(0, 0), true);
            }
            DS41_UNROLL
            for (uint i = 0; i < DOWN; i++) {
                DS41_UNROLL
                for (uint j = 0; j < ACROSS; j++) {
                    simdgroup_multiply_accumulate(sum[i][j], a[i], b[j], sum[i][j]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    DS41_UNROLL
    for (uint i = 0; i < DOWN; i++) {
        DS41_UNROLL
        for (uint j = 0; j < ACROSS; j++) {
            simdgroup_store(
                sum[i][j], memory + (row + 8 * i) * SUM_STRIDE + column + 8 * j, SUM_STRIDE);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// act of a tile's pairs for 32 rows of w1 and w3, in sorted order: T [pairs, I].
template <
    typename T, uint M, uint K, uint D, uint I, typename Order, typename Floats, typename Tiles>
inline void gate_up_tile(
    const device T* x,
    Order order,
    Floats weights,
    Tiles tile,
    const device uint* w1,
    const device uchar* w1_scale,
    const device uint* w3,
    const device uchar* w3_scale,
    float limit,
    device T* act,
    threadgroup float* memory,
    uint column,
    uint thread_index,
    uint simdgroup) {
    const uint first = tile[1], rows = tile[2];
    if (rows == 0) {
        return;
    }
    uint place[(M + 15) / 16];
    DS41_UNROLL
    for (uint i = 0; i < (M + 15) / 16; i++) {
        const uint r = thread_index / 8 + 16 * i;
        place[i] = r < rows ? uint(order[first + r]) / K : 0;
    }
    const uint half_width = TILE_COLUMNS / 2, w_row = thread_index / 2;
    const uint from = tile[0] * I + column * half_width + w_row % half_width;
    const device uint* codes = (w_row < half_width ? w1 : w3) + from * (D / 8);
    const device uchar* scales = (w_row < half_width ? w1_scale : w3_scale) + from * (D / 32);
    multiply_tile<T, M, D>(x, place, rows, codes, scales, memory, thread_index, simdgroup);
    for (uint i = thread_index; i < rows * half_width; i += TILE_THREADS) {
        const uint r = i / half_width, c = i % half_width;
        const float weight = weights[order[first + r]];
        const float gate = memory[r * SUM_STRIDE + c], up = memory[r * SUM_STRIDE + half_width + c];
        const float value = clamped_swiglu(gate, up, limit) * weight;
        act[(first + r) * I + column * half_width + c] = T(value);
    }
}

// The experts' outputs for a tile's pairs and 64 rows of w2, at the pairs' own places:
// float [pairs, D].
template <typename T, uint M, uint D, uint I, typename Order, typename Tiles>
inline void down_tile(
    const device T* act,
    Order order,
    Tiles tile,
    const device uint* w2,
    const device uchar* w2_scale,
    device float* out,
    threadgroup float* memory,
    uint column,
    uint thread_index,
    uint simdgroup) {
    const uint first = tile[1], rows = tile[2];
    if (rows == 0) {
        return;
    }
    uint place[(M + 15) / 16];
    DS41_UNROLL
    for (uint i = 0; i < (M + 15) / 16; i++) {
        place[i] = first + thread_index / 8 + 16 * i;
    }
    // The last columns may be 32; the threads of the others repeat the last row.
    const uint columns = min(D - column * TILE_COLUMNS, TILE_COLUMNS);
    const uint from = tile[0] * D + column * TILE_COLUMNS + min(thread_index / 2, columns - 1);
    multiply_tile<T, M, I>(
        act, place, rows, w2 + from * (I / 8), w2_scale + from * (I / 32), memory, thread_index,
        simdgroup);
    for (uint i = thread_index; i < rows * columns; i += TILE_THREADS) {
        const uint r = i / columns, c = i % columns;
        out[uint(order[first + r]) * D + column * TILE_COLUMNS + c] = memory[r * SUM_STRIDE + c];
    }
}
