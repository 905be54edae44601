#include "runtime/block.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "runtime/model.h"
#include "runtime/team.h"

namespace cuda_model {

void Block::run(const Launch& launch, const std::function<void()>& work, uint64_t seed) {
  launch_ = &launch;
  seed_ = seed;
  const std::function<void()> thread = [&] {
    go_.acquire();
    work();
    arrive_.release();
  };
  work_ = &thread;
  threads_.clear();
  threads_.resize(size_t{launch.block.x} * launch.block.y * launch.block.z);
  go_.release();
  do {
    run_warps();
    arrive_.acquire();
    go_.release();
  } while (release_barrier());
}

/// Until each thread has ended or waits for the block.
void Block::run_warps() {
  if (seed_ != 0) ++seed_;
  for (const unsigned warp : shuffled(static_cast<unsigned>(threads_.size() + 31) / 32, seed_)) {
    run_warp(static_cast<int>(warp) * 32);
  }
}

/// Until each lane has ended or waits for the block.
void Block::run_warp(int first) {
  const int end = std::min(first + 32, static_cast<int>(threads_.size()));
  do {
    for (int i = first; i < end; ++i) {
      if (threads_[i].state == State::running) resume(i);
    }
  } while (release_exchanges(first));
}

void Block::resume(int index) {
  Thread& thread = threads_[index];
  if (thread.fiber == nullptr) {
    if (free_fibers_.empty()) free_fibers_.push_back(std::make_unique<Fiber>());
    thread.fiber = std::move(free_fibers_.back());
    free_fibers_.pop_back();
  }
  current_ = index;
  const unsigned x = launch_->block.x, y = launch_->block.y, i = static_cast<unsigned>(index);
  threadIdx = {i % x, i / x % y, i / x / y};
  if (thread.fiber->resume(*work_)) {
    thread.state = State::done;
    free_fibers_.push_back(std::move(thread.fiber));
  }
}

void Block::wait(State state, const char* file, int line) {
  Thread& thread = threads_[current_];
  thread.state = state;
  thread.file = file;
  thread.line = line;
  thread.fiber->yield();
}

int Block::barrier(Vote vote, int predicate, const char* file, int line) {
  Thread& thread = threads_[current_];
  thread.vote = vote;
  thread.predicate = predicate;
  arrive_.release();
  wait(State::at_barrier, file, line);
  go_.acquire();
  return thread.predicate;
}

/// An exchange of values orders no memory; this does.
void Block::warp_barrier(unsigned mask, const char* file, int line) {
  Order& order = meet_[static_cast<size_t>(current_) / 32];
  order.release();
  exchange(mask, 0, lane(), file, line);
  order.acquire();
}

uint64_t Block::exchange(unsigned mask, uint64_t value, int source, const char* file, int line) {
  Thread& thread = threads_[current_];
  if ((mask >> lane() & 1) == 0) {
    die(std::string(file) + ":" + std::to_string(line) + ": lane " + std::to_string(lane()) +
        " of " + launch_->kernel + " calls a warp operation whose mask leaves it out: add it");
  }
  thread.mask = mask;
  thread.value = value;
  thread.source = source;
  wait(State::at_exchange, file, line);
  return thread.result;
}

unsigned Block::live_lanes(int first) const {
  unsigned live = 0;
  for (int lane = 0; lane < 32 && first + lane < static_cast<int>(threads_.size()); ++lane) {
    if (threads_[first + lane].state != State::done) live |= 1u << lane;
  }
  return live;
}

/// Lanes that wait in the same warp operation as `thread`.
unsigned Block::lanes_waiting_with(int first, const Thread& thread) const {
  unsigned lanes = 0;
  for (int lane = 0; lane < 32 && first + lane < static_cast<int>(threads_.size()); ++lane) {
    const Thread& other = threads_[first + lane];
    if (other.state == State::at_exchange && other.mask == thread.mask &&
        other.line == thread.line) {
      lanes |= 1u << lane;
    }
  }
  return lanes;
}

/// Lets go the lanes whose whole mask has arrived; lanes that have ended do not count.
bool Block::release_exchanges(int first) {
  bool released = false;
  const int end = std::min(first + 32, static_cast<int>(threads_.size()));
  for (int i = first; i < end; ++i) {
    if (threads_[i].state != State::at_exchange) continue;
    const unsigned needed = threads_[i].mask & live_lanes(first);
    if (lanes_waiting_with(first, threads_[i]) != needed) continue;
    for (int lane = 0; lane < 32; ++lane) {
      if ((needed >> lane & 1) == 0) continue;
      Thread& thread = threads_[first + lane];
      // A lane that takes no part has an undefined value: NaN shows where it is used.
      const bool there = thread.source >= 0 && needed >> thread.source & 1;
      thread.result = there ? threads_[first + thread.source].value : ~uint64_t{0};
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (needed >> lane & 1) threads_[first + lane].state = State::running;
    }
    released = true;
  }
  return released;
}

/// Lets the block continue. False when all threads have ended.
bool Block::release_barrier() {
  const Thread* waiting = nullptr;
  bool any = false, all = true;
  for (const Thread& thread : threads_) {
    if (thread.state == State::done) continue;
    if (thread.state != State::at_barrier) report_stuck();
    if (waiting == nullptr) waiting = &thread;
    const bool same_file =
        thread.file == waiting->file || std::strcmp(thread.file, waiting->file) == 0;
    if (thread.line != waiting->line || !same_file) report_stuck();
    any = any || thread.predicate != 0;
    all = all && thread.predicate != 0;
  }
  if (waiting == nullptr) return false;
  const int result = waiting->vote == Vote::any ? any : all;
  for (Thread& thread : threads_) {
    if (thread.state == State::done) continue;
    thread.state = State::running;
    thread.predicate = result;
  }
  return true;
}

void Block::report_stuck() const {
  std::map<std::string, int> places;
  for (const Thread& thread : threads_) {
    if (thread.state == State::done) continue;
    const char* what = thread.state == State::at_barrier ? "the block" : "lanes of its mask";
    const std::string at = std::string(thread.file) + ":" + std::to_string(thread.line);
    ++places[std::string("for ") + what + " at " + at];
  }
  std::string list;
  for (const auto& [place, count] : places) {
    list += (list.empty() ? "" : ", ") + std::to_string(count) + " wait " + place;
  }
  die(std::string("divergent barrier in ") + launch_->kernel + ": of " +
      std::to_string(threads_.size()) + " threads " + list +
      "; all live threads must come to the same one");
}

}  // namespace cuda_model
