// The indexer: scores of packed FP4 keys, and the best of many scores.
//
//   score[p, j] = sum_h w[p, h] relu(q[p, h] . key[j]), -inf where p does not see j
//
//   q        T [Q, H, D]           FP4 values times their scales, exact in bf16; T is bf16 or f32
//   w        f32 [Q, H]
//   codes    uint [S, D / 8]       e2m1, at least 8 words; they start at a multiple of 8 bytes
//   scales   uchar [S, D / 32]     e8m0
//   visible  int [Q]               rows before this count are seen
//   blocks   int [Q, B]            where only rows of some blocks are scored, -1 for no block
//   scores   f32 [Q, N]            N = S rows, or the rows of the B blocks in their order
//
// Scores. Products are f32 sums in simdgroup matrices over operands staged in bf16, exact once
//   scaled. A simdgroup takes 16 keys at a time against all heads: each key is read once for a
//   query. Threadgroup: 8 simdgroups; grid: threadgroups that share the keys, then Q. Threadgroup
//   memory at the released 32 heads of 128 channels: 8.5 KiB of queries and 10 KiB of keys, whose
//   place the heads' products take afterwards; 64 heads would take more than there is, so that the
//   wrapper keeps them from here. Arithmetic: 8192 operations for 68 bytes of a key,
//   120 a byte, so a scan is bound by arithmetic even for one query; decoding a value takes about 5
//   operations beside the 64 of its products. Geometry: 640 threadgroups walk the keys in strides,
//   8 for each of 80 cores, so that a million rows cost each of them 13 tiles for one staging of
//   its query; fewer than 82,000 rows are one tile each.
//
// Selection. The k largest entries, ties to the lowest index, in ascending order of index.
//   Keys are unsigned integers in the order of the scores. Each thread keeps SHARE of them in
//   registers; the threshold is found bit by bit from counts over the threadgroup, until exactly k
//   reach it. Up to 16,384 entries take one launch of one threadgroup a query. More are cut into
//   parts, whose best k go into another launch; parts are as small as leaves that one no more work
//   than the first: 16,384 entries of a million rows, 4096 of 60,000. Threadgroup memory: 256
//   bytes. Arithmetic: two operations a bit and entry, at most 16 a byte. Geometry: threadgroups of
//   1024 threads, 64 of them for a million rows, whose 4 MB are read once. The last launch is one
//   threadgroup a query, for 5,000 entries from 16,385 rows on and 16,384 from 524,288; for more
//   the survivors are cut once more. No thread keeps more than 16 entries: with 1024 threads an M1
//   has about 50 registers for each, and 32 entries with what works on them may not fit.

constant constexpr uint KEYS = 16;
constant constexpr uint CHANNELS = 32;
// Rows of both operands in threadgroup memory: 16 bytes more than a multiple of 64.
constant constexpr uint KEY_PITCH = CHANNELS + 8;
constant constexpr uint SCORE_SIMDGROUPS = 8;

template <uint H>
constexpr uint padded_heads() {
    return (H + 7) / 8 * 8;
}

template <uint H, uint D>
constexpr uint query_values() {
    return padded_heads<H>() * (D + 8);
}

// Of one simdgroup: 16 keys of 32 channels in bf16, or the products of 8 keys with every head.
template <uint H>
constexpr uint own_floats() {
    return KEY_PITCH > padded_heads<H>() + 4 ? 8 * KEY_PITCH : 8 * (padded_heads<H>() + 4);
}

// Which rows the entries of a score array stand for; the rows of block -1 are negative.
struct EveryRow {
    int row(uint entry) const { return int(entry); }
};

template <typename Blocks>
struct RowsOfBlocks {
    Blocks blocks;
    uint size;
    int row(uint entry) const {
        return int(blocks[entry / size]) * int(size) + int(entry % size);
    }
};

template <typename Blocks>
inline RowsOfBlocks<Blocks> rows_of_blocks(Blocks blocks, uint size) {
    return RowsOfBlocks<Blocks>{blocks, size};
}

// Sixteen values of a key as bf16. Two codes that lie 16 bits apart in a word move at once to a
// half's exponent and mantissa, where they are the value times 2^-14.
inline void stage_codes(uint2 words, float scale, threadgroup bfloat16_t* out) {
    DS41_UNROLL
    for (uint i = 0; i < 2; i++) {
        uint word = words[i];
        DS41_UNROLL
        for (uint j = 0; j < 4; j++) {
            const half2 pair =
                as_type<half2>((word << 12 & 0x80008000u) | (word << 9 & 0x0e000e00u));
            out[8 * i + j] = bfloat16_t(float(pair.x) * 16384.0f * scale);
            out[8 * i + j + 4] = bfloat16_t(float(pair.y) * 16384.0f * scale);
            word >>= 4;
        }
    }
}

