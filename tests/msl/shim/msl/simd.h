// metal_simdgroup and metal_quadgroup.
//
// Each function hands its operand to the runtime, which runs the lambda once for the simdgroup when
// the lanes have met. The order of a sum is a tree over all lanes; hardware may use another.
#pragma once
#include "memory.h"

namespace msl {

template <class T>
struct lanes_of {
  void* const* operands;
  uint32_t active;

  bool has(uint32_t lane) const { return lane < MSL_LANES && (active >> lane & 1); }
  T& operator[](uint32_t lane) const { return *(T*)operands[lane]; }
};

template <class T>
constexpr void require_simd_type() {
  static_assert(sizeof(element<T>) <= 4 && !__is_same(element<T>, bool),
                "simd functions take arithmetic types of at most 32 bits");
}

// Folds lanes [first, first + count) pairwise and gives every one of them the result.
template <class T, class F>
MSL_UNCHECKED inline void fold(lanes_of<T> lanes, uint32_t first, uint32_t count, F f) {
  T value[MSL_LANES];
  bool has[MSL_LANES];
  for (uint32_t i = 0; i < count; i++) {
    has[i] = lanes.has(first + i);
    value[i] = has[i] ? lanes[first + i] : T();
  }
  for (uint32_t step = count / 2; step; step /= 2) {
    for (uint32_t i = 0; i < step; i++) {
      if (!has[i + step]) continue;
      value[i] = has[i] ? T(f(value[i], value[i + step])) : value[i + step];
      has[i] = true;
    }
  }
  for (uint32_t i = 0; i < count; i++) {
    if (lanes.has(first + i)) lanes[first + i] = value[0];
  }
}

// Every active lane receives the value of the lane it names. Most functions want one argument, such
// as a distance, that is the same in all lanes.
template <class T>
struct shuffled {
  T value;
  uint32_t source, even_argument;
};
template <class T>
MSL_UNCHECKED inline void shuffle(void* const* operands, uint32_t active) {
  lanes_of<shuffled<T>> lanes{operands, active};
  T value[MSL_LANES];
  for (uint32_t i = 0; i < MSL_LANES; i++) {
    if (!lanes.has(i)) continue;
    const uint32_t source = lanes[i].source;
    if (!lanes.has(source)) msl_inactive_lane(i, source);
    if (lanes[i].even_argument != lanes[__builtin_ctz(active)].even_argument) {
      msl_uneven_argument(i);
    }
    value[i] = lanes.has(source) ? lanes[source].value : lanes[i].value;
  }
  for (uint32_t i = 0; i < MSL_LANES; i++) {
    if (lanes.has(i)) lanes[i].value = value[i];
  }
}
template <class T>
inline __attribute__((always_inline)) T shuffle_from(T x, uint32_t source, uint32_t even_argument,
                                                     const void* site) {
  require_simd_type<T>();
  shuffled<T> operand{x, source, even_argument};
  msl_simd(&operand, shuffle<T>, site);
  return operand.value;
}

struct vote {
  bool value;
  uint64_t ballot;
};

}  // namespace msl

namespace metal {

#define MSL_REDUCTION(name, f)                                                  \
  template <class T>                                                            \
  MSL_SITED T simd_##name(T x) {                                                \
    msl::require_simd_type<T>();                                                \
    auto all_lanes = [](void* const* operands, uint32_t active) MSL_UNCHECKED { \
      auto combine = [](T a, T b) MSL_UNCHECKED { return f; };                  \
      msl::fold<T>({operands, active}, 0, MSL_LANES, combine);                  \
    };                                                                          \
    msl_simd(&x, all_lanes, MSL_SITE);                                          \
    return x;                                                                   \
  }                                                                             \
  template <class T>                                                            \
  MSL_SITED T quad_##name(T x) {                                                \
    msl::require_simd_type<T>();                                                \
    auto by_quads = [](void* const* operands, uint32_t active) MSL_UNCHECKED {  \
      auto combine = [](T a, T b) MSL_UNCHECKED { return f; };                  \
      for (uint32_t i = 0; i < MSL_LANES; i += 4) {                             \
        msl::fold<T>({operands, active}, i, 4, combine);                        \
      }                                                                         \
    };                                                                          \
    msl_simd(&x, by_quads, MSL_SITE);                                           \
    return x;                                                                   \
  }
MSL_REDUCTION(sum, a + b)
MSL_REDUCTION(product, a* b)
MSL_REDUCTION(min, min(a, b))
MSL_REDUCTION(max, max(a, b))
MSL_REDUCTION(and, a& b)
MSL_REDUCTION(or, a | b)
MSL_REDUCTION(xor, a ^ b)
#undef MSL_REDUCTION

#define MSL_PREFIX(name, first, f)                                         \
  template <class T>                                                       \
  MSL_SITED T simd_prefix_##name(T x) {                                    \
    msl::require_simd_type<T>();                                           \
    auto scan = [](void* const* operands, uint32_t active) MSL_UNCHECKED { \
      msl::lanes_of<T> lanes{operands, active};                            \
      T before = T(first);                                                 \
      for (uint32_t i = 0; i < MSL_LANES; i++) {                           \
        if (!lanes.has(i)) continue;                                       \
        const T own = lanes[i], with_own = T(f);                           \
        lanes[i] = INCLUSIVE ? with_own : before;                          \
        before = with_own;                                                 \
      }                                                                    \
    };                                                                     \
    msl_simd(&x, scan, MSL_SITE);                                          \
    return x;                                                              \
  }
