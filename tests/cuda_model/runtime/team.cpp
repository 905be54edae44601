#include "runtime/team.h"

#include <numeric>
#include <utility>

namespace cuda_model {

std::vector<unsigned> shuffled(unsigned count, uint64_t seed) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (seed == 0) return order;
  for (unsigned left = count; left > 1; --left) {
    seed += 0x9e3779b97f4a7c15u;  // splitmix64
    uint64_t mixed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    std::swap(order[left - 1], order[(mixed ^ (mixed >> 31)) % left]);
  }
  return order;
}

Team::~Team() {
  {
    const std::lock_guard lock(starting_);
    over_ = true;
    started_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(size_t size, const std::function<void(size_t)>& work) {
  {
    const std::lock_guard lock(ending_);
    running_ = size - 1;
  }
  {
    const std::lock_guard lock(starting_);
    while (threads_.size() < size - 1) {
      threads_.emplace_back([this, member = threads_.size() + 1] { stay(member); });
    }
    work_ = &work;
    size_ = size;
    ++round_;
    started_.notify_all();
  }
  work(0);
  std::unique_lock lock(ending_);
  ended_.wait(lock, [&] { return running_ == 0; });
}

void Team::stay(size_t member) {
  for (uint64_t seen = 0;;) {
    const std::function<void(size_t)>* work = nullptr;
    {
      std::unique_lock lock(starting_);
      started_.wait(lock, [&] { return over_ || (round_ != seen && member < size_); });
      if (over_) return;
      seen = round_;
      work = work_;
    }
    (*work)(member);
    std::unique_lock lock(ending_);
    const uint64_t round = rounds_ended_;
    if (--running_ == 0) ++rounds_ended_;
    ended_.notify_all();
    ended_.wait(lock, [&] { return rounds_ended_ != round; });
  }
}

}  // namespace cuda_model
