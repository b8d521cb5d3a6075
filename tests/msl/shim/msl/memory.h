// Threadgroup variables, barriers and atomics.
#pragma once
#include "traits.h"

#define MSL_SITE __builtin_return_address(0)
// The site is the caller's address, so the function may not be inlined.
#define MSL_SITED inline __attribute__((noinline, convergent)) MSL_UNCHECKED

namespace msl {

// The rewritten form of a declaration in threadgroup memory: one object for the whole threadgroup.
template <class T>
inline __attribute__((always_inline)) T* threadgroup_variable(uint32_t id, const char* name) {
  return (T*)msl_threadgroup_variable(id, sizeof(T), alignof(T), name);
}

}  // namespace msl

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = MSL_FENCE_DEVICE,
  mem_threadgroup = MSL_FENCE_THREADGROUP,
  mem_texture = 4,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

METAL_FUNC void threadgroup_barrier(mem_flags flags) { msl_threadgroup_barrier((uint)flags); }
METAL_FUNC void simdgroup_barrier(mem_flags flags) { msl_simdgroup_barrier((uint)flags); }

// Threads take turns only at barriers and simd operations, so plain accesses are atomic.
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;

template <class T>
MSL_SITED T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  msl_atomic(object, sizeof(T), MSL_ATOMIC_LOAD, MSL_SITE);
  return object->value;
}
template <class T>
MSL_SITED void atomic_store_explicit(volatile atomic<T>* object, remove_cv_t<T> x, memory_order) {
  msl_atomic(object, sizeof(T), MSL_ATOMIC_STORE, MSL_SITE);
  object->value = x;
}

#define MSL_ATOMIC(name, INTEGERS_ONLY, update)                                              \
  template <class T>                                                                         \
  MSL_SITED T atomic_##name##_explicit(volatile atomic<T>* object, remove_cv_t<T> x,         \
                                       memory_order) {                                       \
    static_assert(!INTEGERS_ONLY || is_integral_v<T>, "Metal has this atomic for integers"); \
    msl_atomic(object, sizeof(T), MSL_ATOMIC_UPDATE, MSL_SITE);                              \
    T old = object->value;                                                                   \
    object->value = (T)(update);                                                             \
    return old;                                                                              \
  }
MSL_ATOMIC(exchange, false, x)
MSL_ATOMIC(fetch_add, false, old + x)
MSL_ATOMIC(fetch_sub, false, old - x)
MSL_ATOMIC(fetch_min, true, x < old ? x : old)
MSL_ATOMIC(fetch_max, true, x > old ? x : old)
MSL_ATOMIC(fetch_and, true, old& x)
MSL_ATOMIC(fetch_or, true, old | x)
MSL_ATOMIC(fetch_xor, true, old ^ x)
#undef MSL_ATOMIC

template <class T>
MSL_SITED bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected,
                                                     remove_cv_t<T> desired, memory_order,
                                                     memory_order) {
  msl_atomic(object, sizeof(T), MSL_ATOMIC_UPDATE, MSL_SITE);
  T old = object->value;
  if (old == *expected) {
    object->value = desired;
    return true;
  }
  *expected = old;
  return false;
}

}  // namespace metal
