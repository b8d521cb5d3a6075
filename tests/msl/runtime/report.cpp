// The answer to the job: faults as they happen, and signals turned into faults.
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <set>

#include "runtime.h"

static constexpr int MAX_FAULTS = 8;
const void* last_site = nullptr;
static int faults = 0;
static std::set<std::pair<std::string, const void*>> seen;

static void answer_line(const char* prefix, const char* format, va_list arguments) {
  char line[1024];
  int n = snprintf(line, sizeof line, "%s", prefix);
  n += vsnprintf(line + n, sizeof line - n - 1, format, arguments);
  if (n > (int)sizeof line - 2) n = sizeof line - 2;
  line[n] = '\n';
  for (const char *at = line, *end = line + n + 1; at < end;) {
    const ssize_t written = write(1, at, end - at);
    if (written <= 0) _exit(4);
    at += written;
  }
}

void answer(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  answer_line("", format, arguments);
  va_end(arguments);
}

void fault(const char* kind, const void* site, const char* format, ...) {
  if (!seen.insert({kind, site}).second || ++faults > MAX_FAULTS) return;
  char prefix[128];
  snprintf(prefix, sizeof prefix, "fault\t%s\t%lx\t%lx\t", kind, (uint64_t)site,
           (uint64_t)last_site);
  va_list arguments;
  va_start(arguments, format);
  answer_line(prefix, format, arguments);
  va_end(arguments);
}

static void on_signal(int signal, siginfo_t* info, void* context) {
  // A site is the address behind an instruction.
  const void* site = (const char*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1;
  const std::string who = current ? name_of(*current) : "the scheduler";
  if (signal == SIGALRM) {
    fault("spin", site, "%s does not come to an end", who.c_str());
  } else if (signal == SIGSEGV && owner_of_stack(info->si_addr, true)) {
    fault("crash", site, "private memory of %s exceeds %lu bytes", who.c_str(), STACK_BYTES);
  } else {
    fault("crash", site, "%s in %s", strsignal(signal), who.c_str());
  }
  _exit(3);
}

void catch_signals(unsigned limit_s) {
  // The signal may come from a thread whose own stack is exhausted.
  stack_t stack = {};
  stack.ss_size = 1 << 16;
  stack.ss_sp =
      mmap(nullptr, stack.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM}) sigaction(signal, &action, nullptr);
  alarm(limit_s);
}
