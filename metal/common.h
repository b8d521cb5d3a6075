// What the kernels share: the checkpoint's number formats, the experts' activation, sums over
// threads.
//
// Codes are read packed, as released: e4m3 four to a 32-bit word and e2m1 eight, lowest first.
// Scales are e8m0 bytes, powers of two, which a kernel turns into a float by placing the exponent.

// Before a loop of constant length that indexes a thread's own array: only as registers, which have
// no index, is such an array fast. A compiler that needs none of it may define this as nothing.
#ifndef DS41_UNROLL
#define DS41_UNROLL _Pragma("clang loop unroll(full)")
#endif

constant constexpr uint SIMD = 32;
// What an e2m1 code's bits at an f16's place must be multiplied with.
constant constexpr float E2M1_UNIT = 16384.0f;

// The value of an e8m0 byte: 2^(scale - 127). 255, which is no number, does not occur: the loader
// refuses it.
inline float e8m0(uint scale) {
    return as_type<float>(scale == 0 ? 0x400000u : scale << 23);
}

// The value of an e4m3 code (no infinity; the code 0x7f, no number, does not occur).
inline float e4m3(uint code) {
    // Exponent and mantissa moved to an f16's place are the value times 2^-8, subnormals included.
    const ushort bits = ushort((code & 0x80u) << 8 | (code & 0x7fu) << 7);
    return float(as_type<half>(bits)) * 256.0f;
}

// The value of an e2m1 code: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
inline float e2m1(uint code) {
    // As above: exponent and mantissa at an f16's place are the value times 2^-14.
    const ushort bits = ushort((code & 0x8u) << 12 | (code & 0x7u) << 9);
    return float(as_type<half>(bits)) * E2M1_UNIT;
}

// Two e2m1 codes of a word at once, that at place i, below 4, and the one 16 bits further: their
// values divided by E2M1_UNIT, exact as halves.
inline half2 e2m1_pair(uint word, uint i) {
    const uint q = word << (12 - 4 * i);
    return as_type<half2>((q & 0x80008000u) | (q >> 3 & 0x0e000e00u));
}

// silu(min(gate, limit)) * clip(up, -limit, limit).
inline float clamped_swiglu(float gate, float up, float limit) {
    gate = min(gate, limit);
    // e^-|gate| cannot overflow; the sigmoid is 1 / (1 + e) or e / (1 + e).
    const float e = exp(-abs(gate));
    return gate * (gate < 0.0f ? e : 1.0f) / (1.0f + e) * clamp(up, -limit, limit);
}

// The sum of a value over all threads of a group, the same on every thread. `scratch` holds a float
// for each of at most 32 simdgroups; it may be used again after the next barrier.
inline float group_sum(
    float value, threadgroup float* scratch, uint simdgroups, uint simdgroup, uint lane) {
    value = simd_sum(value);
    if (lane == 0) {
        scratch[simdgroup] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = lane < simdgroups ? scratch[lane] : 0.0f;
    total = simd_sum(total);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return total;
}
