// metal_type_traits and metal_limits, as far as kernels and MLX's headers use them.
#pragma once
#include "types.h"

namespace metal {

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <class T, class U>
constexpr bool is_same_v = __is_same(T, U);
template <class T, class U>
constexpr bool is_convertible_v = __is_convertible(T, U);
template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <class T>
constexpr bool is_floating_point_v =
    is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T>
constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T>
constexpr bool is_signed_v = is_floating_point_v<T> || __is_signed(T);
template <class T>
constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;

template <class T, class U>
struct is_same : bool_constant<is_same_v<T, U>> {};
template <class T, class U>
struct is_convertible : bool_constant<is_convertible_v<T, U>> {};
template <class T>
struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T>
struct is_unsigned : bool_constant<is_unsigned_v<T>> {};
template <class T>
struct is_signed : bool_constant<is_signed_v<T>> {};
template <class T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};

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
struct remove_cv {
  typedef remove_cv_t<T> type;
};
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
using make_unsigned_t = __make_unsigned(T);

template <class T>
struct numeric_limits {
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr int digits = 8 * sizeof(T) - is_signed;
  static constexpr T max() { return is_signed ? T(~(T(1) << (sizeof(T) * 8 - 1))) : T(~T(0)); }
  static constexpr T min() { return is_signed ? T(T(1) << (sizeof(T) * 8 - 1)) : T(0); }
  static constexpr T lowest() { return min(); }
};

#define MSL_FLOAT_LIMITS(T, MAX, MIN, EPSILON)                       \
  template <>                                                        \
  struct numeric_limits<T> {                                         \
    static constexpr bool is_signed = true;                          \
    static constexpr T max() { return (T)MAX; }                      \
    static constexpr T min() { return (T)MIN; }                      \
    static constexpr T lowest() { return (T) - MAX; }                \
    static constexpr T infinity() { return (T)__builtin_inff(); }    \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
    static constexpr T epsilon() { return (T)EPSILON; }              \
  };
MSL_FLOAT_LIMITS(float, 0x1.fffffep127f, 0x1p-126f, 0x1p-23f)
MSL_FLOAT_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f)
MSL_FLOAT_LIMITS(bfloat, 0x1.fep127f, 0x1p-126f, 0x1p-7f)
#undef MSL_FLOAT_LIMITS

}  // namespace metal
