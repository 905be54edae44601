#pragma once
// Fibers: stacks that one thread switches between. They carry the threads of a block.
//
// A stack is entered once, through ucontext; after that a switch is a jump without a system call.
// AddressSanitizer and ThreadSanitizer are told of each switch where the program has them. For
// ThreadSanitizer a fiber is a thread, and a switch orders nothing.

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace cuda_model {

/// The point at which a stack goes on after a switch away from it.
struct StackPoint {
  void* jump[5];  // for __builtin_setjmp
  const void* bottom = nullptr;
  size_t size = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* tsan_fiber = nullptr;  // ThreadSanitizer's
};

/// A stack that runs one piece of work after another.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Runs `work` from its beginning, or continues it, until it yields or ends. True when it ended.
  bool resume(const std::function<void()>& work);
  /// Called inside the fiber: goes back to the caller of resume().
  void yield();

 private:
  static void enter();
  void loop();

  void* memory_;
  bool entered_ = false, ended_ = true;
  const std::function<void()>* work_ = nullptr;
  StackPoint inside_, outside_;
};

}  // namespace cuda_model
