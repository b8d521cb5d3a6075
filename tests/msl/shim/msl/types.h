// Scalars, vectors, vector construction and as_type.
#pragma once
#include "abi.h"

// Code of the shim that must not be checked as if the kernel had written it.
#define MSL_UNCHECKED __attribute__((no_sanitize("thread")))

typedef _Float16 half;
typedef __bf16 bfloat;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator""h(unsigned long long x) { return (half)x; }
constexpr half operator"" H(long double x) { return (half)x; }
constexpr bfloat operator"" bf(long double x) { return (bfloat)(float)x; }

namespace msl {

template <class T, int N>
using vector = T __attribute__((ext_vector_type(N)));

// Lanes and element type of a vector; a scalar is a vector of one.
template <class T>
struct shape {
  static constexpr int lanes = 1;
  typedef T element;
};
template <class T>
constexpr int lanes = shape<T>::lanes;
template <class T>
using element = typename shape<T>::element;

}  // namespace msl

#define MSL_VECTOR(T, N)            \
  typedef msl::vector<T, N> T##N;   \
  template <>                       \
  struct msl::shape<T##N> {         \
    static constexpr int lanes = N; \
    typedef T element;              \
  };
#define MSL_VECTORS(T) MSL_VECTOR(T, 2) MSL_VECTOR(T, 3) MSL_VECTOR(T, 4)
// There is no bool2: what clang makes of a comparison of vectors are vectors of integers.
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
// The checker sees accesses of up to 16 bytes, so wider vectors do not exist here.
MSL_VECTOR(long, 2)
MSL_VECTOR(ulong, 2)

namespace msl {

template <class R, class A>
constexpr void append(R& result, int& at, A argument) {
  if constexpr (lanes<A> == 1) {
    result[at++] = (element<R>)argument;
  } else {
    for (int i = 0; i < lanes<A>; i++) result[at++] = (element<R>)argument[i];
  }
}

// R(a, b, ...): one scalar fills the vector, otherwise the components must be as many as its lanes.
template <class R, class... A>
inline __attribute__((always_inline)) R make(A... arguments) {
  if constexpr (lanes<R> == 1) {
    return R(arguments...);
  } else if constexpr (sizeof...(A) == 0) {
    return R(0);
  } else if constexpr (sizeof...(A) == 1 && (lanes<A> + ... + 0) == 1) {
    R result{};
    for (int i = 0; i < lanes<R>; i++) result[i] = (element<R>)(arguments, ...);
    return result;
  } else {
    static_assert((lanes<A> + ...) == lanes<R>, "the components do not fill the vector");
    R result{};
    int at = 0;
    (append(result, at, arguments), ...);
    return result;
  }
}

}  // namespace msl

template <class R, class A>
constexpr R as_type(A x) {
  static_assert(sizeof(R) == sizeof(A), "as_type needs types of one size");
  return __builtin_bit_cast(R, x);
}

namespace metal {
namespace msl = ::msl;
template <class T, int N>
using vec = msl::vector<T, N>;
using ::as_type;

#define MSL_EXPORT(T) \
  using ::T##2;       \
  using ::T##3;       \
  using ::T##4;
MSL_EXPORT(char)
MSL_EXPORT(uchar)
MSL_EXPORT(short)
MSL_EXPORT(ushort)
MSL_EXPORT(int)
MSL_EXPORT(uint)
MSL_EXPORT(half)
MSL_EXPORT(bfloat)
MSL_EXPORT(float)
#undef MSL_EXPORT
using ::bfloat;
using ::half;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::long2;
using ::uchar;
using ::uint;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using ::ulong;
using ::ulong2;
using ::ushort;

struct packed_float3 {
  float x, y, z;
  packed_float3() = default;
  packed_float3(float3 v) : x(v.x), y(v.y), z(v.z) {}
  operator float3() const { return float3{x, y, z}; }
};
}  // namespace metal
