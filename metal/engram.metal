// Engram's memory rows: dequantised, and gated into the streams (docs/model.md, section 4.4).
//
//   row = e4m3(code) e8m0(scale)                            then kv = wkv row, as any FP8 product
//   r[k] = 1 / (rms(h[k]) rms(key[k]))
//   s[k] = r[k] / sqrt(D) sum_d h[k, d] q[k, d] w[k, d] key[k, d]
//   out[k] = h[k] + sigmoid(sign(s) sqrt(max(|s|, 1e-6))) value,   for each of HC streams
//
//   codes   uint [M, E / 4]       e4m3      streams, out  T [M, HC, D]        bf16 or f32
//   scales  uchar [M, E / 32]     e8m0      kv            T [M, HC + 1, D]    the keys, the value
//   rows    T [M, E]                        q, w          W [HC, D]
//
// D is a multiple of 4 and E of 32. Sums are f32; rows and streams are rounded once, to T.
//
// engram_rows: a thread takes four codes; 6 KB a token at the released width, 2 operations a byte
// read, no threadgroup memory. Its time is that of a launch: 48 simdgroups for one token.
// engram_gate: a threadgroup takes a stream of a token, whose values stay in its registers between
// the sums and the output: every byte is read once but the value, which HC streams share. 128 bytes
// of threadgroup memory, 1 operation a byte. Geometry: the sums over all of D must come before the
// first output, so that one token is 4 threadgroups of 20 simdgroups on 51 KB each, a launch's time
// again; from 20 tokens on each of 80 cores has one.

template <typename T, typename S>
inline void engram_rows(const device uint* codes, S scales, device T* rows, uint at) {
    const uint word = codes[at];
    const float scale = e8m0(uint(scales[at / 8]));
    vec<T, 4> values;
    DS41_UNROLL
    for (uint i = 0; i < 4; i++) {
        const uint code = word >> (8 * i) & 0xffu;
        // Tables are too large to be searched for damage at the start: it must show in the results.
        const bool is_number = (code & 0x7fu) != 0x7fu;
        values[i] = T(is_number ? e4m3(code) * scale : as_type<float>(0x7fc00000u));
    }
    *(device vec<T, 4>*)(rows + 4 * at) = values;
}

template <typename T>
inline float4 widened(const device T* x) {
    return float4(*(const device vec<T, 4>*)x);
}

// One stream of one token, by THREADS threads; `scratch` holds 32 floats.
template <typename T, typename W, uint HC, uint D, uint THREADS>
inline void engram_gate(
    const device T* streams,
    const device T* kv,
    const device W* q,
    const device W* w,
    float norm_eps,
    device T* out,
    threadgroup float* scratch,
    uint2 at,
    uint thread_index,
    uint simdgroup,
    uint lane) {
    constexpr uint OWN = (D / 4 + THREADS - 1) / THREADS;
    const uint k = at.x;
    streams += (at.y * HC + k) * D;
    out += (at.y * HC + k) * D;
    kv += at.y * (HC + 1) * D;
    float4 h[OWN];
    float squares = 0.0f;
    float key_squares = 0.0f;
    float agreement = 0.0f;
    DS41_UNROLL
    for (uint i = 0; i < OWN; i++) {
        const uint d = 4 * (i * THREADS + thread_index);
        if (d < D) {
            h[i] = widened(streams + d);
            const float4 key = widened(kv + k * D + d);
            const float4 weight = widened(q + k * D + d) * widened(w + k * D + d);
            squares += dot(h[i], h[i]);
            key_squares += dot(key, key);
            agreement += dot(h[i] * weight, key);
        }
    }
    squares = group_sum(squares, scratch, THREADS / SIMD, simdgroup, lane);
    key_squares = group_sum(key_squares, scratch, THREADS / SIMD, simdgroup, lane);
    agreement = group_sum(agreement, scratch, THREADS / SIMD, simdgroup, lane);
    const float n = float(D);
    const float r = rsqrt(squares / n + norm_eps) * rsqrt(key_squares / n + norm_eps);
    const float s = agreement * r * rsqrt(n);
    // e^-root cannot overflow; the sigmoid is 1 / (1 + e) or e / (1 + e).
    const float e = exp(-sqrt(max(abs(s), 1e-6f)));
    const float gate = (s < 0.0f ? e : 1.0f) / (1.0f + e);
    DS41_UNROLL
    for (uint i = 0; i < OWN; i++) {
        const uint d = 4 * (i * THREADS + thread_index);
        if (d < D) {
            const float4 v = h[i] + gate * widened(kv + HC * D + d);
            *(device vec<T, 4>*)(out + d) = vec<T, 4>(v);
        }
    }
}
