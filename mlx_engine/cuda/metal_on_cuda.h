// Stands for metal_stdlib and the qualifiers of Metal, so that NVRTC compiles the files of metal/
// as they are: a simdgroup is a warp, a threadgroup a block, threadgroup memory shared memory.
//
// It needs compute capability 8.0. kernels.py puts it before a family's file, which then stands in
// the same namespace, and so does the kernel. Only what those files use is here; a function that is
// missing is a compiler's error. Differences that no compiler sees: arithmetic is IEEE's (Metal
// flushes subnormals), and all 32 lanes must take part in a simd operation.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define device
#define constant
#define thread
#define threadgroup

// Attributes of a thread. Grids are whole blocks here, which kernels.py sees to.
#define thread_position_in_grid                                                       \
    msl::uint3(                                                                       \
        blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, \
        blockIdx.z * blockDim.z + threadIdx.z)
#define threadgroup_position_in_grid msl::uint3(blockIdx.x, blockIdx.y, blockIdx.z)
#define threadgroups_per_grid msl::uint3(gridDim.x, gridDim.y, gridDim.z)
#define threads_per_threadgroup msl::uint3(blockDim.x, blockDim.y, blockDim.z)
#define thread_index_in_threadgroup \
    ((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup / 32)
#define thread_index_in_simdgroup (thread_index_in_threadgroup % 32)
#define simdgroups_per_threadgroup ((blockDim.x * blockDim.y * blockDim.z + 31) / 32)

// NVRTC unrolls such loops by itself.
#define DS41_UNROLL

// The lanes of mma.sync's accumulators, in the place of Metal's.
#define SIMDGROUP_MATRIX_ROW(lane) ((lane) / 4)
#define SIMDGROUP_MATRIX_COLUMN(lane) ((lane) % 4 * 2)

namespace msl {

typedef unsigned long size_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long ulong;
typedef __half half;
typedef __nv_bfloat16 bfloat;
typedef __nv_bfloat16 bfloat16_t;

// Vectors, aligned as in Metal. Conversions are explicit, as between scalars.
template <typename T, int N>
struct vec;

template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
    T x, y;
    vec() = default;
    explicit vec(T v) : x(v), y(v) {}
    vec(T x, T y) : x(x), y(y) {}
    template <typename U>
    explicit vec(const vec<U, 2>& v) : x(T(v.x)), y(T(v.y)) {}
    T& operator[](int i) { return i == 0 ? x : y; }
    const T& operator[](int i) const { return i == 0 ? x : y; }
};

template <typename T>
struct vec<T, 3> {
    union {
        struct {
            T x, y, z;
        };
        vec<T, 2> xy;
    };
    vec() = default;
    explicit vec(T v) : x(v), y(v), z(v) {}
    vec(T x, T y, T z) : x(x), y(y), z(z) {}
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
    union {
        struct {
            T x, y, z, w;
        };
        struct {
            vec<T, 2> xy, zw;
        };
        T values[4];
    };
    vec() = default;
    explicit vec(T v) : x(v), y(v), z(v), w(v) {}
    vec(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
    template <typename U>
    explicit vec(const vec<U, 4>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
    T& operator[](int i) { return values[i]; }
    const T& operator[](int i) const { return values[i]; }
};

typedef vec<uint, 2> uint2;
typedef vec<uint, 3> uint3;
typedef vec<uint, 4> uint4;
typedef vec<ulong, 2> ulong2;
typedef vec<half, 2> half2;
typedef vec<float, 2> float2;
typedef vec<float, 4> float4;
typedef vec<uchar, 4> uchar4;

#define MSL_OPERATOR(op)                                                                   \
    template <typename T>                                                                  \
    inline vec<T, 2> operator op(vec<T, 2> a, vec<T, 2> b) {                               \
        return vec<T, 2>(a.x op b.x, a.y op b.y);                                          \
    }                                                                                      \
    template <typename T>                                                                  \
    inline vec<T, 3> operator op(vec<T, 3> a, vec<T, 3> b) {                               \
        return vec<T, 3>(a.x op b.x, a.y op b.y, a.z op b.z);                              \
    }                                                                                      \
    template <typename T>                                                                  \
    inline vec<T, 4> operator op(vec<T, 4> a, vec<T, 4> b) {                               \
        return vec<T, 4>(a.x op b.x, a.y op b.y, a.z op b.z, a.w op b.w);                  \
    }                                                                                      \
    template <typename T, int N>                                                           \
    inline vec<T, N> operator op(vec<T, N> a, T b) {                                       \
        return a op vec<T, N>(b);                                                          \
    }                                                                                      \
    template <typename T, int N>                                                           \
    inline vec<T, N> operator op(T a, vec<T, N> b) {                                       \
        return vec<T, N>(a) op b;                                                          \
    }                                                                                      \
    template <typename T, int N, typename U>                                               \
    inline vec<T, N>& operator op##=(vec<T, N>& a, U b) {                                  \
        return a = a op b;                                                                 \
    }
MSL_OPERATOR(+)
MSL_OPERATOR(-)
MSL_OPERATOR(*)
MSL_OPERATOR(/)
#undef MSL_OPERATOR

template <typename R, typename A>
inline R as_type(A x) {
    static_assert(sizeof(R) == sizeof(A), "as_type needs types of one size");
    R r;
    memcpy(&r, &x, sizeof(R));
    return r;
}

template <typename T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <typename T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
inline float min(float a, float b) {
    return fminf(a, b);
}
inline float max(float a, float b) {
    return fmaxf(a, b);
}
inline float clamp(float x, float low, float high) {
    return fminf(fmaxf(x, low), high);
}
inline float abs(float x) {
    return fabsf(x);
}
inline float exp(float x) {
    return expf(x);
}
inline float rint(float x) {
    return rintf(x);
}
inline float sqrt(float x) {
    return sqrtf(x);
}
inline float rsqrt(float x) {
    return rsqrtf(x);
}
namespace precise {
inline float rsqrt(float x) {
    return __frsqrt_rn(x);
}
inline float log(float x) {
    return logf(x);
}
}  // namespace precise
inline float dot(float4 a, float4 b) {
    return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) {
    __syncthreads();
}
inline void simdgroup_barrier(mem_flags) {
    __syncwarp();
}

constexpr uint ALL_LANES = 0xffffffffu;

template <typename T>
inline T simd_shuffle(T x, ushort lane) {
    return __shfl_sync(ALL_LANES, x, lane);
}
template <typename T>
inline T simd_shuffle_xor(T x, ushort mask) {
    return __shfl_xor_sync(ALL_LANES, x, mask);
}
template <typename T>
inline T quad_sum(T x) {
    x += simd_shuffle_xor(x, 1);
    return x + simd_shuffle_xor(x, 2);
}
template <typename T>
inline T simd_sum(T x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x += simd_shuffle_xor(x, step);
    }
    return x;
}
inline uint simd_max(uint x) {
    return __reduce_max_sync(ALL_LANES, x);
}
inline uint simd_min(uint x) {
    return __reduce_min_sync(ALL_LANES, x);
}
inline float simd_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x = fmaxf(x, simd_shuffle_xor(x, step));
    }
    return x;
}
inline bool simd_any(bool condition) {
    return __any_sync(ALL_LANES, condition);
}
inline uint simd_prefix_exclusive_sum(uint x) {
    const uint lane = thread_index_in_simdgroup;
    uint sum = x;
#pragma unroll
    for (uint step = 1; step < 32; step *= 2) {
        const uint below = __shfl_up_sync(ALL_LANES, sum, step);
        sum += lane >= step ? below : 0;
    }
    return sum - x;
}

