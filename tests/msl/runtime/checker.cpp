// Memory: which accesses are allowed, what is remembered of each byte, how many bytes move.
//
// Kernels are compiled with clang's thread sanitizer, whose hooks are defined here instead of being
// taken from its library. A hook is called before the access it announces.
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#include "runtime.h"

Checker checker;

extern "C" char __ehdr_start[], etext[];  // the linker's: code and constants of the kernel

// ---- threadgroup memory

static constexpr uint64_t ARENA_BYTES = 1 << 20;
static constexpr uint64_t RED_ZONE_BYTES = 64;
static constexpr uint16_t NO_OWNER = 0xffff;

struct Variable {
  uint32_t id;
  uint64_t bytes, offset;
  std::string name;
};
static char* arena;
static uint64_t arena_used;
static std::vector<Variable> variables;
static std::vector<uint16_t> variable_of_byte;
static Cell* arena_cells;

// One declaration can stand for several objects when a template has several instances.
extern "C" void* msl_threadgroup_variable(uint32_t id, uint64_t bytes, uint64_t alignment,
                                          const char* name) {
  for (const Variable& v : variables) {
    if (v.id == id && v.bytes == bytes) return arena + v.offset;
  }
  alignment = std::max<uint64_t>(alignment, 16);
  const uint64_t offset = (arena_used + RED_ZONE_BYTES + alignment - 1) / alignment * alignment;
  if (offset + bytes + RED_ZONE_BYTES > ARENA_BYTES) {
    fault("threadgroup-memory", __builtin_return_address(0), "%s takes %lu bytes", name, bytes);
    abandon();
  }
  std::fill_n(variable_of_byte.begin() + offset, bytes, variables.size());
  variables.push_back({id, bytes, offset, name});
  arena_used = offset + bytes;
  checker.threadgroup_bytes += (bytes + 15) / 16 * 16;
  return arena + offset;
}

// ---- traffic

void Traffic::add(uint64_t offset, uint64_t bytes) {
  total += bytes;
  for (const uint64_t end = offset + bytes; offset < end;) {
    const uint64_t bit = offset % 64, n = std::min(64 - bit, end - offset);
    touched[offset / 64] |= (n == 64 ? ~0ull : (1ull << n) - 1) << bit;
    offset += n;
  }
}

uint64_t Traffic::unique() const {
  uint64_t sum = 0;
  for (uint64_t word : touched) sum += __builtin_popcountll(word);
  return sum;
}

// ---- races and uninitialised reads

enum class Kind { READ, WRITE, ATOMIC_LOAD, ATOMIC_STORE, ATOMIC_UPDATE };

static bool reads(Kind kind) { return kind != Kind::WRITE && kind != Kind::ATOMIC_STORE; }
static bool writes(Kind kind) { return kind != Kind::READ && kind != Kind::ATOMIC_LOAD; }
static bool is_atomic(Kind kind) { return kind != Kind::READ && kind != Kind::WRITE; }

static uint32_t group_of(const Access& a) { return (a.thread - 1) / MAX_THREADS; }
static uint32_t simdgroup_of(const Access& a) { return (a.thread - 1) / MSL_LANES; }

// Whether barriers (or the order within a thread) put `a` before `b`.
static bool is_before(const Access& a, const Access& b) {
  if (!a.thread || a.thread == b.thread) return true;
  if (group_of(a) != group_of(b)) return false;
  if (a.at.epoch < b.at.epoch) return true;
  return simdgroup_of(a) == simdgroup_of(b) && a.at.simd_epoch < b.at.simd_epoch;
}

static void remember_read(Cell& cell, const Access& now) {
  for (Access& read : cell.read) {
    if (is_before(read, now)) {
      read = now;
      return;
    }
  }
  if (simdgroup_of(cell.read[0]) == simdgroup_of(cell.read[1])) cell.read[1] = now;
}

struct Place {
  const char* name;
  bool in_threadgroup, initialised;
};