// Scores of the tiles tile, tile + tiles, .. of one query's N entries. Pointers are the query's
// own; `queries` holds query_values() for the threadgroup and `own` own_floats() for the simdgroup.
template <typename T, uint H, uint D, typename Rows, typename Weights, typename Scales>
inline void index_scores(
    const device T* q,
    Weights head_weights,
    const device uint* codes,
    Scales scales,
    int visible,
    Rows rows,
    uint N,
    device float* scores,
    threadgroup bfloat16_t* queries,
    threadgroup float* own,
    uint tile,
    uint tiles,
    uint thread_index,
    uint threads,
    uint lane) {
    constexpr uint HEADS = padded_heads<H>();
    constexpr uint PITCH = D + 8;
    constexpr uint GROUPS = D / CHANNELS;
    constexpr uint SUM_PITCH = HEADS + 4;
    const float unseen = as_type<float>(0xff800000u);
    for (uint i = thread_index; i < HEADS * D; i += threads) {
        queries[i / D * PITCH + i % D] = bfloat16_t(i < H * D ? float(q[i]) : 0.0f);
    }
    // A quad adds up the heads of a key.
    float weight[HEADS / 4];
    DS41_UNROLL
    for (uint i = 0; i < HEADS / 4; i++) {
        const uint head = 4 * i + lane % 4;
        weight[i] = head < H ? head_weights[head] : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    threadgroup bfloat16_t* staged = (threadgroup bfloat16_t*)own;
    for (; tile * KEYS < N; tile += tiles) {
        // Two lanes load a key, 16 channels of every group each.
        const uint entry = tile * KEYS + lane / 2;
        const int row = entry < N ? rows.row(entry) : -1;
        const bool is_seen = row >= 0 && row < visible;
        if (!simd_any(is_seen)) {
            if (lane % 2 == 0 && entry < N) {
                scores[entry] = unseen;
            }
            continue;
        }
        uint2 words[GROUPS];
        float scale[GROUPS];
        DS41_UNROLL
        for (uint g = 0; g < GROUPS; g++) {
            words[g] = uint2(0);
            scale[g] = 0.0f;
            if (is_seen) {
                const device uint* key = codes + uint(row) * (D / 8) + 4 * g + lane % 2 * 2;
                words[g] = *(const device uint2*)key;
                scale[g] = e8m0(uint(scales[uint(row) * GROUPS + g]));
            }
        }
        simdgroup_matrix<float, 8, 8> dot[2][HEADS / 8];
        DS41_UNROLL
        for (uint i = 0; i < 2; i++) {
            DS41_UNROLL
            for (uint j = 0; j < HEADS / 8; j++) {
                dot[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            }
        }
        DS41_UNROLL
        for (uint g = 0; g < GROUPS; g++) {
            stage_codes(words[g], scale[g], staged + lane / 2 * KEY_PITCH + lane % 2 * 16);
            simdgroup_barrier(mem_flags::mem_threadgroup);
            for (uint c = 0; c < CHANNELS; c += 8) {
                simdgroup_matrix<bfloat16_t, 8, 8> key[2];
                DS41_UNROLL
                for (uint i = 0; i < 2; i++) {
                    simdgroup_load(key[i], staged + 8 * i * KEY_PITCH + c, KEY_PITCH);
                }
                DS41_UNROLL
                for (uint j = 0; j < HEADS / 8; j++) {
                    simdgroup_matrix<bfloat16_t, 8, 8> head;
                    simdgroup_load(
                        head, queries + 8 * j * PITCH + g * CHANNELS + c, PITCH, ulong2(0, 0),
                        true);
                    DS41_UNROLL
                    for (uint i = 0; i < 2; i++) {
                        simdgroup_multiply_accumulate(dot[i][j], key[i], head, dot[i][j]);
                    }
                }
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        DS41_UNROLL
        for (uint i = 0; i < 2; i++) {
            DS41_UNROLL
            for (uint j = 0; j < HEADS / 8; j++) {
                simdgroup_store(dot[i][j], own + 8 * j, SUM_PITCH);
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            float score = 0.0f;
            DS41_UNROLL
            for (uint j = 0; j < HEADS / 4; j++) {
                score += weight[j] * max(own[lane / 4 * SUM_PITCH + 4 * j + lane % 4], 0.0f);
            }
            score = quad_sum(score);
            const uint key = 8 * i + lane / 4;
            const bool key_is_seen = simd_shuffle(uint(is_seen), ushort(2 * key)) != 0;
            if (lane % 4 == 0 && tile * KEYS + key < N) {
                scores[tile * KEYS + key] = key_is_seen ? score : unseen;
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

// A score as an unsigned integer of the same order, -0 as +0. No score becomes 0, which stands for
// no entry.
inline uint ordered(float score) {
    uint bits = as_type<uint>(score);
    bits = bits == 0x80000000u ? 0 : bits;
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

// ordered(-inf), which is not chosen, and ordered(inf), which always is.
constant constexpr uint ORDERED_NONE = 0x007fffffu;
constant constexpr uint ORDERED_FIRST = 0xff800000u;

// Sources of a selection: the integer of an entry, and the id that it stands for.
template <typename Scores, typename Rows>
struct ScoredRows {
    Scores scores;
    Rows rows;
    uint key(uint entry) const { return ordered(scores[entry]); }
    int id(uint entry) const { return rows.row(entry); }
};

template <typename Scores, typename Rows>
inline ScoredRows<Scores, Rows> scored_rows(Scores scores, Rows rows) {
    return ScoredRows<Scores, Rows>{scores, rows};
}

// A block scores as its best row; that of the newest visible row comes first.
template <typename Scores>
struct ScoredBlocks {
    Scores scores;
    uint rows;
    uint size;
    int visible;
    uint key(uint block) const {
        if (visible > 0 && int(block) == (visible - 1) / int(size)) {
            return ORDERED_FIRST;
        }
        uint best = 0;
        for (uint row = block * size; row < min((block + 1) * size, rows); row++) {
            best = max(best, ordered(scores[row]));
        }
        return best;
    }
    int id(uint block) const { return int(block); }
};

template <typename Scores>
inline ScoredBlocks<Scores> scored_blocks(Scores scores, uint rows, uint size, int visible) {
    return ScoredBlocks<Scores>{scores, rows, size, visible};
}

// What the parts of a row left over.
template <typename Keys, typename Ids>
struct Merged {
    Keys keys;
    Ids ids;
    uint key(uint entry) const { return keys[entry]; }
    int id(uint entry) const { return ids[entry]; }
};

template <typename Keys, typename Ids>
inline Merged<Keys, Ids> merged(Keys keys, Ids ids) {
    return Merged<Keys, Ids>{keys, ids};
}

// Where the chosen entries go: to the next launch, or out.
struct Survivors {
    device uint* keys;
    device int* ids;
    void put(uint at, uint key, int id) const {
        keys[at] = key;
        ids[at] = id;
    }
};

struct Chosen {
    device int* ids;
    void put(uint at, uint key, int id) const { ids[at] = key > ORDERED_NONE ? id : -1; }
};

// The sum over the threadgroup of what each simdgroup has counted, and over those before this one.
// `scratch` holds a word for each of 32 simdgroups and may be used again after the next barrier.
inline uint2 group_counts(
    uint count, threadgroup uint* scratch, uint simdgroups, uint simdgroup, uint lane) {
    count = simd_sum(count);
    if (lane == 0) {
        scratch[simdgroup] = count;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint other = lane < simdgroups ? scratch[lane] : 0;
    return uint2(simd_sum(other), simd_sum(lane < simdgroup ? other : 0));
}

// The K largest of the entries first .. end - 1, at most SHARE for each thread, in order of their
// index; for fewer than K entries some with key 0 and id -1 follow. scratch: 2 x 32 words, used in
// turn, so that one barrier separates a count from the next.
template <uint SHARE, uint K, typename Source, typename Sink>
inline void select_top(
    Source source,
    uint first,
    uint end,
    Sink sink,
    threadgroup uint* scratch,
    uint simdgroups,
    uint simdgroup,
    uint lane) {
    const uint own = first + simdgroup * SIMD * SHARE + lane;
    uint key[SHARE];
    DS41_UNROLL
    for (uint i = 0; i < SHARE; i++) {
        const uint entry = own + i * SIMD;
        key[i] = entry < end ? source.key(entry) : 0;
    }

    // The largest threshold that at least K keys reach, or an earlier one that exactly K reach.
    uint threshold = 0;
    uint turn = 0;
    for (uint bit = 0x80000000u; bit != 0; bit >>= 1) {
        const uint trial = threshold | bit;
        uint count = 0;
        DS41_UNROLL
        for (uint i = 0; i < SHARE; i++) {
            count += key[i] >= trial ? 1 : 0;
        }
        const uint reach =
            group_counts(count, scratch + turn * SIMD, simdgroups, simdgroup, lane).x;
        turn ^= 1;
        threshold = reach >= K ? trial : threshold;
        if (reach == K) {
            break;
        }
    }

    // Entries above the threshold are counted in the low half of a word, equal ones in the high.
    uint count = 0;
    DS41_UNROLL
    for (uint i = 0; i < SHARE; i++) {
        count += key[i] > threshold ? 1 : key[i] == threshold ? 0x10000 : 0;
    }
    const uint2 counts =
        group_counts(count, scratch + turn * SIMD, simdgroups, simdgroup, lane);
    const uint equals = K - (counts.x & 0xffffu);
    uint before = counts.y;
    DS41_UNROLL
    for (uint i = 0; i < SHARE; i++) {
        const uint entry = own + i * SIMD;
        const uint mine = key[i] > threshold ? 1 : key[i] == threshold ? 0x10000 : 0;
        const uint at = before + simd_prefix_exclusive_sum(mine);
        const uint equal = at >> 16;
        if (mine == 1 || (mine != 0 && equal < equals)) {
            sink.put(
                (at & 0xffffu) + min(equal, equals), key[i], entry < end ? source.id(entry) : -1);
        }
        before += simd_sum(mine);
    }
}
