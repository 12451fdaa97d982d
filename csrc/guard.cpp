#include "guard.h"

#include <signal.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>

namespace kvtier {
namespace {

struct Mapping {
  std::atomic<bool> taken{false};
  std::atomic<uintptr_t> begin{0};  // 0: not guarded
  std::atomic<size_t> nbytes{0};
  std::atomic<bool> replaced{false};
};

// The handler may look at them at any moment, so that they never move. A process has one for each arena.
std::array<Mapping, 64> mappings;
struct sigaction former;  // what handled the signal before

// Only calls that are safe in a signal handler, on the thread whose access failed.
bool replace(uintptr_t at) {
  for (Mapping& each : mappings) {
    const uintptr_t begin = each.begin.load();
    const size_t nbytes = each.nbytes.load();
    if (!begin || at < begin || at - begin >= nbytes) continue;
    each.replaced.store(true);  // before anybody can read a zero
    const int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return mmap(reinterpret_cast<void*>(begin), nbytes, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED;
  }
  return false;
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const bool sent = info->si_code <= 0;  // by a process, and not by an access
  if (sent || !replace(reinterpret_cast<uintptr_t>(info->si_addr))) {
    if (former.sa_flags & SA_SIGINFO) {
      former.sa_sigaction(number, info, context);
    } else if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) {
      former.sa_handler(number);
    } else {
      sigaction(number, &former, nullptr);  // and the access fails again
      if (sent) raise(number);
    }
  }
  errno = error;
}

bool handle() {
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  return sigaction(SIGBUS, nullptr, &former) == 0 && sigaction(SIGBUS, &action, nullptr) == 0;
}

}  // namespace

int guard(uintptr_t begin, size_t nbytes) {
  static const bool handled = handle();  // once: a handler that was set later may call this one
  for (size_t i = 0; handled && i < mappings.size(); i++) {
    Mapping& each = mappings[i];
    if (each.taken.exchange(true)) continue;
    each.nbytes.store(nbytes);
    each.replaced.store(false);
    each.begin.store(begin);
    return static_cast<int>(i);
  }
  return -1;
}

bool was_replaced(int number) { return number >= 0 && mappings.at(number).replaced.load(); }

void unguard(int number) {
  if (number < 0) return;
  mappings.at(number).begin.store(0);
  mappings.at(number).taken.store(false);
}

}  // namespace kvtier
