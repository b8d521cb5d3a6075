// metal_math, metal_common, metal_integer, metal_geometric and metal_relational.
//
// Transcendental functions are computed in float and rounded once; precise and fast are the same.
#pragma once
#include "traits.h"

namespace msl {

// The type in which a function of mixed arguments works: a scalar beside a vector is spread.
template <class A, class B, bool A_IS_VECTOR = (lanes<A> > 1), bool B_IS_VECTOR = (lanes<B> > 1)>
struct common_of {
  typedef decltype(A() + B()) type;
};
template <class A>
struct common_of<A, A, false, false> {
  typedef A type;
};
template <class A>
struct common_of<A, A, true, true> {
  typedef A type;
};
template <class A, class B>
struct common_of<A, B, true, false> {
  typedef A type;
};
template <class A, class B>
struct common_of<A, B, false, true> {
  typedef B type;
};
template <class A, class B>
using common = typename common_of<A, B>::type;

// f applied lane by lane.
template <class T, class F, class... A>
MSL_UNCHECKED constexpr T map(F f, A... arguments) {
  if constexpr (lanes<T> == 1) {
    return T(f(element<T>(arguments)...));
  } else {
    T result{};
    for (int i = 0; i < lanes<T>; i++) result[i] = element<T>(f(arguments[i]...));
    return result;
  }
}

template <class R, class A>
constexpr R spread(A x) {
  if constexpr (lanes<R> == lanes<A>) {
    return (R)x;
  } else {
    return make<R>(x);
  }
}

}  // namespace msl

namespace metal {
namespace precise = ::metal;
namespace fast = ::metal;

#define MSL_UNARY(name, f)                                          \
  template <class T>                                                \
  MSL_UNCHECKED inline T name(T x) {                                \
    return msl::map<T>([](float e) MSL_UNCHECKED { return f; }, x); \
  }
MSL_UNARY(acos, __builtin_acosf(e))
MSL_UNARY(acosh, __builtin_acoshf(e))
MSL_UNARY(asin, __builtin_asinf(e))
MSL_UNARY(asinh, __builtin_asinhf(e))
MSL_UNARY(atan, __builtin_atanf(e))
MSL_UNARY(atanh, __builtin_atanhf(e))
MSL_UNARY(ceil, __builtin_ceilf(e))
MSL_UNARY(cos, __builtin_cosf(e))
MSL_UNARY(cosh, __builtin_coshf(e))
MSL_UNARY(exp, __builtin_expf(e))
MSL_UNARY(exp10, __builtin_powf(10.0f, e))
MSL_UNARY(exp2, __builtin_exp2f(e))
MSL_UNARY(fabs, __builtin_fabsf(e))
MSL_UNARY(floor, __builtin_floorf(e))
MSL_UNARY(fract, e - __builtin_floorf(e))
MSL_UNARY(log, __builtin_logf(e))
MSL_UNARY(log10, __builtin_log10f(e))
MSL_UNARY(log2, __builtin_log2f(e))
MSL_UNARY(rint, __builtin_rintf(e))
MSL_UNARY(round, __builtin_roundf(e))
MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(e))
MSL_UNARY(saturate, e < 0.0f ? 0.0f : e > 1.0f ? 1.0f : e == e ? e : 0.0f)
MSL_UNARY(sign, e > 0.0f ? 1.0f : e < 0.0f ? -1.0f : e == e ? e : 0.0f)
MSL_UNARY(sin, __builtin_sinf(e))
MSL_UNARY(sinh, __builtin_sinhf(e))
MSL_UNARY(sqrt, __builtin_sqrtf(e))
MSL_UNARY(tan, __builtin_tanf(e))
MSL_UNARY(tanh, __builtin_tanhf(e))
MSL_UNARY(trunc, __builtin_truncf(e))
#undef MSL_UNARY

template <class T>
MSL_UNCHECKED constexpr T abs(T x) {
  typedef msl::element<T> E;
  if constexpr (is_floating_point_v<E>) {
    return msl::map<T>([](E e) MSL_UNCHECKED { return E(__builtin_fabsf((float)e)); }, x);
  } else {
    return msl::map<T>([](E e) MSL_UNCHECKED { return e < E(0) ? E(-e) : e; }, x);
  }
}

// Functions of two and three arguments; the expression is in the common element type E.
#define MSL_BINARY(name, f)                                                            \
  template <class A, class B>                                                          \
  MSL_UNCHECKED constexpr msl::common<A, B> name(A x, B y) {                           \
    typedef msl::common<A, B> T;                                                       \
    typedef msl::element<T> E;                                                         \
    return msl::map<T>([](E a, E b) MSL_UNCHECKED { return E(f); }, msl::spread<T>(x), \
                       msl::spread<T>(y));                                             \
  }
#define MSL_TERNARY(name, f)                                                                \
  template <class A, class B, class C>                                                      \
  MSL_UNCHECKED constexpr msl::common<msl::common<A, B>, C> name(A x, B y, C z) {           \
    typedef msl::common<msl::common<A, B>, C> T;                                            \
    typedef msl::element<T> E;                                                              \
    return msl::map<T>([](E a, E b, E c) MSL_UNCHECKED { return E(f); }, msl::spread<T>(x), \
                       msl::spread<T>(y), msl::spread<T>(z));                               \
  }
