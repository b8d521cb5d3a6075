// What a compiled kernel and the runtime know of each other. Included by both.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Metal's uint3 takes 16 bytes.
struct alignas(16) msl_uint3 {
  uint32_t x, y, z;
};

// The thread attributes that a kernel can ask for.
struct msl_thread {
  msl_uint3 position_in_grid, threadgroup_position, position_in_threadgroup;
  msl_uint3 threads_per_grid, threadgroups_per_grid;
  msl_uint3 threads_per_threadgroup;  // smaller in the last threadgroups of a grid
  msl_uint3 dispatched_threadgroup;   // as asked for
  uint32_t index, threads;            // in the threadgroup
  uint32_t lane, simdgroup, simdgroups;
};

enum : uint32_t { MSL_LANES = 32, MSL_ALL_LANES = 0xffffffff };
enum : uint32_t { MSL_FENCE_DEVICE = 1, MSL_FENCE_THREADGROUP = 2 };
enum : uint32_t { MSL_ATOMIC_LOAD = 1, MSL_ATOMIC_STORE = 2, MSL_ATOMIC_UPDATE = 3 };

// Run once for a simdgroup when its lanes have met: sees every lane's operand (null where the lane
// is not active) and leaves each lane's result in it.
typedef void (*msl_combine)(void* const* operands, uint32_t active);

// One lane's share of d = a * b + c over 8 x 8 matrices; d replaces c.
struct msl_fragments {
  float a[2], b[2], c[2];
};

extern "C" {
// Defined by the kernel's translation unit.
void msl_entry(void* const* buffers, const msl_thread* thread);

// Defined by the runtime. A site is an address in the kernel that names the place in a report.
__attribute__((convergent)) void msl_threadgroup_barrier(uint32_t fences);
__attribute__((convergent)) void msl_simdgroup_barrier(uint32_t fences);
__attribute__((convergent)) void msl_simd(void* operand, msl_combine combine, const void* site);
void msl_multiply_accumulate(void* const* operands, uint32_t active);
void msl_inactive_lane(uint32_t reader, uint32_t source);
void msl_uneven_argument(uint32_t lane);
void msl_atomic(const volatile void* address, uint32_t bytes, uint32_t kind, const void* site);
void* msl_threadgroup_variable(uint32_t id, uint64_t bytes, uint64_t alignment, const char* name);
uint32_t msl_lane();
}