// Counters in threadgroup memory; the only order in use is none.
typedef uint atomic_uint;
enum memory_order { memory_order_relaxed };
inline void atomic_store_explicit(atomic_uint* to, uint x, memory_order) {
    *to = x;
}
inline uint atomic_load_explicit(const atomic_uint* from, memory_order) {
    return *from;
}
inline void atomic_fetch_add_explicit(atomic_uint* to, uint x, memory_order) {
    atomicAdd(to, x);
}

// 8 x 8 matrices: a lane holds two neighbours of a row, as mma.sync's accumulators lie.
template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
    static_assert(ROWS == 8 && COLUMNS == 8, "a simdgroup matrix is 8 x 8");
    T elements[2];
    T* thread_elements() { return elements; }
};

template <typename T, int ROWS, int COLUMNS>
inline simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T x) {
    simdgroup_matrix<T, ROWS, COLUMNS> filled;
    filled.elements[0] = x;
    filled.elements[1] = x;
    return filled;
}

template <typename T>
inline void simdgroup_load(
    simdgroup_matrix<T, 8, 8>& d,
    const T* source,
    uint pitch,
    ulong2 = ulong2(0, 0),
    bool transpose = false) {
    const uint lane = thread_index_in_simdgroup;
    const uint row = SIMDGROUP_MATRIX_ROW(lane), column = SIMDGROUP_MATRIX_COLUMN(lane);
    const T* first = source + (transpose ? column * pitch + row : row * pitch + column);
    d.elements[0] = first[0];
    d.elements[1] = first[transpose ? pitch : 1];
}

template <typename T>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> a, T* target, uint pitch) {
    const uint lane = thread_index_in_simdgroup;
    T* first = target + SIMDGROUP_MATRIX_ROW(lane) * pitch + SIMDGROUP_MATRIX_COLUMN(lane);
    first[0] = a.elements[0];
    first[1] = a.elements[1];
}

inline void simdgroup_multiply_accumulate(
    simdgroup_matrix<float, 8, 8>& d,
    const simdgroup_matrix<float, 8, 8>& a,
    const simdgroup_matrix<float, 8, 8>& b,
    const simdgroup_matrix<float, 8, 8>& c) {
    // No instruction multiplies f32 exactly: element (row, k) lies in lane 4 row + k / 2.
    const uint lane = thread_index_in_simdgroup;
    float first = c.elements[0], second = c.elements[1];
#pragma unroll
    for (uint k = 0; k < 8; k++) {
        const float left = __shfl_sync(ALL_LANES, a.elements[k % 2], lane / 4 * 4 + k / 2);
        first += left * __shfl_sync(ALL_LANES, b.elements[0], 4 * k + lane % 4);
        second += left * __shfl_sync(ALL_LANES, b.elements[1], 4 * k + lane % 4);
    }
    d.elements[0] = first;
    d.elements[1] = second;
}

inline void simdgroup_multiply_accumulate(
    simdgroup_matrix<float, 8, 8>& d,
    const simdgroup_matrix<bfloat16_t, 8, 8>& a,
    const simdgroup_matrix<bfloat16_t, 8, 8>& b,
    const simdgroup_matrix<float, 8, 8>& c) {
    uint left, right;
    memcpy(&left, a.elements, 4);
    memcpy(&right, b.elements, 4);
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(right));
    // The instruction makes 16 rows; there are 8.
    [[maybe_unused]] float lower[2];
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %9};"
        : "=f"(d.elements[0]), "=f"(d.elements[1]), "=f"(lower[0]), "=f"(lower[1])
        : "r"(left), "r"(0), "r"(right), "f"(c.elements[0]), "f"(c.elements[1]), "f"(0.0f));
}

}  // namespace msl
