#pragma once
// How many bytes a rank has given to others.
//
// They are counted where they leave, not computed from what was asked for: a message too many is in
// the count. `shm` counts what it writes into the shared memory, once for each rank that takes it;
// `tcp` what its connections have taken; ranks in one process what is copied, or read by a kernel,
// from one rank's memory into another's. Libraries do not tell what they send: for Gloo and NCCL it
// is what a ring would send for the calls that are made to them (Call::ring_bytes()).

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace lockstep {

/// What a call is for: its bytes are counted apart from others'.
enum class Purpose { other, gradients, parameters, statistics, activations };

/// One rank's counts. The thread that runs the calls adds, any other may read. Relaxed: to count
/// orders nothing, or it would hide a missing wait from ThreadSanitizer.
class SentBytes {
 public:
  /// `where` they are counted: for summaries.
  explicit SentBytes(std::string where) : where_(std::move(where)) {}

  void add(Purpose purpose, int64_t bytes) {
    counts_[size_t(purpose)].fetch_add(bytes, std::memory_order_relaxed);
  }
  int64_t of(Purpose purpose) const {
    return counts_[size_t(purpose)].load(std::memory_order_relaxed);
  }
  int64_t of_all() const {
    int64_t sum = 0;
    for (const auto& count : counts_) sum += count.load(std::memory_order_relaxed);
    return sum;
  }
  const std::string& where() const { return where_; }

 private:
  std::string where_;
  std::array<std::atomic<int64_t>, 5> counts_{};
};

}  // namespace lockstep