// A NaN beside a number gives the number.
MSL_BINARY(min, a != a ? b : b < a ? b : a)
MSL_BINARY(max, a != a ? b : a < b ? b : a)
MSL_BINARY(fmin, a != a ? b : b < a ? b : a)
MSL_BINARY(fmax, a != a ? b : a < b ? b : a)
MSL_BINARY(fdim, a > b ? a - b : E(0))
MSL_BINARY(divide, a / b)
MSL_BINARY(step, b < a ? E(0) : E(1))
MSL_BINARY(absdiff, a < b ? b - a : a - b)
MSL_BINARY(atan2, __builtin_atan2f((float)a, (float)b))
MSL_BINARY(copysign, __builtin_copysignf((float)a, (float)b))
MSL_BINARY(fmod, __builtin_fmodf((float)a, (float)b))
MSL_BINARY(pow, __builtin_powf((float)a, (float)b))
MSL_BINARY(powr, __builtin_powf((float)a, (float)b))
MSL_BINARY(mulhi, ((__int128)a * (__int128)b) >> (8 * sizeof(E)))
MSL_BINARY(rotate, (a << (b % (8 * sizeof(E)))) | (a >> ((8 * sizeof(E) - b) % (8 * sizeof(E)))))
MSL_TERNARY(clamp, a < b ? b : c < a ? c : a)
MSL_TERNARY(mix, a + (b - a) * c)
MSL_TERNARY(min3, min(min(a, b), c))
MSL_TERNARY(max3, max(max(a, b), c))
MSL_TERNARY(median3, max(min(a, b), min(max(a, b), c)))
// Exact in double for half and bfloat; float has its own instruction or library function.
MSL_TERNARY(fma, sizeof(E) == 4 ? __builtin_fmaf((float)a, (float)b, (float)c)
                                : (float)__builtin_fma((double)a, (double)b, (double)c))
#undef MSL_BINARY
#undef MSL_TERNARY

template <class T>
inline T ldexp(T x, int exponent) {
  return (T)__builtin_ldexpf((float)x, exponent);
}
template <class T>
inline T sincos(T x, T& cosine) {
  cosine = cos(x);
  return sin(x);
}

template <class T>
inline bool isnan(T x) {
  return x != x;
}
template <class T>
inline bool isinf(T x) {
  return __builtin_isinf((float)x);
}
template <class T>
inline bool isfinite(T x) {
  return __builtin_isfinite((float)x);
}
template <class T>
inline bool signbit(T x) {
  return __builtin_signbit((float)x);
}

template <class T>
MSL_UNCHECKED inline msl::element<T> dot(T a, T b) {
  msl::element<T> sum = a[0] * b[0];
  for (int i = 1; i < msl::lanes<T>; i++) sum += a[i] * b[i];
  return sum;
}
template <class T>
inline msl::element<T> length_squared(T a) {
  return dot(a, a);
}
template <class T>
inline msl::element<T> length(T a) {
  return sqrt(dot(a, a));
}
template <class T>
inline T normalize(T a) {
  return a * rsqrt(dot(a, a));
}

template <class T, class C>
MSL_UNCHECKED inline T select(T a, T b, C condition) {
  if constexpr (msl::lanes<T> == 1) {
    return condition ? b : a;
  } else {
    T result{};
    for (int i = 0; i < msl::lanes<T>; i++) result[i] = condition[i] ? b[i] : a[i];
    return result;
  }
}
template <class C>
MSL_UNCHECKED inline bool any(C condition) {
  bool result = false;
  for (int i = 0; i < msl::lanes<C>; i++) result |= condition[i] != 0;
  return result;
}
template <class C>
MSL_UNCHECKED inline bool all(C condition) {
  bool result = true;
  for (int i = 0; i < msl::lanes<C>; i++) result &= condition[i] != 0;
  return result;
}

template <class T>
inline T popcount(T x) {
  return T(__builtin_popcountl(make_unsigned_t<T>(x)));
}
template <class T>
inline T clz(T x) {
  return x ? T(__builtin_clzl(make_unsigned_t<T>(x)) - (64 - 8 * sizeof(T))) : T(8 * sizeof(T));
}
template <class T>
inline T ctz(T x) {
  return x ? T(__builtin_ctzl(x)) : T(8 * sizeof(T));
}
template <class T>
inline T reverse_bits(T x) {
  return T(__builtin_bitreverse64(x) >> (64 - 8 * sizeof(T)));
}
template <class T>
inline T extract_bits(T x, uint offset, uint bits) {
  constexpr uint WIDTH = 8 * sizeof(T);
  return bits == 0 ? T(0) : T(T(x << (WIDTH - offset - bits)) >> (WIDTH - bits));
}
template <class T>
inline T insert_bits(T base, T insert, uint offset, uint bits) {
  const ulong mask = ((1ul << bits) - 1) << offset;
  return T((ulong(base) & ~mask) | ((ulong(insert) << offset) & mask));
}

}  // namespace metal
