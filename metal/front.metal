// What comes between the products and the cached rows: pooling, RMSNorm, RoPE, rounding, packing
// (docs/model.md, sections 3.4 to 3.6 and 3.8).
//
//     pooled  = sum over the RATIO rows of a group of row * softmax(gates of the channel)
//     normed  = T(weight * T(pooled) * rsqrt(mean(T(pooled)^2) + eps))
//     row     = codes and group scales of T(rope(normed)), the last R channels turned
//
// Rows [G * RATIO, D] in f32 or T, gates f32, weight bf16 or f32, cos and sin f32 [G, R]. The first
// PENDING rows and gates of a pooling are those that earlier tokens left, in arrays of their own,
// so that nothing is copied to join them. Formats:
// WINDOW_ROW (e4m3, an e8m0 scale for 32), COMPRESSED_ROW (e2m1, an e4m3 scale for 16), INDEX_KEY
// (e2m1, an e8m0 scale for 32). D is a multiple of 64 up to 512, L of 2. Sums are f32.
//
// One threadgroup of D/2 threads a row, a pair of channels a thread: pairs are what RoPE turns, and
// a group's largest value is found by shuffles within half a simdgroup. Threadgroup memory: 128
// bytes.
// attention_front has a second threadgroup for each token, for the norm of q's latent [Q, L], and
// for a decode step one for each row of the window's ring, which is copied with the new row in it:
// 129 of 256 threads at the released widths, more than one for each of 80 cores, and 140 KB, so
// that its time is a launch's. What it saves is launches, one in the place of two norms, a
// rotation, a rounding, a packing and the update. About 5 operations for each byte of the new row,
// none for the rest.
// pooled_rows and an index key are one threadgroup for a decode step, on 10 KB and 1 KB: one core's
// work, a launch's time; a prefill has a threadgroup for each of its groups. About 5 operations a
// byte.
// index_queries rounds a head's query to values of T, and multiplies the head's row of weights [K]
// with x [K] too: 32 threadgroups of 64 threads that read 10 KB each, a launch's time again. One
// operation a byte of weights.

constant constexpr int WINDOW_ROW = 0;
constant constexpr int COMPRESSED_ROW = 1;
constant constexpr int INDEX_KEY = 2;

constexpr int group_of(int format) {
    return format == COMPRESSED_ROW ? 16 : 32;
}
constexpr int code_bytes(int format, int width) {
    return format == WINDOW_ROW ? width : width / 2;
}
constexpr int row_bytes(int format, int width) {
    return code_bytes(format, width) + width / group_of(format);
}
constexpr int row_words(int format, int width) {
    return (row_bytes(format, width) + 3) / 4;
}

// The nearest e4m3 code, ties to even, of a value up to 448.
inline uint e4m3_code(float x) {
    const uint bits = as_type<uint>(x);
    const uint magnitude = bits & 0x7fffffffu;
    const uint sign = bits >> 24 & 0x80u;
    if (magnitude < 0x3c800000u) {  // below 2^-6 codes are 2^-9 apart
        return sign | uint(rint(as_type<float>(magnitude) * 512.0f));
    }
    const uint rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
    return sign | ((rounded >> 20) - (120u << 3));
}

// The nearest e2m1 code, ties to even, clipped to 6. What is not below zero has no sign.
inline uint e2m1_code(float x) {
    const float mag = min(abs(x), 6.0f);
    // The values lie 0.5 apart below 2, 1 apart below 4 and 2 apart above; codes count them.
    float steps = rint(mag / 2.0f) + 4.0f;
    if (mag < 4.0f) {
        steps = mag < 2.0f ? rint(mag * 2.0f) : rint(mag) + 2.0f;
    }
    return uint(steps) | (x < 0.0f ? 8u : 0u);
}

// The e8m0 byte of the least power of two that is at least x, a normal float.
inline uint e8m0_ceil(float x) {
    const uint bits = as_type<uint>(x);
    return (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u);
}

// One over the value of an e8m0 byte between 1 and 253.
inline float e8m0_reciprocal(uint scale) {
    return as_type<float>((254u - scale) << 23);
}

// The scale of 32 channels of an index key; the smallest amax is 6 * 2^-126.
inline uint index_scale(float largest) {
    return e8m0_ceil(max(largest, as_type<float>(0x01c00000u)) * (1.0f / 6.0f));
}

