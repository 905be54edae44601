#include "runtime/turn.h"

#include "runtime/memory.h"

// Defined where the program is built with AddressSanitizer, null elsewhere.
extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* address, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* address,
                                                         size_t bytes);
}

namespace cuda_model {
namespace {

/// Who can reach memory now.
struct Holder {
  enum { nobody, device, driver } kind = nobody;
  const Device* gpu = nullptr;

  bool operator==(const Holder&) const = default;
  bool reaches(unsigned reached_by) const {
    return kind == driver || (kind == device && (reached_by >> gpu->index & 1) != 0);
  }
};

/// In the order in which they came; those of one GPU share a turn.
struct Turns {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t next_ticket = 0, next_inside = 0;
  int inside = 0;
  Holder holder;  // changes with model_mutex() held, too
};
Turns& turns() {
  static auto& all = *new Turns;
  return all;
}

bool watched() { return __asan_poison_memory_region != nullptr; }

void protect(const void* address, size_t bytes, bool reachable) {
  if (reachable) {
    __asan_unpoison_memory_region(address, bytes);
  } else {
    __asan_poison_memory_region(address, bytes);
  }
}

void pass_on(Holder to) {
  const std::lock_guard lock(model_mutex());
  const Holder from = turns().holder;
  turns().holder = to;
  each_device_block([&](const void* address, size_t bytes, unsigned reached_by) {
    const bool now = to.reaches(reached_by);
    if (now != from.reaches(reached_by)) protect(address, bytes, now);
  });
}

}  // namespace

Turn::Turn(const Device* device) {
  if (!watched()) return;
  const Holder me{device == nullptr ? Holder::driver : Holder::device, device};
  Turns& all = turns();
  std::unique_lock lock(all.mutex);
  const uint64_t ticket = all.next_ticket++;
  all.changed.wait(
      lock, [&] { return ticket == all.next_inside && (all.inside == 0 || all.holder == me); });
  ++all.next_inside;
  if (all.inside++ == 0) pass_on(me);
  all.changed.notify_all();  // the next one may share it
}

Turn::~Turn() {
  if (!watched()) return;
  Turns& all = turns();
  const std::lock_guard lock(all.mutex);
  if (--all.inside > 0) return;
  pass_on({});
  all.changed.notify_all();
}

void protect_new(const void* address, size_t bytes, unsigned reached_by) {
  if (watched()) protect(address, bytes, turns().holder.reaches(reached_by));
}

}  // namespace cuda_model
