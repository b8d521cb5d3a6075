// Declarations of metal_stdlib for the strict pass (strict.py): nothing here can be executed.
//
// Overloads exist for the types for which Metal has them (bfloat through MLX's headers), so that a
// call which is ambiguous in Metal is ambiguous here.
#pragma once
#define __METAL_VERSION__ 310
#define MLX_METAL_JIT 1
#define METAL_FUNC inline __attribute__((always_inline))

#ifdef __OPENCL_CPP_VERSION__
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#else
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
typedef _Float16 half;
constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator""h(unsigned long long x) { return (half)x; }
#endif

typedef __bf16 bfloat;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef ulong uintptr_t;

#define MSL_NAMED_VECTORS(T, NAME)                          \
  typedef T NAME##2 __attribute__((ext_vector_type(2)));    \
  typedef T NAME##3 __attribute__((ext_vector_type(3)));    \
  typedef T NAME##4 __attribute__((ext_vector_type(4)));
MSL_NAMED_VECTORS(char, char)
MSL_NAMED_VECTORS(uchar, uchar)
MSL_NAMED_VECTORS(short, short)
MSL_NAMED_VECTORS(ushort, ushort)
MSL_NAMED_VECTORS(int, int)
MSL_NAMED_VECTORS(uint, uint)
MSL_NAMED_VECTORS(bfloat, bfloat)
MSL_NAMED_VECTORS(float, float)
typedef half half2 __attribute__((ext_vector_type(2)));
typedef half half3 __attribute__((ext_vector_type(3)));
typedef half half4 __attribute__((ext_vector_type(4)));
typedef long long2 __attribute__((ext_vector_type(2)));
typedef ulong ulong2 __attribute__((ext_vector_type(2)));

namespace msl {
template <class R, class... A>
R make(A... components);
template <class T, class N>
threadgroup T* threadgroup_variable(uint id, N name);
}  // namespace msl

template <class R, class A>
constexpr R as_type(A x) {
  static_assert(sizeof(R) == sizeof(A), "as_type needs types of one size");
  return __builtin_bit_cast(R, x);
}

