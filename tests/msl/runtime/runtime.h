// The parts of the runtime: faults (report.cpp), memory (checker.cpp), threads (scheduler.cpp).
#pragma once
#include <stdint.h>

#include <string>
#include <vector>

#include "abi.h"

constexpr uint32_t MAX_THREADS = 1024;
constexpr uint64_t STACK_BYTES = 64 << 10;
constexpr uint64_t PAGE_BYTES = 4096;

// ---- report.cpp

// One line of the answer on stdout: fields separated by tabs.
__attribute__((format(printf, 1, 2))) void answer(const char* format, ...);
// Reports each kind of fault once for a site, and at most a handful in all.
__attribute__((format(printf, 3, 4))) void fault(const char* kind, const void* site,
                                                 const char* format, ...);
// Where the kernel last called the runtime: says more than a site outside the kernel's source.
extern const void* last_site;
// Turns signals (crash, time limit) into a fault and the end of the process.
void catch_signals(unsigned limit_s);

// ---- checker.cpp

// Which bytes of a buffer were touched, and how often in all.
struct Traffic {
  uint64_t total = 0;
  std::vector<uint64_t> touched;

  void reset(uint64_t bytes) { touched.assign(bytes / 64 + 2, 0); }
  void add(uint64_t offset, uint64_t bytes);
  uint64_t unique() const;
};

// A position in the order that barriers give: `epoch` counts the threadgroup barriers that fence
// the memory in question, `simd_epoch` the simdgroup barriers.
struct Clock {
  uint32_t epoch = 0, simd_epoch = 0;
};

struct Access {
  uint32_t thread = 0;  // 1 + threadgroup * MAX_THREADS + index in it; 0: none
  Clock at;
};

// What is remembered of a byte. Two reads suffice: they are kept in different simdgroups where
// possible, so that any write which races with a forgotten read races with a kept one.
struct Cell {
  Access write, read[2];
  bool atomic_write = false;
};

struct Buffer {
  std::string name;
  char* data;
  uint64_t bytes;
  bool writable, initialised;
  Traffic loaded, stored;
  Cell* cells = nullptr;  // one a byte, if it is writable
};

struct Checker {
  bool enabled = false;
  char* data = nullptr;  // the mapping that holds all buffers
  uint64_t data_bytes = 0;
  std::vector<Buffer> buffers;
  uint64_t threadgroup_bytes = 0;  // of the variables declared so far

  void start();
  void new_threadgroup();
};
extern Checker checker;

// ---- scheduler.cpp

enum class State { READY, AT_SIMD, AT_BARRIER, DONE };

struct Fiber {
  void* stack_pointer;
  State state;
  uint32_t fences;
  const void* site;     // where it waits
  msl_combine combine;  // for what simd operation; null: a simdgroup barrier
  void* operand;
  Clock device, threadgroup;
  char* stack;
  msl_thread thread;
};

enum class Order { FORWARD, REVERSE, RANDOM };

struct Job {
  uint32_t grid[3], threadgroup[3];
  Order order;
};

// The thread that runs; null while the scheduler does.
extern Fiber* current;
extern uint32_t threadgroup_number;
// Runs every threadgroup; false if a fault made going on pointless.
bool dispatch(const Job& job, void* const* buffers);
// Ends the dispatch from within a thread.
[[noreturn]] void abandon();
// "thread (x,y,z) of threadgroup (x,y,z)"
std::string name_of(const Fiber& fiber);
// The fiber in whose stack or guard page the address lies.
const Fiber* owner_of_stack(const void* address, bool guard_pages);
const Fiber* fiber_of_lane(uint32_t lane);