// Round channels 2 * pair and 2 * pair + 1 of a row; `codes` and `scales` point at the row's.
template <int FORMAT>
inline void pack_pair(float2 x, uint pair, device uchar* codes, device uchar* scales, uint lane) {
    constexpr int LANES = group_of(FORMAT) / 2;
    float largest = max(abs(x.x), abs(x.y));
    for (ushort step = LANES / 2; step > 0; step /= 2) {
        largest = max(largest, simd_shuffle_xor(largest, step));
    }
    uint scale;
    if constexpr (FORMAT == WINDOW_ROW) {
        scale = e8m0_ceil(max(largest, 1e-4f) * (1.0f / 448.0f));
        const float over = e8m0_reciprocal(scale);
        codes[2 * pair] = uchar(e4m3_code(clamp(x.x * over, -448.0f, 448.0f)));
        codes[2 * pair + 1] = uchar(e4m3_code(clamp(x.y * over, -448.0f, 448.0f)));
    } else if constexpr (FORMAT == COMPRESSED_ROW) {
        scale = e4m3_code(clamp(largest * (1.0f / 6.0f), 1.0f / 512.0f, 448.0f));
        const float value = e4m3(scale);
        codes[pair] = uchar(e2m1_code(x.x / value) | e2m1_code(x.y / value) << 4);
    } else {
        scale = index_scale(largest);
        const float over = e8m0_reciprocal(scale);
        codes[pair] = uchar(e2m1_code(x.x * over) | e2m1_code(x.y * over) << 4);
    }
    if (lane % LANES == 0) {
        scales[pair / LANES] = uchar(scale);
    }
}

// A row that ends inside a word is padded with zeros.
template <int FORMAT, int D>
inline void pad_row(device uchar* row, uint thread_index) {
    if (thread_index < uint(4 * row_words(FORMAT, D) - row_bytes(FORMAT, D))) {
        row[row_bytes(FORMAT, D) + thread_index] = 0;
    }
}

// A window's row as it was, by D/2 threads: WINDOW_ROW words.
template <int D>
inline void copy_row(
    const device uint* from, device uint* to, uint row, uint thread_index) {
    constexpr uint WORDS = row_words(WINDOW_ROW, D);
    for (uint i = thread_index; i < WORDS; i += D / 2) {
        to[row * WORDS + i] = from[row * WORDS + i];
    }
}

// Rows of D channels, the first PENDING of which lie apart.
template <int D, int PENDING>
struct Joined {
    const device float* pending;
    const device float* others;

    float at(uint row, uint channel) const {
        if (row < PENDING) {
            return pending[row * D + channel];
        }
        return others[size_t(row - PENDING) * D + channel];
    }
};

// A channel of a group of RATIO rows, by the softmax of its gates.
template <int RATIO, typename Rows>
inline float pooled(Rows rows, Rows gates, uint group, uint channel) {
    const uint first = group * RATIO;
    if constexpr (RATIO == 1) {
        return rows.at(first, channel);
    } else {
        float gate[RATIO];
        DS41_UNROLL
        for (uint i = 0; i < RATIO; i++) {
            gate[i] = gates.at(first + i, channel);
        }
        float top = gate[0];
        DS41_UNROLL
        for (uint i = 1; i < RATIO; i++) {
            top = max(top, gate[i]);
        }
        float sum = 0.0f;
        float total = 0.0f;
        DS41_UNROLL
        for (uint i = 0; i < RATIO; i++) {
            const float share = exp(gate[i] - top);
            sum += share * rows.at(first + i, channel);
            total += share;
        }
        return sum / total;
    }
}

template <int RATIO, typename Rows>
inline float2 pooled_pair(Rows rows, Rows gates, uint group, uint channel) {
    return float2(
        pooled<RATIO>(rows, gates, group, channel), pooled<RATIO>(rows, gates, group, channel + 1));
}

template <typename Row>
inline float2 pair_of(Row row, uint pair) {
    return float2(float(row[2 * pair]), float(row[2 * pair + 1]));
}

// The norm of a pair, rounded to T: `r` is one over the root of the mean square.
template <typename T, typename Weight>
inline float2 normed_pair(float2 x, float r, Weight weight) {
    return float2(
        float(T(float(weight[0]) * (x.x * r))), float(T(float(weight[1]) * (x.y * r))));
}

