#pragma once
// ThreadSanitizer's view of fibers, and of what orders them. Its functions are there where the
// program is built with it, null elsewhere; the model itself must be compiled without it.

#include <memory>
#include <utility>

extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
}

namespace cuda_model {

/// Orders work: all work before release(&order), on any fiber or thread, comes before all work
/// after a later acquire(&order).
struct Order {
  void release() {
    if (__tsan_release) __tsan_release(this);
  }
  void acquire() {
    if (__tsan_acquire) __tsan_acquire(this);
  }
  char address = 0;
};

/// std::make_shared, for what several threads own: ThreadSanitizer does not see the model's counts
/// of owners, and would take the end of the last one for a race. There the object is never freed.
template <class T, class... Arguments>
std::shared_ptr<T> make_shared_by_threads(Arguments&&... arguments) {
  const auto made = std::make_shared<T>(std::forward<Arguments>(arguments)...);
  if (__tsan_acquire) new std::shared_ptr<T>(made);
  return made;
}

}  // namespace cuda_model
