// Threads of a threadgroup as fibers: each runs until a barrier or a simd operation.
//
// Threadgroups run one after another. A simd operation completes when the lanes have met at one
// place; a threadgroup barrier when all threads wait at one place.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "runtime.h"

Fiber* current = nullptr;
uint32_t threadgroup_number = 0;

static std::vector<Fiber> fibers;
static uint32_t threads;            // of the threadgroup that runs
static uint32_t meeting_simdgroup;  // whose lanes a combine function works on
static Order order;
static std::mt19937 random_numbers;
static void* const* kernel_buffers;
static void* scheduler_stack_pointer;
static bool abandoned;

extern "C" void msl_switch(void** save, void* to);
// Saves the registers that a call must preserve, changes stacks and restores them.
asm(R"(
.text
.globl msl_switch
.type msl_switch, @function
msl_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

static void wait_in_scheduler() { msl_switch(&current->stack_pointer, scheduler_stack_pointer); }

static void resume(Fiber& fiber) {
  current = &fiber;
  msl_switch(&scheduler_stack_pointer, fiber.stack_pointer);
  current = nullptr;
}

void abandon() {
  abandoned = true;
  wait_in_scheduler();
  __builtin_unreachable();
}

std::string name_of(const Fiber& fiber) {
  const msl_uint3 p = fiber.thread.position_in_threadgroup, g = fiber.thread.threadgroup_position;
  char name[96];
  snprintf(name, sizeof name, "thread (%u,%u,%u) of threadgroup (%u,%u,%u)", p.x, p.y, p.z, g.x,
           g.y, g.z);
  return name;
}

const Fiber* owner_of_stack(const void* address, bool guard_pages) {
  for (const Fiber& fiber : fibers) {
    const char* begin = fiber.stack - (guard_pages ? PAGE_BYTES : 0);
    if (address >= begin && address < fiber.stack + STACK_BYTES) return &fiber;
  }
  return nullptr;
}

const Fiber* fiber_of_lane(uint32_t lane) { return &fibers[meeting_simdgroup * MSL_LANES + lane]; }

// ---- what a thread calls

extern "C" {
void msl_threadgroup_barrier(uint32_t fences) {
  current->site = __builtin_return_address(0);
  current->fences = fences;
  current->state = State::AT_BARRIER;
  wait_in_scheduler();
}

void msl_simdgroup_barrier(uint32_t fences) {
  current->fences = fences;
  msl_simd(nullptr, nullptr, __builtin_return_address(0));
}

void msl_simd(void* operand, msl_combine combine, const void* site) {
  current->site = site;
  current->operand = operand;
  current->combine = combine;
  current->state = State::AT_SIMD;
  wait_in_scheduler();
}

uint32_t msl_lane() { return current->thread.lane; }

void msl_multiply_accumulate(void* const* operands, uint32_t active) {
  if (active != MSL_ALL_LANES) return;  // reported as divergent by the scheduler
  typedef float Row __attribute__((ext_vector_type(8)));
  Row a[8], b[8], c[8];
  auto for_each_element = [&](auto visit) {
    for (uint32_t lane = 0; lane < MSL_LANES; lane++) {
      const uint32_t row = (lane / 4 & 4) + lane / 2 % 4,
                     column = (lane / 4 & 2) * 2 + lane % 2 * 2;
      msl_fragments& own = *(msl_fragments*)operands[lane];
      for (uint32_t i = 0; i < 2; i++) visit(own, i, row, column + i);
    }
  };
  for_each_element([&](msl_fragments& own, uint32_t i, uint32_t row, uint32_t column) {
    a[row][column] = own.a[i];
    b[row][column] = own.b[i];
    c[row][column] = own.c[i];
  });
  for (int k = 0; k < 8; k++) {
    for (int row = 0; row < 8; row++) c[row] += a[row][k] * b[k];
  }
  for_each_element([&](msl_fragments& own, uint32_t i, uint32_t row, uint32_t column) {
    own.c[i] = c[row][column];
  });
}
}

// ---- the scheduler

// Completes a simd operation or a simdgroup barrier for the lanes that wait for it.
static void complete_simd(Fiber* begin, Fiber* end, const void* site, msl_combine combine) {
  void* operands[MSL_LANES] = {};
  uint32_t active = 0;
  for (Fiber* fiber = begin; fiber < end; fiber++) {
    if (fiber->state != State::AT_SIMD || fiber->site != site || fiber->combine != combine)
      continue;
    const uint32_t lane = fiber - begin;
    operands[lane] = fiber->operand;
    active |= 1u << lane;
    fiber->state = State::READY;
    if (combine) continue;
    if (fiber->fences & MSL_FENCE_DEVICE) fiber->device.simd_epoch++;
    if (fiber->fences & MSL_FENCE_THREADGROUP) fiber->threadgroup.simd_epoch++;
  }
  if (__builtin_popcount(active) != end - begin) {
    fault("divergent-simd", site, "only lanes %08x of the simdgroup of %s reach it", active,
          name_of(*begin).c_str());
  }
  meeting_simdgroup = begin->thread.simdgroup;
  if (combine) combine(operands, active);
}

// Runs the lanes until each is done or waits at a threadgroup barrier.
static void run_simdgroup(Fiber* begin, Fiber* end) {
  const uint32_t lanes = end - begin;
  for (;;) {
    const uint32_t start = order == Order::RANDOM ? random_numbers() % lanes : 0;
    for (uint32_t i = 0; i < lanes; i++) {
      Fiber& fiber = begin[order == Order::REVERSE ? lanes - 1 - i : (start + i) % lanes];
      if (fiber.state == State::READY) resume(fiber);
      if (abandoned) return;
    }
    // Lanes that went separate ways meet in the order of the code.
    Fiber* first = nullptr;
    for (Fiber* fiber = begin; fiber < end; fiber++) {
      if (fiber->state == State::AT_SIMD && (!first || fiber->site < first->site)) first = fiber;
    }
    if (!first) return;
    complete_simd(begin, end, first->site, first->combine);
  }
}

// Releases the threads from their barrier; false when there is none or not all of them wait there.
static bool complete_barrier() {
  const Fiber *waiting = nullptr, *done = nullptr;
  for (uint32_t i = 0; i < threads; i++) {
    const Fiber& fiber = fibers[i];
    (fiber.state == State::DONE ? done : waiting) = &fiber;
  }
  if (!waiting) return false;
  if (done) {
    fault("divergent-barrier", waiting->site, "%s waits at the barrier, %s has returned",
          name_of(*waiting).c_str(), name_of(*done).c_str());
    abandoned = true;
    return false;
  }
  for (uint32_t i = 0; i < threads; i++) {
    if (fibers[i].site == waiting->site) continue;
    fault("divergent-barrier", waiting->site, "%s waits at the barrier, %s at another",
          name_of(*waiting).c_str(), name_of(fibers[i]).c_str());
    abandoned = true;
    return false;
  }
  for (uint32_t i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.state = State::READY;
    if (fiber.fences & MSL_FENCE_DEVICE) fiber.device.epoch++;
    if (fiber.fences & MSL_FENCE_THREADGROUP) fiber.threadgroup.epoch++;
  }
  return true;
}

static void run_threadgroup() {
  const uint32_t simdgroups = (threads + MSL_LANES - 1) / MSL_LANES;
  do {
    for (uint32_t i = 0; i < simdgroups; i++) {
      const uint32_t simdgroup = order == Order::REVERSE ? simdgroups - 1 - i : i;
      const uint32_t begin = simdgroup * MSL_LANES, end = std::min(threads, begin + MSL_LANES);
      run_simdgroup(&fibers[begin], &fibers[0] + end);
      if (abandoned) return;
    }
  } while (complete_barrier());
}

static void run_kernel() {
  msl_entry(kernel_buffers, &current->thread);
  current->state = State::DONE;
  wait_in_scheduler();
}

static void prepare(Fiber& fiber) {
  fiber.state = State::READY;
  fiber.device = fiber.threadgroup = Clock{};
  // Stacks begin at different offsets, or all lanes would share the same few lines of the cache.
  const uint64_t stagger = fiber.thread.lane * 5 * 64;
  void** top = (void**)(fiber.stack + STACK_BYTES - 64 - stagger);
  *--top = nullptr;  // keeps the stack aligned as after a call
  *--top = (void*)run_kernel;
  for (int i = 0; i < 6; i++) *--top = nullptr;  // the registers that msl_switch restores
  fiber.stack_pointer = top;
}

static void start_threadgroup(const Job& job, const uint32_t groups[3]) {
  const uint32_t number = threadgroup_number;
  const uint32_t group[3] = {number % groups[0], number / groups[0] % groups[1],
                             number / groups[0] / groups[1]};
  uint32_t size[3], first[3];
  for (int i = 0; i < 3; i++) {
    first[i] = group[i] * job.threadgroup[i];
    size[i] = std::min(job.threadgroup[i], job.grid[i] - first[i]);
  }
  threads = size[0] * size[1] * size[2];
  for (uint32_t i = 0; i < threads; i++) {
    const uint32_t x = i % size[0], y = i / size[0] % size[1], z = i / size[0] / size[1];
    msl_thread& thread = fibers[i].thread;
    thread.position_in_grid = {first[0] + x, first[1] + y, first[2] + z};
    thread.threadgroup_position = {group[0], group[1], group[2]};
    thread.position_in_threadgroup = {x, y, z};
    thread.threads_per_grid = {job.grid[0], job.grid[1], job.grid[2]};
    thread.threadgroups_per_grid = {groups[0], groups[1], groups[2]};
    thread.threads_per_threadgroup = {size[0], size[1], size[2]};
    thread.dispatched_threadgroup = {job.threadgroup[0], job.threadgroup[1], job.threadgroup[2]};
    thread.index = i;
    thread.threads = threads;
    thread.lane = i % MSL_LANES;
    thread.simdgroup = i / MSL_LANES;
    thread.simdgroups = (threads + MSL_LANES - 1) / MSL_LANES;
    prepare(fibers[i]);
  }
}

static void make_fibers(uint32_t count) {
  const uint64_t stride = STACK_BYTES + PAGE_BYTES;
  char* stacks = (char*)mmap(nullptr, count * stride, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  fibers.resize(count);
  for (uint32_t i = 0; i < count; i++) {
    mprotect(stacks + i * stride, PAGE_BYTES, PROT_NONE);
    fibers[i].stack = stacks + i * stride + PAGE_BYTES;
  }
}

bool dispatch(const Job& job, void* const* buffers) {
  kernel_buffers = buffers;
  order = job.order;
  make_fibers(job.threadgroup[0] * job.threadgroup[1] * job.threadgroup[2]);
  uint32_t groups[3];
  for (int i = 0; i < 3; i++) {
    groups[i] = (job.grid[i] + job.threadgroup[i] - 1) / job.threadgroup[i];
  }
  std::vector<uint32_t> numbers(groups[0] * groups[1] * groups[2]);
  std::iota(numbers.begin(), numbers.end(), 0);
  if (order == Order::REVERSE) std::reverse(numbers.begin(), numbers.end());
  if (order == Order::RANDOM) std::shuffle(numbers.begin(), numbers.end(), random_numbers);
  for (uint32_t number : numbers) {
    threadgroup_number = number;
    checker.new_threadgroup();
    start_threadgroup(job, groups);
    run_threadgroup();
    if (abandoned) return false;
  }
  return true;
}
