#include "common/comm/shm_peers.h"

#include <sched.h>

#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "common/core/error.h"
#include "common/core/text.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

/// How often the thread looks without leaving its core, some 2 us; then how long it looks while it
/// lets others run. To be woken takes longer.
constexpr int kLooks = 100;
constexpr std::chrono::microseconds kYields{50};

/// Tells the core that this is a loop that waits.
void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ShmPeers::ShmPeers(std::shared_ptr<SharedMemory> memory, int rank, std::vector<Socket> sockets,
                   double timeout_seconds)
    : owner_(std::move(memory)),
      memory_(owner_->data(), static_cast<int>(sockets.size())),
      rank_(rank),
      sockets_(std::move(sockets)),
      ends_(sockets_.size()),
      timeout_(timeout_seconds) {}

// A rank that goes to sleep sets `asleep`, then looks once more. A rank that has something new
// stores it, then takes `asleep` away. Both exchange one variable, so one of the two comes first:
// either the waker sees that the other sleeps, or the sleeper sees what the waker stored before.
void ShmPeers::wake(int peer) const {
  if (memory_.state(peer).asleep.exchange(0, std::memory_order_acq_rel) == 0) return;
  const std::byte byte{};
  try {
    sockets_[size_t(peer)].send_some({&byte, 1});
  } catch (const ConnectionClosed&) {  // it is gone, and waits for nothing
  }
}

void ShmPeers::wait(const Ready& ready, const Awaited& awaited, Concerns concerns) {
  if (ready() || look_for_a_while(ready, awaited)) return;
  const Deadline deadline(timeout_);
  std::atomic<int>& asleep = memory_.state(rank_).asleep;
  for (bool in_time = true;; in_time = sleep(deadline)) {
    asleep.exchange(1, std::memory_order_acq_rel);
    if (ready()) break;
    require_all_there(awaited, concerns);
    if (!in_time) {
      fail<PeerLost>("{} did not answer within {:g} s", all_awaited(awaited), deadline.seconds());
    }
  }
  asleep.exchange(0, std::memory_order_acq_rel);
}

bool ShmPeers::look_for_a_while(const Ready& ready, const Awaited& awaited) const {
  const int here = ::sched_getcpu();
  bool elsewhere = false;
  for (int r = 0; r < world_size(); ++r) {
    const int core = memory_.state(r).core.load(std::memory_order_relaxed);
    elsewhere = elsewhere || (r != rank_ && awaited(r) && core != here);
  }
  if (!elsewhere) return false;  // who is awaited needs this core
  for (int look = 0; look < kLooks; ++look) {
    pause_core();
    if (ready()) return true;
  }
  const Clock::time_point end = Clock::now() + kYields;
  while (Clock::now() < end) {
    std::this_thread::yield();
    if (ready()) return true;
  }
  return false;
}

/// Until a socket has something to say; false if the deadline came first.
bool ShmPeers::sleep(const Deadline& deadline) {
  std::vector<pollfd> entries;
  for (size_t r = 0; r < sockets_.size(); ++r) {
    const bool listens = ends_[r].empty();
    entries.push_back({listens ? sockets_[r].fd() : -1, POLLIN, 0});
  }
  const bool in_time = wait_ready(entries, deadline);
  std::array<std::byte, 64> bytes;
  for (size_t r = 0; r < sockets_.size(); ++r) {
    if (entries[r].revents == 0) continue;
    try {
      sockets_[r].receive_some(bytes);
    } catch (const ConnectionClosed& end) {
      ends_[r] = end.what();
    }
  }
  return in_time;
}

void ShmPeers::require_all_there(const Awaited& awaited, Concerns concerns) const {
  const std::string* given_up = nullptr;
  for (int r = 0; r < world_size(); ++r) {
    const std::string& end = ends_[size_t(r)];
    if (end.empty()) continue;
    if (awaited(r)) throw ConnectionClosed(end);
    given_up = &end;
  }
  if (given_up != nullptr && concerns == Concerns::all) throw ConnectionClosed(*given_up);
}

std::string ShmPeers::all_awaited(const Awaited& awaited) const {
  std::vector<int> ranks;
  for (int r = 0; r < world_size(); ++r) {
    if (r != rank_ && awaited(r)) ranks.push_back(r);
  }
  return name_ranks(ranks);
}

}  // namespace lockstep
