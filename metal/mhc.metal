// Hyper-connections: what lies between two sublayers (docs/model.md, section 3.2). HC = 4 streams.
//
//   streams'[k] = post[k] h + sum_j comb[j, k] streams[j]           expand
//   x = rms_norm(sum_k pre[k] streams'[k]) norm_weight              collapse
//   m = (fn streams') / rms(streams') scale + base                  24 values, from which
//   pre', post' by sigmoids, comb' by softmax and Sinkhorn rounds   the next sublayers mix
//
//   h, x        T [M, D]      bf16 or f32        fn    f32 [24, HC D]
//   streams     T [M, HC, D]                     base  f32 [24], scale f32 [3]
//   pre, post   f32 [M, HC]                      norm_weight W [D]
//   comb        f32 [M, HC, HC]                  epsilons f32 [2]: hc_eps, norm_eps
//
// All sums are f32. Streams and the collapsed input are rounded to T before they are used, as they
// are where each step is a launch of its own.
//
// Two launches, since every output needs sums over all of D:
//   1. A threadgroup of 8 simdgroups takes SLICE channels of up to 8 tokens: it expands them, keeps
//      them in threadgroup memory (1 KiB a token), and writes its part of 26 sums a token. fn, 2 MB
//      at the released width, is read once for the tokens of a threadgroup: 0.5 operations a byte
//      a token. Geometry: 80 threadgroups for D = 5120, one a core, each lane with 6 loads of 16
//      bytes of fn in flight, once the streams are expanded; a prefill has T/8 times as many.
//   2. A threadgroup of 16 simdgroups a token adds up the parts, normalises x, and its first
//      simdgroup makes the coefficients, the 4 x 4 matrix in 16 lanes. 104 bytes of threadgroup
//      memory. For one token this is one core's work on 30 KB; it cannot start before the sums.
//      Before the experts it stands beside the router's scores, in router.metal.
// Collapse alone, before the head, is a threadgroup of 16 simdgroups a token, which keeps the
// collapsed input until its norm is known: D floats and 128 bytes of threadgroup memory, 20 KiB at
// the released width. Expand alone, before Engram and the head, is a thread a channel and token
// with no threadgroup memory, 160 simdgroups for a token. Both are a launch's time, on 60 and 90
// KB, and happen one and three times a token: about 1 operation a byte.

constant constexpr uint HC = 4;
constant constexpr uint COLUMNS = (2 + HC) * HC;
// The products with fn, the streams' squares, and the collapsed input's.
constant constexpr uint SUMS = COLUMNS + 2;
constant constexpr uint SLICE = 64;
constant constexpr uint SLICE_SIMDGROUPS = 8;

// Arrays of few values lie in the constant space: their pointers' types are parameters P.

// A channel of stream k after a sublayer, from what it wrote and the channel of all streams.
template <typename P, typename Q>
inline float expanded(float written, const thread float* old, P post, Q comb, uint token, uint k) {
    float v = post[token * HC + k] * written;
    DS41_UNROLL
    for (uint j = 0; j < HC; j++) {
        v += comb[(token * HC + j) * HC + k] * old[j];
    }
    return v;
}

// The streams after a sublayer, all of them.
template <typename T, int D, typename P, typename Q>
inline void expand(
    const device T* h, const device T* streams, P post, Q comb, device T* out, uint2 at) {
    const float written = float(h[at.y * D + at.x]);
    float old[HC];
    DS41_UNROLL
    for (uint j = 0; j < HC; j++) {
        old[j] = float(streams[(at.y * HC + j) * D + at.x]);
    }
    for (uint k = 0; k < HC; k++) {
        out[(at.y * HC + k) * D + at.x] = T(expanded(written, old, post, comb, at.y, k));
    }
}