// A pair turned by its position's angle, rounded to T.
template <typename T, typename Table>
inline float2 turned_pair(float2 x, Table cos, Table sin) {
    return float2(
        float(T(x.x * cos[0] + x.y * sin[0])), float(T(x.y * cos[1] + x.x * sin[1])));
}

// One row, by all D/2 threads of a group, each with its pair x: `cos` and `sin` point at its
// position's, `codes` and `scales` at its own, and so does `latent` if the norm is KEPT.
template <typename T, int D, int R, int FORMAT, bool KEPT, typename Weight, typename Table>
inline void cached_row(
    float2 x,
    Weight weight,
    float eps,
    Table cos,
    Table sin,
    device T* latent,
    device uchar* codes,
    device uchar* scales,
    threadgroup float* scratch,
    uint thread_index,
    uint simdgroup,
    uint lane) {
    const uint channel = 2 * thread_index;
    x = float2(float(T(x.x)), float(T(x.y)));
    const float squares = group_sum(x.x * x.x + x.y * x.y, scratch, D / 64, simdgroup, lane);
    x = normed_pair<T>(x, precise::rsqrt(squares / float(D) + eps), weight + channel);
    if constexpr (KEPT) {
        latent[channel] = T(x.x);
        latent[channel + 1] = T(x.y);
    }
    if (int(channel) >= D - R) {
        x = turned_pair<T>(x, cos + (channel - (D - R)), sin + (channel - (D - R)));
    }
    pack_pair<FORMAT>(x, thread_index, codes, scales, lane);
}

// The norm of q's latent [L], by `threads` threads of a group.
template <typename T, int L, typename Rows, typename Weight>
inline void normed_latent(
    Rows x,
    Weight weight,
    float eps,
    device T* out,
    threadgroup float* scratch,
    uint threads,
    uint thread_index,
    uint simdgroup,
    uint lane) {
    float squares = 0.0f;
    for (uint i = 2 * thread_index; i < L; i += 2 * threads) {
        const float2 pair = float2(float(x[i]), float(x[i + 1]));
        squares += pair.x * pair.x + pair.y * pair.y;
    }
    squares = group_sum(squares, scratch, threads / SIMD, simdgroup, lane);
    const float r = precise::rsqrt(squares / float(L) + eps);
    for (uint i = 2 * thread_index; i < L; i += 2 * threads) {
        const float2 pair =
            normed_pair<T>(float2(float(x[i]), float(x[i + 1])), r, weight + i);
        out[i] = T(pair.x);
        out[i + 1] = T(pair.y);
    }
}

// A query of the indexer, by D/2 threads: `out` T [D] are the values of its codes.
template <typename T, int D, int R, typename Table>
inline void rounded_query(
    const device T* q, Table cos, Table sin, device T* out, uint thread_index) {
    constexpr int LANES = group_of(INDEX_KEY) / 2;
    const uint channel = 2 * thread_index;
    float2 x = float2(float(q[channel]), float(q[channel + 1]));
    if (int(channel) >= D - R) {
        x = turned_pair<T>(x, cos + (channel - (D - R)), sin + (channel - (D - R)));
    }
    float largest = max(abs(x.x), abs(x.y));
    for (ushort step = LANES / 2; step > 0; step /= 2) {
        largest = max(largest, simd_shuffle_xor(largest, step));
    }
    const uint scale = index_scale(largest);
    const float value = e8m0(scale);
    const float over = e8m0_reciprocal(scale);
    out[channel] = T(e2m1(e2m1_code(x.x * over)) * value);
    out[channel + 1] = T(e2m1(e2m1_code(x.y * over)) * value);
}

// The weight of one of H index heads, by D/2 threads, the same on each; K is a multiple of 4.
template <typename T, typename W, int D, int K, int H>
inline float head_weight(
    const device T* x,
    const device W* weights,
    threadgroup float* scratch,
    uint thread_index,
    uint simdgroup,
    uint lane) {
    float sum = 0.0f;
    for (uint i = 4 * thread_index; i < K; i += 2 * D) {
        const vec<T, 4> a = *reinterpret_cast<const device vec<T, 4>*>(x + i);
        const vec<W, 4> b = *reinterpret_cast<const device vec<W, 4>*>(weights + i);
        DS41_UNROLL
        for (uint j = 0; j < 4; j++) {
            sum += float(a[j]) * float(b[j]);
        }
    }
    return group_sum(sum, scratch, D / 64, simdgroup, lane) * precise::rsqrt(float(D) * float(H));
}