#define INCLUSIVE true
MSL_PREFIX(inclusive_sum, 0, before + own)
MSL_PREFIX(inclusive_product, 1, before* own)
#undef INCLUSIVE
#define INCLUSIVE false
MSL_PREFIX(exclusive_sum, 0, before + own)
MSL_PREFIX(exclusive_product, 1, before* own)
#undef INCLUSIVE
#undef MSL_PREFIX

// `self` is the lane that asks, `n` the argument; in some functions it may differ by lane.
#define MSL_SHUFFLE(name, even_argument, source)                  \
  template <class T>                                              \
  MSL_SITED T name(T x, ushort n) {                               \
    const uint32_t self = msl_lane();                             \
    return msl::shuffle_from(x, source, even_argument, MSL_SITE); \
  }
MSL_SHUFFLE(simd_broadcast, n, n)
MSL_SHUFFLE(simd_shuffle, 0, (self, n))
MSL_SHUFFLE(simd_shuffle_xor, n, self ^ n)
// Lanes that would read past the end keep their value.
MSL_SHUFFLE(simd_shuffle_down, n, self + n < MSL_LANES ? self + n : self)
MSL_SHUFFLE(simd_shuffle_up, n, self >= n ? self - n : self)
MSL_SHUFFLE(simd_shuffle_rotate_down, n, (self + n) % MSL_LANES)
MSL_SHUFFLE(simd_shuffle_rotate_up, n, (self + MSL_LANES - n) % MSL_LANES)
MSL_SHUFFLE(quad_broadcast, 0, (self & ~3u) + n)
MSL_SHUFFLE(quad_shuffle, 0, (self & ~3u) + n)
MSL_SHUFFLE(quad_shuffle_xor, 0, (self & ~3u) + ((self & 3) ^ n))
MSL_SHUFFLE(quad_shuffle_down, 0, (self & 3) + n < 4 ? self + n : self)
MSL_SHUFFLE(quad_shuffle_up, 0, (self & 3) >= n ? self - n : self)
#undef MSL_SHUFFLE

template <class T>
MSL_SITED T simd_shuffle_and_fill_down(T x, T filling, ushort n) {
  const uint32_t self = msl_lane(), source = self + n;
  const T shifted = msl::shuffle_from(x, source < MSL_LANES ? source : self, n, MSL_SITE);
  const T filled = msl::shuffle_from(filling, source % MSL_LANES, n, MSL_SITE);
  return source < MSL_LANES ? shifted : filled;
}
template <class T>
MSL_SITED T simd_shuffle_and_fill_up(T x, T filling, ushort n) {
  const uint32_t self = msl_lane();
  const T shifted = msl::shuffle_from(x, self >= n ? self - n : self, n, MSL_SITE);
  const T filled = msl::shuffle_from(filling, (self + MSL_LANES - n) % MSL_LANES, n, MSL_SITE);
  return self >= n ? shifted : filled;
}

struct simd_vote {
  ulong bits;
  explicit constexpr operator ulong() const { return bits; }
  bool all() const { return bits == MSL_ALL_LANES; }
  bool any() const { return bits != 0; }
};
MSL_SITED simd_vote simd_ballot(bool condition) {
  msl::vote operand{condition, 0};
  auto count = [](void* const* operands, uint32_t active) MSL_UNCHECKED {
    msl::lanes_of<msl::vote> lanes{operands, active};
    uint64_t ballot = 0;
    for (uint32_t i = 0; i < MSL_LANES; i++)
      ballot |= uint64_t(lanes.has(i) && lanes[i].value) << i;
    for (uint32_t i = 0; i < MSL_LANES; i++) {
      if (lanes.has(i)) lanes[i].ballot = ballot;
    }
  };
  msl_simd(&operand, count, MSL_SITE);
  return {operand.ballot};
}
METAL_FUNC bool simd_any(bool condition) { return simd_ballot(condition).bits != 0; }
METAL_FUNC bool simd_all(bool condition) { return simd_ballot(!condition).bits == 0; }
METAL_FUNC simd_vote simd_active_threads_mask() { return simd_ballot(true); }
METAL_FUNC bool simd_is_first() {
  return (uint)__builtin_ctzl(simd_ballot(true).bits) == msl_lane();
}

template <class T>
MSL_SITED T simd_broadcast_first(T x) {
  auto first = [](void* const* operands, uint32_t active) MSL_UNCHECKED {
    msl::lanes_of<T> lanes{operands, active};
    for (uint32_t i = 0; i < MSL_LANES; i++) {
      if (lanes.has(i)) lanes[i] = lanes[__builtin_ctz(active)];
    }
  };
  msl_simd(&x, first, MSL_SITE);
  return x;
}

}  // namespace metal