static void check_byte(Cell& cell, uint64_t offset, Kind kind, const Place& place,
                       const void* site) {
  Access now;
  now.thread = threadgroup_number * MAX_THREADS + current->thread.index + 1;
  now.at = place.in_threadgroup ? current->threadgroup : current->device;
  if (reads(kind) && !cell.write.thread && !place.initialised) {
    fault("uninitialised-read", site, "%s reads byte %lu of %s, which nobody wrote",
          name_of(*current).c_str(), offset, place.name);
  }
  auto check = [&](const Access& earlier, const char* what) {
    if (is_before(earlier, now)) return;
    fault("race", site, "%s %s byte %lu of %s, %s by thread %u of threadgroup %u with no barrier",
          name_of(*current).c_str(), writes(kind) ? "writes" : "reads", offset, place.name, what,
          (earlier.thread - 1) % MAX_THREADS, group_of(earlier));
  };
  if (!(is_atomic(kind) && cell.atomic_write)) check(cell.write, "written");
  if (writes(kind)) {
    for (const Access& read : cell.read) check(read, "read");
    cell.write = now;
    cell.atomic_write = is_atomic(kind);
  } else if (!is_atomic(kind)) {
    remember_read(cell, now);
  }
}

// ---- bounds

[[noreturn]] static void out_of_bounds(const char* address, uint64_t bytes, Kind kind,
                                       const void* site) {
  const char* verb = writes(kind) ? "writes" : "reads";
  const std::string who = name_of(*current);
  if (owner_of_stack(address, false)) {
    fault("out-of-bounds", site, "%s %s the private memory of another thread", who.c_str(), verb);
    abandon();
  }
  const char* nearest = "nothing known";
  int64_t best = INT64_MAX, offset = 0;
  uint64_t size = 0;
  auto consider = [&](const std::string& name, const char* begin, uint64_t n) {
    const int64_t distance = address < begin ? begin - address : address - begin - (int64_t)n;
    if (distance >= best) return;
    best = distance, nearest = name.c_str(), offset = address - begin, size = n;
  };
  for (const Buffer& b : checker.buffers) consider(b.name, b.data, b.bytes);
  for (const Variable& v : variables) consider(v.name, arena + v.offset, v.bytes);
  fault("out-of-bounds", site, "%s %s %lu bytes at byte %ld of %s, which has %lu", who.c_str(),
        verb, bytes, offset, nearest, size);
  abandon();
}

static Buffer* buffer_at(const char* address) {
  static Buffer* last = &checker.buffers[0];
  if (address >= last->data && address < last->data + last->bytes) return last;
  for (Buffer& b : checker.buffers) {
    if (address >= b.data && address < b.data + b.bytes) return last = &b;
  }
  return nullptr;
}

static void check_buffer(char* address, uint64_t bytes, Kind kind, const void* site) {
  Buffer* buffer = buffer_at(address);
  if (!buffer || address + bytes > buffer->data + buffer->bytes) {
    out_of_bounds(address, bytes, kind, site);
  }
  const uint64_t offset = address - buffer->data;
  if (writes(kind) && !buffer->writable) {
    fault("read-only", site, "%s writes byte %lu of the input %s", name_of(*current).c_str(),
          offset, buffer->name.c_str());
    abandon();
  }
  if (reads(kind)) buffer->loaded.add(offset, bytes);
  if (writes(kind)) buffer->stored.add(offset, bytes);
  if (!buffer->writable) return;
  const Place place = {buffer->name.c_str(), false, buffer->initialised};
  for (uint64_t i = offset; i < offset + bytes; i++) {
    check_byte(buffer->cells[i], i, kind, place, site);
  }
}

static void check_threadgroup(char* address, uint64_t bytes, Kind kind, const void* site) {
  const uint64_t at = address - arena;
  const uint16_t owner = variable_of_byte[at];
  if (owner == NO_OWNER || at + bytes > variables[owner].offset + variables[owner].bytes) {
    out_of_bounds(address, bytes, kind, site);
  }
  const Variable& variable = variables[owner];
  const Place place = {variable.name.c_str(), true, false};
  for (uint64_t i = at; i < at + bytes; i++) {
    check_byte(arena_cells[i], i - variable.offset, kind, place, site);
  }
}

static inline void check(const volatile void* pointer, uint64_t bytes, Kind kind,
                         const void* site) {
  last_site = site;
  if (!current || !checker.enabled) return;
  char* address = (char*)pointer;
  if (address >= current->stack && address + bytes <= current->stack + STACK_BYTES) return;
  if (address >= checker.data && address < checker.data + checker.data_bytes) {
    check_buffer(address, bytes, kind, site);
  } else if (address >= arena && address < arena + ARENA_BYTES) {
    check_threadgroup(address, bytes, kind, site);
  } else if (writes(kind) || address < __ehdr_start || address + bytes > etext) {
    out_of_bounds(address, bytes, kind, site);
  }
}

