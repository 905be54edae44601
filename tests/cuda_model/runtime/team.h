#pragma once
// Threads that run the blocks of one kernel side by side, and the order of blocks.

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace cuda_model {

/// 0 ... count - 1 in an order that only the seed decides; ascending for seed 0.
std::vector<unsigned> shuffled(unsigned count, uint64_t seed);

/// The threads of one stream. They sleep between kernels and end with it.
class Team {
 public:
  Team() = default;
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// Calls work(member) for each member in [0, size), all at once; the caller is member 0. Members'
  /// work is ordered after the caller's earlier work and before its later work, and otherwise not
  /// at all: so ThreadSanitizer sees races between members, however they are scheduled.
  void run(size_t size, const std::function<void(size_t member)>& work);

 private:
  void stay(size_t member);

  // Two locks, one on the way in and one on the way out, where all wait for each other: a member
  // that comes in late is not ordered after one that has ended.
  std::mutex starting_, ending_;
  std::condition_variable started_, ended_;
  std::vector<std::thread> threads_;
  const std::function<void(size_t)>* work_ = nullptr;
  uint64_t round_ = 0, rounds_ended_ = 0;
  size_t size_ = 0, running_ = 0;
  bool over_ = false;
};

}  // namespace cuda_model
