// One dispatch: reads the job from stdin, runs the kernel, answers on stdout.
//
// The arrays lie in a file that both sides map. Job, one item a line:
//   data FD BYTES | grid X Y Z | threadgroup X Y Z | check 0/1 | order NAME | limit SECONDS
//   buffer OFFSET BYTES FIRST WRITABLE INITIALISED NAME
//     (one for each pointer of the kernel, in their order; it points at byte FIRST)
// Answer, fields separated by tabs:
//   fault KIND SITE LAST_SITE MESSAGE | threadgroup BYTES | end COMPLETE
//   buffer INDEX LOADED LOADED_UNIQUE STORED STORED_UNIQUE
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"

static uint64_t pages(uint64_t bytes) { return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

// Only the pages of buffers can be touched at all, and those of inputs only read.
static void protect_buffers() {
  mprotect(checker.data, checker.data_bytes, PROT_NONE);
  for (const Buffer& buffer : checker.buffers) {
    mprotect(buffer.data, pages(buffer.bytes), PROT_READ | (buffer.writable ? PROT_WRITE : 0));
  }
}

static bool read_job(Job& job, std::vector<void*>& arguments) {
  char key[16], name[256];
  unsigned limit_s = 0;
  while (scanf("%15s", key) == 1) {
    const std::string item = key;
    if (item == "data") {
      int fd;
      if (scanf("%d %" SCNu64, &fd, &checker.data_bytes) != 2) return false;
      checker.data =
          (char*)mmap(nullptr, checker.data_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (checker.data == MAP_FAILED) return false;
    } else if (item == "grid" || item == "threadgroup") {
      uint32_t* size = item == "grid" ? job.grid : job.threadgroup;
      if (scanf("%u %u %u", size, size + 1, size + 2) != 3) return false;
    } else if (item == "check") {
      int enabled;
      if (scanf("%d", &enabled) != 1) return false;
      checker.enabled = enabled;
    } else if (item == "order") {
      if (scanf("%15s", name) != 1) return false;
      job.order = !strcmp(name, "forward")   ? Order::FORWARD
                  : !strcmp(name, "reverse") ? Order::REVERSE
                                             : Order::RANDOM;
    } else if (item == "limit") {
      if (scanf("%u", &limit_s) != 1) return false;
    } else if (item == "buffer") {
      uint64_t offset, bytes, first;
      int writable, initialised;
      if (scanf("%" SCNu64 " %" SCNu64 " %" SCNu64 " %d %d %255s", &offset, &bytes, &first,
                &writable, &initialised, name) != 6) {
        return false;
      }
      Buffer buffer;
      buffer.name = name;
      buffer.data = checker.data + offset;
      buffer.bytes = bytes;
      buffer.writable = writable;
      buffer.initialised = initialised;
      checker.buffers.push_back(buffer);
      arguments.push_back(buffer.data + first);
    } else {
      return false;
    }
  }
  catch_signals(limit_s);
  return !checker.buffers.empty();
}

int main() {
  Job job;
  std::vector<void*> arguments;
  if (!read_job(job, arguments)) {
    fprintf(stderr, "the job is not understood\n");
    return 2;
  }
  protect_buffers();
  checker.start();
  const bool complete = dispatch(job, arguments.data());
  for (size_t i = 0; i < checker.buffers.size(); i++) {
    const Buffer& b = checker.buffers[i];
    answer("buffer\t%zu\t%lu\t%lu\t%lu\t%lu", i, b.loaded.total, b.loaded.unique(), b.stored.total,
           b.stored.unique());
  }
  answer("threadgroup\t%lu", checker.threadgroup_bytes);
  answer("end\t%d", complete);
  return 0;
}