static inline void check_aligned(const void* pointer, uint64_t bytes, Kind kind, const void* site) {
  if (current && (uint64_t)pointer % bytes) {
    fault("misaligned", site, "%s %s %lu bytes at an address that is no multiple of it",
          name_of(*current).c_str(), writes(kind) ? "writes" : "reads", bytes);
    abandon();
  }
  check(pointer, bytes, kind, site);
}

static void* zeroed(uint64_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
              -1, 0);
}

void Checker::start() {
  arena = (char*)zeroed(ARENA_BYTES);
  variable_of_byte.assign(ARENA_BYTES, NO_OWNER);
  if (!enabled) return;
  arena_cells = (Cell*)zeroed(ARENA_BYTES * sizeof(Cell));
  for (Buffer& buffer : buffers) {
    buffer.loaded.reset(buffer.bytes);
    buffer.stored.reset(buffer.bytes);
    // Never empty, since mmap refuses to map nothing.
    if (buffer.writable) buffer.cells = (Cell*)zeroed((buffer.bytes + 1) * sizeof(Cell));
  }
}

// What an earlier threadgroup left is not there for the next: NaN as floating point.
void Checker::new_threadgroup() {
  memset(arena, 0xff, arena_used);
  if (enabled) std::fill_n(arena_cells, arena_used, Cell{});
}

// ---- the compiler's hooks

#define SITE __builtin_return_address(0)
#define HOOKS(N)                                                              \
  void __tsan_read##N(void* p) { check_aligned(p, N, Kind::READ, SITE); }     \
  void __tsan_write##N(void* p) { check_aligned(p, N, Kind::WRITE, SITE); }   \
  void __tsan_unaligned_read##N(void* p) { check(p, N, Kind::READ, SITE); }   \
  void __tsan_unaligned_write##N(void* p) { check(p, N, Kind::WRITE, SITE); } \
  void __tsan_read_write##N(void* p) {                                        \
    check_aligned(p, N, Kind::READ, SITE);                                    \
    check_aligned(p, N, Kind::WRITE, SITE);                                   \
  }                                                                           \
  void __tsan_unaligned_read_write##N(void* p) {                              \
    check(p, N, Kind::READ, SITE);                                            \
    check(p, N, Kind::WRITE, SITE);                                           \
  }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_init() {}
void* __tsan_memcpy(void* to, const void* from, uint64_t bytes) {
  check(from, bytes, Kind::READ, SITE);
  check(to, bytes, Kind::WRITE, SITE);
  return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, uint64_t bytes) {
  check(from, bytes, Kind::READ, SITE);
  check(to, bytes, Kind::WRITE, SITE);
  return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, uint64_t bytes) {
  check(to, bytes, Kind::WRITE, SITE);
  return memset(to, value, bytes);
}

void msl_atomic(const volatile void* address, uint32_t bytes, uint32_t kind, const void* site) {
  check(address, bytes,
        kind == MSL_ATOMIC_LOAD    ? Kind::ATOMIC_LOAD
        : kind == MSL_ATOMIC_STORE ? Kind::ATOMIC_STORE
                                   : Kind::ATOMIC_UPDATE,
        site);
}

void msl_inactive_lane(uint32_t reader, uint32_t source) {
  const Fiber* fiber = fiber_of_lane(reader);
  fault("inactive-lane", fiber->site, "%s reads lane %u, which is not there",
        name_of(*fiber).c_str(), source);
}

void msl_uneven_argument(uint32_t lane) {
  const Fiber* fiber = fiber_of_lane(lane);
  fault("undefined", fiber->site, "%s shuffles by another distance than the lanes before it",
        name_of(*fiber).c_str());
}

void __ubsan_handle_out_of_bounds(void*, void*) {
  fault("out-of-bounds", SITE, "%s indexes past the end of an array", name_of(*current).c_str());
  abandon();
}
void __ubsan_handle_divrem_overflow(void*, void*, void*) {
  fault("undefined", SITE, "%s divides an integer by zero", name_of(*current).c_str());
  abandon();
}
void __ubsan_handle_shift_out_of_bounds(void*, void*, void*) {
  fault("undefined", SITE, "%s shifts by more bits than there are", name_of(*current).c_str());
}
void __ubsan_handle_float_cast_overflow(void*, void*) {
  fault("undefined", SITE, "%s casts a number that the integer cannot hold",
        name_of(*current).c_str());
}
}