// The streams after a sublayer, SLICE channels of M tokens: to `out`, and widened to `values`
// [M, HC, SLICE], with zeros past D. `at` is the slice and the group of M tokens among `tokens`.
template <typename T, int M, int D, typename P, typename Q>
inline void expand_slice(
    const device T* h,
    const device T* streams,
    P post,
    Q comb,
    device T* out,
    threadgroup float* values,
    uint tokens,
    uint2 at,
    uint thread_index) {
    const uint k = thread_index / SLICE;
    const uint d = at.x * SLICE + thread_index % SLICE;
    for (uint m = 0; m < M; m++) {
        float v = 0.0f;
        const uint token = at.y * M + m;
        if (d < D && token < tokens) {
            float old[HC];
            DS41_UNROLL
            for (uint j = 0; j < HC; j++) {
                old[j] = float(streams[(token * HC + j) * D + d]);
            }
            const T rounded = T(expanded(float(h[token * D + d]), old, post, comb, token, k));
            out[(token * HC + k) * D + d] = rounded;
            v = float(rounded);
        }
        values[m * HC * SLICE + thread_index] = v;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// As expand_slice, for streams that are as the sublayers want them.
template <typename T, int M, int D>
inline void load_slice(
    const device T* streams, threadgroup float* values, uint tokens, uint2 at, uint thread_index) {
    const uint k = thread_index / SLICE;
    const uint d = at.x * SLICE + thread_index % SLICE;
    for (uint m = 0; m < M; m++) {
        const uint token = at.y * M + m;
        const bool is_inside = d < D && token < tokens;
        values[m * HC * SLICE + thread_index] =
            is_inside ? float(streams[(token * HC + k) * D + d]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A slice's part of the products with fn and of the squares: `sums` [tokens, slices, SUMS].
template <int M, int D>
inline void sum_slice(
    threadgroup const float* values,
    const device float* fn,
    device float* sums,
    uint tokens,
    uint2 at,
    uint simdgroup,
    uint lane) {
    constexpr uint EACH = COLUMNS / SLICE_SIMDGROUPS;
    constexpr uint SLICES = (D + SLICE - 1) / SLICE;
    const uint column = simdgroup * EACH;
    float dots[M][EACH] = {};
    for (uint e = 4 * lane; e < HC * SLICE; e += 4 * SIMD) {
        const uint d = at.x * SLICE + e % SLICE;
        if (d < D) {
            float4 w[EACH];
            DS41_UNROLL
            for (uint r = 0; r < EACH; r++) {
                w[r] = *(const device float4*)(fn + ((column + r) * HC + e / SLICE) * D + d);
            }
            DS41_UNROLL
            for (uint m = 0; m < M; m++) {
                const float4 v = *(threadgroup const float4*)(values + m * HC * SLICE + e);
                DS41_UNROLL
                for (uint r = 0; r < EACH; r++) {
                    dots[m][r] += dot(w[r], v);
                }
            }
        }
    }
    // Lane m * EACH + r keeps the sum of token m and column r.
    float mine = 0.0f;
    DS41_UNROLL
    for (uint m = 0; m < M; m++) {
        DS41_UNROLL
        for (uint r = 0; r < EACH; r++) {
            const float total = simd_sum(dots[m][r]);
            mine = lane == m * EACH + r ? total : mine;
        }
    }
    const uint own = at.y * M + lane / EACH;
    if (lane < M * EACH && own < tokens) {
        sums[(own * SLICES + at.x) * SUMS + column + lane % EACH] = mine;
    }
    // A simdgroup a token.
    if (simdgroup < M) {
        float squares = 0.0f;
        for (uint e = lane; e < HC * SLICE; e += SIMD) {
            const float v = values[simdgroup * HC * SLICE + e];
            squares += v * v;
        }
        squares = simd_sum(squares);
        const uint token = at.y * M + simdgroup;
        if (lane == 0 && token < tokens) {
            sums[(token * SLICES + at.x) * SUMS + COLUMNS] = squares;
        }
    }
}

// A slice of the next sublayer's input before its norm, and its part of that norm.
template <typename T, int M, int D, typename P>
inline void collapse_slice(
    threadgroup const float* values,
    P pre,
    device T* collapsed,
    device float* sums,
    uint tokens,
    uint2 at,
    uint simdgroup,
    uint lane) {
    constexpr uint SLICES = (D + SLICE - 1) / SLICE;
    const uint token = at.y * M + simdgroup;
    if (simdgroup < M && token < tokens) {
        float share[HC];
        DS41_UNROLL
        for (uint k = 0; k < HC; k++) {
            share[k] = pre[token * HC + k];
        }
        float squares = 0.0f;
        for (uint i = lane; i < SLICE; i += SIMD) {
            float v = 0.0f;
            DS41_UNROLL
            for (uint k = 0; k < HC; k++) {
                v += share[k] * values[(simdgroup * HC + k) * SLICE + i];
            }
            const uint d = at.x * SLICE + i;
            if (d < D) {
                collapsed[token * D + d] = T(v);
            }
            squares += float(T(v)) * float(T(v));
        }
        squares = simd_sum(squares);
        if (lane == 0) {
            sums[(token * SLICES + at.x) * SUMS + COLUMNS + 1] = squares;
        }
    }
}

// One of a token's sums, by a simdgroup.
template <int D>
inline float total_sum(const device float* sums, uint token, uint s, uint lane) {
    constexpr uint SLICES = (D + SLICE - 1) / SLICE;
    float total = 0.0f;
    for (uint i = lane; i < SLICES; i += SIMD) {
        total += sums[(token * SLICES + i) * SUMS + s];
    }
    return simd_sum(total);
}

// One over the root of the mean of a collapsed input's squares.
template <int D>
inline float norm_factor(float squares, float norm_eps) {
    return rsqrt(squares / float(D) + norm_eps);
}

// The mixing weights of a token from its totals, in one simdgroup.
template <int D, int ITERS, typename P, typename Q>
inline void coefficients(
    threadgroup const float* totals,
    const device float* base,
    P scale,
    Q epsilons,
    device float* pre,
    device float* post,
    device float* comb,
    uint token,
    uint lane) {
    const float hc_eps = epsilons[0];
    const float r = rsqrt(totals[COLUMNS] / float(HC * D) + epsilons[1]);
    if (lane < 2 * HC) {
        const float m = totals[lane] * r * scale[lane / HC] + base[lane];
        // The power that cannot overflow.
        const float power = exp(-abs(m));
        const float gate = (m < 0.0f ? power : 1.0f) / (1.0f + power);
        if (lane < HC) {
            pre[token * HC + lane] = gate + hc_eps;
        } else {
            post[token * HC + lane - HC] = 2.0f * gate;
        }
    }
    // Lane 4 i + j holds comb[i, j]; the upper lanes repeat the lower ones. Lanes that differ in
    // the bits 1 and 2 are a row's, in 4 and 8 a column's.
    const uint cell = lane % (HC * HC);
    float c = totals[2 * HC + cell] * r * scale[2] + base[2 * HC + cell];
    float top = max(c, simd_shuffle_xor(c, 1));
    top = max(top, simd_shuffle_xor(top, 2));
    c = exp(c - top);
    float total = c + simd_shuffle_xor(c, 1);
    total += simd_shuffle_xor(total, 2);
    c = c / total + hc_eps;
    for (uint i = 0; i < ITERS; i++) {
        if (i > 0) {
            total = c + simd_shuffle_xor(c, 1);
            total += simd_shuffle_xor(total, 2);
            c /= total + hc_eps;
        }
        total = c + simd_shuffle_xor(c, 4);
        total += simd_shuffle_xor(total, 8);
        c /= total + hc_eps;
    }
    if (lane < HC * HC) {
        comb[token * HC * HC + lane] = c;
    }
}

// The norm of a collapsed input whose squares have the sum `squares`.
template <typename T, typename W, int D, typename C>
inline void scale_to_norm(
    C collapsed,
    const device W* norm_weight,
    float squares,
    float norm_eps,
    device T* x,
    uint threads,
    uint thread_index) {
    const float r = norm_factor<D>(squares, norm_eps);
    for (uint d = thread_index; d < D; d += threads) {
        x[d] = T(float(collapsed[d]) * r * float(norm_weight[d]));
    }
}

// The second launch for a token, by a threadgroup: coefficients and x. `totals` holds SUMS floats.
template <typename T, typename W, int D, int ITERS, typename P, typename Q>
inline void finish(
    const device float* sums,
    const device float* base,
    P scale,
    Q epsilons,
    const device T* collapsed,
    const device W* norm_weight,
    device float* pre,
    device float* post,
    device float* comb,
    device T* x,
    threadgroup float* totals,
    uint token,
    uint threads,
    uint thread_index,
    uint simdgroup,
    uint lane) {
    for (uint s = simdgroup; s < SUMS; s += threads / SIMD) {
        const float total = total_sum<D>(sums, token, s, lane);
        if (lane == 0) {
            totals[s] = total;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
        coefficients<D, ITERS>(totals, base, scale, epsilons, pre, post, comb, token, lane);
    }
    scale_to_norm<T, W, D>(
        collapsed + token * D, norm_weight, totals[COLUMNS + 1], epsilons[1], x + token * D,
        threads, thread_index);
}

// Collapse and norm of a token by one threadgroup; `collapsed` holds D values, `scratch` 32.
template <typename T, typename W, int D, typename P, typename Q>
inline void collapse_norm(
    const device T* streams,
    P pre,
    const device W* norm_weight,
    Q epsilons,
    device T* x,
    threadgroup float* collapsed,
    threadgroup float* scratch,
    uint token,
    uint threads,
    uint thread_index,
    uint simdgroup,
    uint lane) {
    float share[HC];
    DS41_UNROLL
    for (uint k = 0; k < HC; k++) {
        share[k] = pre[token * HC + k];
    }
    float squares = 0.0f;
    for (uint d = thread_index; d < D; d += threads) {
        float v = 0.0f;
        DS41_UNROLL
        for (uint k = 0; k < HC; k++) {
            v += share[k] * float(streams[(token * HC + k) * D + d]);
        }
        v = float(T(v));
        collapsed[d] = v;
        squares += v * v;
    }
    squares = group_sum(squares, scratch, threads / SIMD, simdgroup, lane);
    scale_to_norm<T, W, D>(
        collapsed, norm_weight, squares, epsilons[1], x + token * D, threads, thread_index);
}
