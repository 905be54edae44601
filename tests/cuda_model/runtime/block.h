#pragma once
// A block of threads: fibers that run one after another and meet at barriers and shuffles.

#include <array>
#include <memory>
#include <vector>

#include "runtime/fibers.h"
#include "runtime/sanitizer.h"

#define __CUDACC__  // the declarations for kernels
#include "cuda_runtime.h"

namespace cuda_model {

class Block {
 public:
  /// Runs `work` once per thread of the launch's block. Ends the process with one line if threads
  /// would wait for each other forever.
  /// `seed` decides the order of the block's warps; 0: ascending.
  void run(const Launch& launch, const std::function<void()>& work, uint64_t seed);

  // For the thread that runs.
  int barrier(Vote vote, int predicate, const char* file, int line);
  uint64_t exchange(unsigned mask, uint64_t value, int source, const char* file, int line);
  int lane() const { return current_ % 32; }
  void warp_barrier(unsigned mask, const char* file, int line);
  void fence() { threads_[current_].fenced = true; }
  bool has_fenced() const { return threads_[current_].fenced; }

 private:
  enum class State { running, at_barrier, at_exchange, done };
  struct Thread {
    State state = State::running;
    std::unique_ptr<Fiber> fiber;  // from its first instruction to its last
    const char* file = "";         // where it waits
    int line = 0;
    Vote vote = Vote::none;
    int predicate = 0;
    unsigned mask = 0;
    int source = 0;
    uint64_t value = 0, result = 0;
    bool fenced = false;  // __threadfence() was called
  };

  void resume(int index);
  void wait(State state, const char* file, int line);
  void run_warps();
  void run_warp(int first);
  bool release_exchanges(int first);
  bool release_barrier();
  unsigned lanes_waiting_with(int first, const Thread& thread) const;
  unsigned live_lanes(int first) const;
  [[noreturn]] void report_stuck() const;

  const Launch* launch_ = nullptr;
  const std::function<void()>* work_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<std::unique_ptr<Fiber>> free_fibers_;
  int current_ = 0;
  uint64_t seed_ = 0;
  // For ThreadSanitizer: threads arrive at the block's barriers and end, and go on from there; the
  // lanes of a warp meet. A member of each of them, as one for all would order too much.
  Order arrive_, go_;
  std::array<Order, 32> meet_;
};

}  // namespace cuda_model
