// Drawing a token: temperature, min-p, top-p and a seeded draw, without a sort.
//
//   w[i] = exp((logit[i] - greatest) / temperature), 0 below min_p
//   kept = the fewest of the greatest logits whose w reach top_p of their sum, the lowest ids of
//          equals first
//   token = the kept i of the greatest w[i] / e[i], e[i] = -log(1 - u[i]) and u[i] uniform in
//           (0, 1): the probability of i is w[i] / sum w
//
//   logits  f32 [V]; NaN counts as -inf       rule  f32 [3]: temperature, log(min_p), top_p
//   maxima  f32 [P], of parts of 2048         key   uint [2] of Threefry-2x32
//   bins    f32 [P, 2048]                     edge  uint [3]: key, above, target, see Edge
//   groups  f32 [P, 64], of 32 bins           values f32 [P], ids uint [P]: a part's best
//
// Launches, each of threadgroups of 512 threads that take a part of the logits; the last has one of
// 32 threads:
//   greatest                     the greatest logit of each part
//   histogram 0, 1, 2            where top_p < 1: the nucleus' edge as the 32 bits of a logit,
//                                11, 11 and 10 at a time. A level adds up w by these bits, the next
//                                launch finds the bin in which the sum from above reaches the
//                                target and looks into it. The last counts logits, all equal.
//   draw, first                  the best of each part, and of all
//
// A level's sums are whole numbers of 2^-39 in two words of threadgroup memory, so that they do not
// depend on the order of the atomic additions. Threadgroup memory: 16.5 KiB in a histogram, else at
// most 640 bytes. Arithmetic: an exponential, about 10 operations, for 4 bytes, and 100 for the
// random bits in the last pass. Geometry: 129,280 logits are 64 threadgroups of 16 simdgroups; the
// 0.5 MB of a pass come from the cache, its time is that of a launch.

constant constexpr uint THREADS = 512;
constant constexpr uint SIMDGROUPS = THREADS / SIMD;
constant constexpr uint SHARE = 4;
constant constexpr uint PART = THREADS * SHARE;
constant constexpr uint BINS = 2048;
constant constexpr uint GROUP = SIMD;
constant constexpr uint GROUPS = BINS / GROUP;
constant constexpr uint LAST = 2;
// A weight is summed in units of 2^-19, and what is left of it in units of 2^-39.
constant constexpr float WHOLE = 524288.0f;
constant constexpr float FRACTION = 1048576.0f;
constant constexpr uint NOBODY = 0xffffffffu;

// Arrays of few values lie in the constant space: their pointers' types are parameters.

// A thread: the part of its threadgroup, and where it is within that.
struct Place {
    uint part;
    uint thread_index;
    uint simdgroup;
    uint lane;
};

struct Rule {
    float greatest;
    float temperature;
    float log_min_p;
};

// Where the nucleus ends: the upper bits of its least logit as far as they are known, what lies
// above all that begin with them, and the sum that is to be reached.
struct Edge {
    uint key;
    float above;
    float target;
};

template <typename E>
inline Edge stored_edge(E edge) {
    return Edge{edge[0], as_type<float>(edge[1]), as_type<float>(edge[2])};
}

inline void store_edge(Edge edge, device uint* to) {
    to[0] = edge.key;
    to[1] = as_type<uint>(edge.above);
    to[2] = as_type<uint>(edge.target);
}

inline uint parts_of(uint V) {
    return (V + PART - 1) / PART;
}

// NaN as -inf, tested by its bits, which no compiler's arithmetic can overlook.
inline float number(float logit) {
    const uint bits = as_type<uint>(logit);
    return as_type<float>((bits & 0x7fffffffu) > 0x7f800000u ? 0xff800000u : bits);
}

// An integer in the order of floats, the same for both zeros; and back.
inline uint float_order(float x) {
    const uint bits = as_type<uint>(x);
    const uint positive = bits == 0x80000000u ? 0 : bits;
    return (positive & 0x80000000u) != 0 ? ~positive : positive | 0x80000000u;
}

