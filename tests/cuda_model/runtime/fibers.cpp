#include "runtime/fibers.h"

#include <sys/mman.h>
#include <ucontext.h>

#include "runtime/model.h"
#include "runtime/sanitizer.h"

// Defined where the program is built with AddressSanitizer, null elsewhere.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** save, const void* bottom,
                                                          size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* save, const void** bottom,
                                                           size_t* size);
}

namespace cuda_model {
namespace {

constexpr size_t kStackBytes = 256 * 1024, kGuardBytes = 4096;

thread_local Fiber* entering = nullptr;

constexpr unsigned kNoOrder = 1;  // __tsan_switch_to_fiber_no_sync

__attribute__((noinline)) void announce(StackPoint& from, const StackPoint& to) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan_fiber, kNoOrder);
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size);
  }
}

/// `from`: where the switch came from; its stack's bounds are learnt here.
__attribute__((noinline)) void arrived(StackPoint& here, StackPoint& from) {
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(here.fake_stack, &from.bottom, &from.size);
  }
}

// The compiler's own jumps. swapcontext needs a system call, and at the C library's jumps
// AddressSanitizer forgets what it knows of the whole stack. A jump may not leave the function that
// it returns to.
[[noreturn]] __attribute__((noinline)) void go_on_at(StackPoint& point) {
  __builtin_longjmp(point.jump, 1);
}
__attribute__((noinline)) void jump(StackPoint& from, StackPoint& to) {
  if (__builtin_setjmp(from.jump) == 0) go_on_at(to);
}
__attribute__((noinline)) void jump_to_start(StackPoint& from, const ucontext_t& context) {
  if (__builtin_setjmp(from.jump) == 0) setcontext(&context);
}

void switch_stack(StackPoint& from, StackPoint& to) {
  announce(from, to);
  jump(from, to);
  arrived(from, to);
}

}  // namespace

Fiber::Fiber() {
  memory_ = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory_ == MAP_FAILED || mprotect(memory_, kGuardBytes, PROT_NONE) != 0) {
    die("no memory for the stack of a thread");
  }
  inside_.bottom = static_cast<char*>(memory_) + kGuardBytes;
  inside_.size = kStackBytes;
  if (__tsan_create_fiber) inside_.tsan_fiber = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (__tsan_destroy_fiber) __tsan_destroy_fiber(inside_.tsan_fiber);
  munmap(memory_, kGuardBytes + kStackBytes);
}

bool Fiber::resume(const std::function<void()>& work) {
  if (ended_) work_ = &work;
  ended_ = false;
  if (__tsan_get_current_fiber) outside_.tsan_fiber = __tsan_get_current_fiber();
  if (entered_) {
    switch_stack(outside_, inside_);
    return ended_;
  }
  entered_ = true;
  entering = this;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = static_cast<char*>(memory_) + kGuardBytes;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, &Fiber::enter, 0);
  announce(outside_, inside_);
  jump_to_start(outside_, context);
  arrived(outside_, inside_);
  return ended_;
}

void Fiber::yield() { switch_stack(inside_, outside_); }

void Fiber::enter() {
  Fiber* fiber = entering;
  arrived(fiber->inside_, fiber->outside_);
  fiber->loop();
}

void Fiber::loop() {
  for (;;) {
    (*work_)();
    ended_ = true;
    yield();
  }
}

}  // namespace cuda_model