namespace metal {
namespace msl = ::msl;
namespace precise = ::metal;
namespace fast = ::metal;
using ::as_type;
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
struct packed_float3 {
  float x, y, z;
  packed_float3(float3);
  operator float3() const;
};

template <class T, T V>
struct integral_constant {
  static constexpr constant T value = V;
  typedef T value_type;
  constexpr operator T() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <class T, class U>
constexpr constant bool is_same_v = __is_same(T, U);
template <class T, class U>
constexpr constant bool is_convertible_v = __is_convertible(T, U);
template <class T>
constexpr constant bool is_integral_v = __is_integral(T);
template <class T>
constexpr constant bool is_floating_point_v =
    __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat);
template <class T, class U>
struct is_same : bool_constant<__is_same(T, U)> {};
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
struct is_floating_point
    : bool_constant<__is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat)> {};
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F>
struct conditional {
  typedef F type;
};
template <class T, class F>
struct conditional<true, T, F> {
  typedef T type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
using make_unsigned_t = __make_unsigned(T);
template <class T>
struct numeric_limits {
  static constexpr T max() { return T(0); }
  static constexpr T min() { return T(0); }
  static constexpr T lowest() { return T(0); }
  static constexpr T infinity() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
  static constexpr T epsilon() { return T(0); }
};

// For every type of a group: F(type, name).
#define MSL_FAMILY(F, T, name) F(T, name) F(T##2, name) F(T##3, name) F(T##4, name)
#define MSL_FLOATS(F, name) \
  MSL_FAMILY(F, half, name) MSL_FAMILY(F, bfloat, name) MSL_FAMILY(F, float, name)
#define MSL_SCALAR_FLOATS(F, name) F(half, name) F(bfloat, name) F(float, name)
#define MSL_INTEGERS(F, name)                               \
  MSL_FAMILY(F, char, name) MSL_FAMILY(F, uchar, name)      \
  MSL_FAMILY(F, short, name) MSL_FAMILY(F, ushort, name)    \
  MSL_FAMILY(F, int, name) MSL_FAMILY(F, uint, name)        \
  F(long, name) F(long2, name) F(ulong, name) F(ulong2, name)
#define MSL_1(T, name) T name(T);
#define MSL_2(T, name) T name(T, T);
#define MSL_3(T, name) T name(T, T, T);
#define MSL_TEST(T, name) bool name(T);

MSL_FLOATS(MSL_1, acos) MSL_FLOATS(MSL_1, acosh) MSL_FLOATS(MSL_1, asin) MSL_FLOATS(MSL_1, asinh)
MSL_FLOATS(MSL_1, atan) MSL_FLOATS(MSL_1, atanh) MSL_FLOATS(MSL_1, ceil) MSL_FLOATS(MSL_1, cos)
MSL_FLOATS(MSL_1, cosh) MSL_FLOATS(MSL_1, exp) MSL_FLOATS(MSL_1, exp10) MSL_FLOATS(MSL_1, exp2)
MSL_FLOATS(MSL_1, fabs) MSL_FLOATS(MSL_1, floor) MSL_FLOATS(MSL_1, fract) MSL_FLOATS(MSL_1, log)
MSL_FLOATS(MSL_1, log10) MSL_FLOATS(MSL_1, log2) MSL_FLOATS(MSL_1, rint) MSL_FLOATS(MSL_1, round)
MSL_FLOATS(MSL_1, rsqrt) MSL_FLOATS(MSL_1, saturate) MSL_FLOATS(MSL_1, sign) MSL_FLOATS(MSL_1, sin)
MSL_FLOATS(MSL_1, sinh) MSL_FLOATS(MSL_1, sqrt) MSL_FLOATS(MSL_1, tan) MSL_FLOATS(MSL_1, tanh)
MSL_FLOATS(MSL_1, trunc) MSL_FLOATS(MSL_1, abs) MSL_FLOATS(MSL_1, normalize)
MSL_FLOATS(MSL_2, atan2) MSL_FLOATS(MSL_2, copysign) MSL_FLOATS(MSL_2, divide)
MSL_FLOATS(MSL_2, fdim) MSL_FLOATS(MSL_2, fmax) MSL_FLOATS(MSL_2, fmin) MSL_FLOATS(MSL_2, fmod)
MSL_FLOATS(MSL_2, max) MSL_FLOATS(MSL_2, min) MSL_FLOATS(MSL_2, pow) MSL_FLOATS(MSL_2, powr)
MSL_FLOATS(MSL_2, step) MSL_FLOATS(MSL_3, clamp) MSL_FLOATS(MSL_3, fma) MSL_FLOATS(MSL_3, max3)
MSL_FLOATS(MSL_3, median3) MSL_FLOATS(MSL_3, min3) MSL_FLOATS(MSL_3, mix)
MSL_SCALAR_FLOATS(MSL_TEST, isnan) MSL_SCALAR_FLOATS(MSL_TEST, isinf)
MSL_SCALAR_FLOATS(MSL_TEST, isfinite) MSL_SCALAR_FLOATS(MSL_TEST, signbit)
MSL_INTEGERS(MSL_1, abs) MSL_INTEGERS(MSL_1, clz) MSL_INTEGERS(MSL_1, ctz)
MSL_INTEGERS(MSL_1, popcount) MSL_INTEGERS(MSL_1, reverse_bits) MSL_INTEGERS(MSL_2, absdiff)
MSL_INTEGERS(MSL_2, max) MSL_INTEGERS(MSL_2, min) MSL_INTEGERS(MSL_2, mulhi)
MSL_INTEGERS(MSL_2, rotate) MSL_INTEGERS(MSL_3, clamp) MSL_INTEGERS(MSL_3, max3)
MSL_INTEGERS(MSL_3, median3) MSL_INTEGERS(MSL_3, min3)

#define MSL_LDEXP(T, name) T name(T, int);
MSL_SCALAR_FLOATS(MSL_LDEXP, ldexp)
#define MSL_SINCOS(T, name) T name(T, thread T&);
MSL_SCALAR_FLOATS(MSL_SINCOS, sincos)
#define MSL_DOT(T, name) T name(T##2, T##2); T name(T##3, T##3); T name(T##4, T##4);
MSL_SCALAR_FLOATS(MSL_DOT, dot)
#define MSL_LENGTH(T, name) T name(T##2); T name(T##3); T name(T##4);
MSL_SCALAR_FLOATS(MSL_LENGTH, length) MSL_SCALAR_FLOATS(MSL_LENGTH, length_squared)
template <class T, class C>
T select(T a, T b, C condition);
template <class C>
bool any(C condition);
template <class C>
bool all(C condition);
template <class T>
T extract_bits(T x, uint offset, uint bits);
template <class T>
T insert_bits(T base, T insert, uint offset, uint bits);

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

#define MSL_REDUCTION(name) \
  template <class T>         \
  T simd_##name(T x);        \
  template <class T>         \
  T quad_##name(T x);
MSL_REDUCTION(sum) MSL_REDUCTION(product) MSL_REDUCTION(min) MSL_REDUCTION(max)
MSL_REDUCTION(and) MSL_REDUCTION(or) MSL_REDUCTION(xor)
#define MSL_SIMD(name, ...) template <class T> T name(T x __VA_OPT__(,) __VA_ARGS__);
MSL_SIMD(simd_broadcast_first) MSL_SIMD(simd_prefix_inclusive_sum)
MSL_SIMD(simd_prefix_exclusive_sum) MSL_SIMD(simd_prefix_inclusive_product)
MSL_SIMD(simd_prefix_exclusive_product)
MSL_SIMD(simd_broadcast, ushort lane) MSL_SIMD(simd_shuffle, ushort lane)
MSL_SIMD(simd_shuffle_xor, ushort mask) MSL_SIMD(simd_shuffle_down, ushort delta)
MSL_SIMD(simd_shuffle_up, ushort delta) MSL_SIMD(simd_shuffle_rotate_down, ushort delta)
MSL_SIMD(simd_shuffle_rotate_up, ushort delta) MSL_SIMD(quad_broadcast, ushort lane)
MSL_SIMD(quad_shuffle, ushort lane) MSL_SIMD(quad_shuffle_xor, ushort mask)
MSL_SIMD(quad_shuffle_down, ushort delta) MSL_SIMD(quad_shuffle_up, ushort delta)
MSL_SIMD(simd_shuffle_and_fill_down, T filling, ushort delta)
MSL_SIMD(simd_shuffle_and_fill_up, T filling, ushort delta)
struct simd_vote {
  ulong bits;
  explicit constexpr operator ulong() const { return bits; }
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool condition);
simd_vote simd_active_threads_mask();
bool simd_any(bool condition);
bool simd_all(bool condition);
bool simd_is_first();

template <class T, int ROWS = 8, int COLUMNS = 8>
struct simdgroup_matrix {
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  thread vec<T, 2>& thread_elements() thread;
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;
template <class T, int ROWS, int COLUMNS>
simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T x);
#define MSL_MATRIX_MEMORY(space)                                                                  \
  template <class T>                                                                              \
  void simdgroup_load(thread simdgroup_matrix<T>& d, const space T* source, ulong row = 8,        \
                      ulong2 origin = 0, bool transpose = false);                                 \
  template <class T>                                                                              \
  void simdgroup_store(simdgroup_matrix<T> a, space T* target, ulong row = 8, ulong2 origin = 0,  \
                       bool transpose = false);
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D>& d, simdgroup_matrix<A> a,
                                   simdgroup_matrix<B> b, simdgroup_matrix<C> c);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D>& d, simdgroup_matrix<A> a,
                        simdgroup_matrix<B> b);

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
#define MSL_UPDATE(space, name) \
  template <class T>            \
  T atomic_##name##_explicit(volatile space atomic<T>* object, remove_cv_t<T> x, memory_order);
#define MSL_ATOMICS(space)                                                                        \
  template <class T>                                                                              \
  T atomic_load_explicit(const volatile space atomic<T>* object, memory_order);                   \
  template <class T>                                                                              \
  void atomic_store_explicit(volatile space atomic<T>* object, remove_cv_t<T> x, memory_order);   \
  template <class T>                                                                              \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* object,                    \
                                             thread T* expected, remove_cv_t<T> desired,          \
                                             memory_order, memory_order);                         \
  MSL_UPDATE(space, exchange) MSL_UPDATE(space, fetch_add) MSL_UPDATE(space, fetch_sub)           \
  MSL_UPDATE(space, fetch_min) MSL_UPDATE(space, fetch_max) MSL_UPDATE(space, fetch_and)          \
  MSL_UPDATE(space, fetch_or) MSL_UPDATE(space, fetch_xor)
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
}  // namespace metal

#include "msl/constants.h"
#include "msl/constructors.h"