inline float ordered_float(uint key) {
    return as_type<float>((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

inline float weight(float logit, Rule rule) {
    // Of infinities too.
    if (logit == rule.greatest) {
        return 1.0f;
    }
    const float scaled = (logit - rule.greatest) / rule.temperature;
    return scaled >= rule.log_min_p ? exp(scaled) : 0.0f;
}

inline float group_max(float value, threadgroup float* scratch, Place at) {
    value = simd_max(value);
    if (at.lane == 0) {
        scratch[at.simdgroup] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value = simd_max(scratch[at.lane % SIMDGROUPS]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return value;
}

template <typename L>
inline void sampling_greatest(
    L logits, uint V, device float* maxima, threadgroup float* scratch, Place at) {
    float top = as_type<float>(0xff800000u);
    for (uint i = 0; i < SHARE; i++) {
        const uint n = at.part * PART + i * THREADS + at.thread_index;
        top = n < V ? max(top, number(logits[n])) : top;
    }
    top = group_max(top, scratch, at);
    if (at.thread_index == 0) {
        maxima[at.part] = top;
    }
}

template <typename M, typename R>
inline Rule whole_rule(M maxima, R rule, uint V, threadgroup float* scratch, Place at) {
    float top = as_type<float>(0xff800000u);
    for (uint i = at.thread_index; i < parts_of(V); i += THREADS) {
        top = max(top, maxima[i]);
    }
    return Rule{group_max(top, scratch, at), rule[0], rule[1]};
}

// A part's sums of w by the bits of LEVEL, of the logits that begin with `prefix`; counts in LAST.
template <uint LEVEL, typename L>
inline void sampling_histogram(
    L logits,
    uint V,
    Rule rule,
    uint prefix,
    device float* bins,
    device float* groups,
    threadgroup atomic_uint* whole,
    threadgroup atomic_uint* rest,
    Place at) {
    for (uint b = at.thread_index; b < BINS; b += THREADS) {
        atomic_store_explicit(whole + b, 0u, memory_order_relaxed);
        atomic_store_explicit(rest + b, 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < SHARE; i++) {
        const uint n = at.part * PART + i * THREADS + at.thread_index;
        if (n < V) {
            const float logit = number(logits[n]);
            const uint key = float_order(logit);
            if (LEVEL == LAST) {
                if (key >> 10 == prefix) {
                    atomic_fetch_add_explicit(whole + (key & 0x3ffu), 1u, memory_order_relaxed);
                }
            } else if (LEVEL == 0 || key >> 21 == prefix) {
                // Neither a part's 2048 weights of 1 nor its fractions overflow a word.
                const uint b = LEVEL == 0 ? key >> 21 : key >> 10 & 0x7ffu;
                const float scaled = weight(logit, rule) * WHOLE;
                const uint integer = uint(scaled);
                const uint fraction = uint((scaled - float(integer)) * FRACTION);
                atomic_fetch_add_explicit(whole + b, integer, memory_order_relaxed);
                atomic_fetch_add_explicit(rest + b, fraction, memory_order_relaxed);
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint b = at.thread_index; b < BINS; b += THREADS) {
        const uint n = atomic_load_explicit(whole + b, memory_order_relaxed);
        float value = float(n);
        float mass = 0.0f;
        if (LEVEL < LAST) {
            const uint fraction = atomic_load_explicit(rest + b, memory_order_relaxed);
            value = (value + float(fraction) / FRACTION) / WHOLE;
            mass = value;
        } else if (n != 0) {
            mass = value * weight(ordered_float(prefix << 10 | b), rule);
        }
        bins[at.part * BINS + b] = value;
        mass = simd_sum(mass);
        if (at.lane == 0) {
            groups[at.part * GROUPS + b / GROUP] = mass;
        }
    }
}

// The edge with the bits of LEVEL, from that level's sums; before level 0 its target is top_p.
// `masses` holds GROUPS + GROUP floats.
template <uint LEVEL>
inline Edge narrowed(
    Edge edge,
    const device float* bins,
    const device float* groups,
    uint parts,
    Rule rule,
    threadgroup float* masses,
    uint thread_index) {
    if (thread_index < GROUPS) {
        float sum = 0.0f;
        for (uint p = 0; p < parts; p++) {
            sum += groups[p * GROUPS + thread_index];
        }
        masses[thread_index] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (LEVEL == 0) {
        float total = 0.0f;
        for (uint g = 0; g < GROUPS; g++) {
            total += masses[g];
        }
        edge.target *= total;
    }
    // If rounding keeps the sum below the target, all of the group is inside.
    uint g = GROUPS - 1;
    for (; g > 0 && edge.above + masses[g] < edge.target; g--) {
        edge.above += masses[g];
    }
    const uint upper = edge.key << (LEVEL == LAST ? 10 : 11) | g * GROUP;
    threadgroup float* group = masses + GROUPS;
    if (thread_index < GROUP) {
        float sum = 0.0f;
        for (uint p = 0; p < parts; p++) {
            sum += bins[p * BINS + g * GROUP + thread_index];
        }
        if (LEVEL == LAST && sum > 0.0f) {
            sum *= weight(ordered_float(upper + thread_index), rule);
        }
        group[thread_index] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint b = GROUP - 1;
    for (; b > 0 && edge.above + group[b] < edge.target; b--) {
        edge.above += group[b];
    }
    edge.key = upper + b;
    return edge;
}

// The bits that MLX draws for entry n of V: Threefry-2x32 (Salmon et al., 2011) of 20 rounds makes
// those of n and of n + ceil(V / 2) from the two counts.
inline uint random_bits(uint2 key, uint n, uint V) {
    const uint half_way = (V + 1) / 2;
    const bool is_second = n >= half_way;
    const uint first = is_second ? n - half_way : n;
    const uint second = first + half_way < V ? first + half_way : 0;
    const uint keys[3] = {key.x, key.y, key.x ^ key.y ^ 0x1bd11bdau};
    const uint turns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    uint x = first + keys[0];
    uint y = second + keys[1];
    DS41_UNROLL
    for (uint i = 0; i < 5; i++) {
        DS41_UNROLL
        for (uint j = 0; j < 4; j++) {
            const uint turn = turns[i % 2][j];
            x += y;
            y = (y << turn | y >> (32 - turn)) ^ x;
        }
        x += keys[(i + 1) % 3];
        y += keys[(i + 2) % 3] + i + 1;
    }
    return is_second ? y : x;
}

// -log(1 - u) of a uniform u as MLX makes it from its bits. Of a small u by its series, whose next
// term is below 2^-30 of it.
inline float exponential(uint bits) {
    const float u = clamp(float(bits) / 4294967296.0f, 0.5f / 4294967296.0f, 0.99999994f);
    if (u < 0.0078125f) {
        return u * (1.0f + u * (0.5f + u * (1.0f / 3.0f + u * 0.25f)));
    }
    return -precise::log(1.0f - u);
}

// How many of the values of threads before this one.
inline uint group_prefix(uint value, threadgroup uint* scratch, Place at) {
    const uint own = simd_prefix_exclusive_sum(value);
    if (at.lane == SIMD - 1) {
        scratch[at.simdgroup] = own + value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint before = simd_sum(at.lane < at.simdgroup ? scratch[at.lane] : 0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return before + own;
}

// How many equals of the edge precede this thread's, of which it has `own`.
inline uint rank_of_equals(
    Edge edge,
    uint own,
    const device float* bins,
    threadgroup float* scratch,
    threadgroup uint* counts,
    Place at) {
    float before = 0.0f;
    for (uint p = at.thread_index; p < at.part; p += THREADS) {
        before += bins[p * BINS + (edge.key & 0x3ffu)];
    }
    before = group_sum(before, scratch, SIMDGROUPS, at.simdgroup, at.lane);
    return uint(before) + group_prefix(own, counts, at);
}

// The greatest value of a simdgroup and the lowest id that has it.
inline void simd_best(thread float& value, thread uint& id) {
    const float top = simd_max(value);
    id = simd_min(value == top ? id : NOBODY);
    value = top;
}

// A part's best value and its id. Of the logits from the edge on, or of all without NUCLEUS.
template <bool NUCLEUS, typename L>
inline void sampling_draw(
    L logits,
    uint V,
    Rule rule,
    Edge edge,
    uint2 key,
    const device float* bins,
    device float* values,
    device uint* ids,
    threadgroup float* scratch,
    threadgroup uint* counts,
    Place at) {
    float logit[SHARE];
    uint equals = 0;
    // Neighbours, so that equals have their ranks in the order of ids.
    const uint own = at.part * PART + at.thread_index * SHARE;
    DS41_UNROLL
    for (uint i = 0; i < SHARE; i++) {
        logit[i] = own + i < V ? number(logits[own + i]) : 0.0f;
        equals += own + i < V && float_order(logit[i]) == edge.key ? 1 : 0;
    }
    uint rank = 0;
    if (NUCLEUS) {
        rank = rank_of_equals(edge, equals, bins, scratch, counts, at);
    }
    // What is not kept loses against what is, even where its value rounds to nothing.
    float best = -1.0f;
    uint id = NOBODY;
    DS41_UNROLL
    for (uint i = 0; i < SHARE; i++) {
        const float w = weight(logit[i], rule);
        bool is_kept = own + i < V && w > 0.0f;
        if (NUCLEUS) {
            const uint order = float_order(logit[i]);
            const bool is_edge = order == edge.key;
            const bool is_inside = edge.above + float(rank) * w < edge.target;
            is_kept = is_kept && (order > edge.key || (is_edge && is_inside));
            rank += is_edge ? 1 : 0;
        }
        const float value = is_kept ? w / exponential(random_bits(key, own + i, V)) : -1.0f;
        id = value > best ? own + i : id;
        best = max(best, value);
    }
    simd_best(best, id);
    if (at.lane == 0) {
        scratch[at.simdgroup] = best;
        counts[at.simdgroup] = id;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    best = scratch[at.lane % SIMDGROUPS];
    id = counts[at.lane % SIMDGROUPS];
    simd_best(best, id);
    if (at.thread_index == 0) {
        values[at.part] = best;
        ids[at.part] = id;
    }
}

// The id of the greatest value of all parts, by one simdgroup.
template <typename T, typename I>
inline void sampling_first(T values, I ids, uint parts, device uint* token, uint lane) {
    float best = -1.0f;
    uint part = 0;
    for (uint p = lane; p < parts; p += SIMD) {
        const float value = values[p];
        part = value > best ? p : part;
        best = max(best, value);
    }
    simd_best(best, part);
    if (lane == 0) {
        token[0] = ids[part];
    }
}
