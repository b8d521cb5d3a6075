// The packed rows that attention reads: which of them a query sees, and their values in a tile
// (docs/model.md, sections 3.4 and 3.8).
//
// Window rows uint32: D e4m3 codes, an e8m0 scale for each 32; compressed rows uint32: D e2m1
// codes, an e4m3 scale for each 16; a row that ends inside a word is padded. A query sees the
// window rows that its position reaches and the compressed rows that `chosen` names. D is a
// multiple of 64. The values of rows are exact in bf16, whose pairs fill the words of the tile.
//
// This is a part of attention.metal's launches, whose threads each take 16 channels of a row at a
// time: 16 or 8 bytes of codes and one scale, about 4 operations a value to decode. The tile is
// threadgroup memory: 16.25 KiB for D = 512.

constant constexpr int TILE = 16;

// What `chosen` is: nothing; int32 [Q], how many rows a query sees; int32 [Q, k], ids and -1.
constant constexpr int NO_ROWS = 0;
constant constexpr int VISIBLE_ROWS = 1;
constant constexpr int LISTED_ROWS = 2;

constexpr int tile_pitch(int width) {
    return width / 2 + 4;  // words; the rest of four spreads neighbouring rows over the banks
}
constexpr int window_words(int width) {
    return (width + width / 32 + 3) / 4;
}
constexpr int compressed_words(int width) {
    return (width / 2 + width / 16 + 3) / 4;
}

// Two values that bf16 holds exactly, the first in the lower half.
inline uint bf16_pair(float first, float second) {
    return as_type<uint>(first) >> 16 | (as_type<uint>(second) & 0xffff0000u);
}

inline float bf16_half(uint pair, int half_index) {
    return as_type<float>(half_index == 0 ? pair << 16 : pair & 0xffff0000u);
}

// The 16 values of a window row from channel 16 * part on.
template <int D>
inline void unpack_window(const device uint* row, int part, threadgroup uint4* out) {
    const device uint* words = row + 4 * part;
    uint4 codes;
    if constexpr (window_words(D) % 4 == 0) {
        codes = *reinterpret_cast<const device uint4*>(words);
    } else {
        codes = uint4(words[0], words[1], words[2], words[3]);
    }
    const float scale = e8m0(reinterpret_cast<const device uchar*>(row + D / 4)[part / 2]);
    uint pairs[8];
    DS41_UNROLL
    for (int i = 0; i < 8; i++) {
        const uint two = codes[i / 2] >> 16 * (i % 2);
        pairs[i] = bf16_pair(e4m3(two & 0xffu) * scale, e4m3(two >> 8 & 0xffu) * scale);
    }
    out[0] = uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    out[1] = uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// The 16 values of a compressed row from channel 16 * part on.
template <int D>
inline void unpack_compressed(const device uint* row, int part, threadgroup uint4* out) {
    const device uint* words = row + 2 * part;
    uint2 codes;
    if constexpr (compressed_words(D) % 2 == 0) {
        codes = *reinterpret_cast<const device uint2*>(words);
    } else {
        codes = uint2(words[0], words[1]);
    }
    const float scale = e4m3(reinterpret_cast<const device uchar*>(row + D / 8)[part]);
    uint pairs[8];
    DS41_UNROLL
    for (int i = 0; i < 8; i++) {
        const uint two = codes[i / 4] >> 8 * (i % 4);
        pairs[i] = bf16_pair(e2m1(two & 0xfu) * scale, e2m1(two >> 4 & 0xfu) * scale);
    }
    out[0] = uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    out[1] = uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// The rows of one query: `in_window` rows from `first` on, then `selected` of `chosen`.
struct QueryRows {
    int query;
    int first;
    int in_window;
    int listed;  // columns of `chosen` when it lists ids
    int selected;
};

// Row N - 1 of the window is the last query's own. `reach` rows are seen, its own included.
template <int CHOSEN, typename Chosen>
inline QueryRows rows_of(
    int query, int Q, int N, int reach, Chosen chosen, int listed) {
    const int own = N - Q + query;
    QueryRows rows;
    rows.query = query;
    rows.first = max(own - reach + 1, 0);
    rows.in_window = own + 1 - rows.first;
    rows.listed = listed;
    rows.selected = 0;
    if constexpr (CHOSEN == VISIBLE_ROWS) {
        rows.selected = chosen[query];
    }
    if constexpr (CHOSEN == LISTED_ROWS) {
        rows.selected = listed;
    }
    return rows;
}

// The rows from `first` on, of those before `end`, as values: TILE rows of tile_pitch(D) words, and
// whether each is seen. One that is not becomes zeros.
template <int D, int CHOSEN, typename Chosen>
inline void unpack_tile(
    const device uint* window,
    const device uint* compressed,
    Chosen chosen,
    QueryRows rows,
    int first,
    int end,
    threadgroup uint4* tile,
    threadgroup uchar* seen,
    uint thread_index,
    int threads) {
    for (int i = int(thread_index); i < TILE * (D / 16); i += threads) {
        const int slot = i / (D / 16);
        const int part = i % (D / 16);
        const int at = first + slot;
        threadgroup uint4* out = tile + slot * (tile_pitch(D) / 4) + 2 * part;
        int id = -1;
        if (at < min(end, rows.in_window)) {
            id = rows.first + at;
            unpack_window<D>(window + size_t(id) * window_words(D), part, out);
        } else if (at < end) {
            id = at - rows.in_window;
            if constexpr (CHOSEN == LISTED_ROWS) {
                id = chosen[size_t(rows.query) * rows.listed + id];
            }
            if (id >= 0) {
                unpack_compressed<D>(
                    compressed + size_t(id) * compressed_words(D), part, out);
            }
        }
        if (id < 0) {
            out[0] = uint4(0);
            out[1] = uint4(0);
        }
        if (part == 0) {
            seen[slot] = id >= 0;
        }
    }
}
