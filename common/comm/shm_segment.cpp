#include "common/comm/shm_segment.h"

#include <sched.h>

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "common/comm/host_transport.h"
#include "common/comm/peer_meeting.h"
#include "common/core/error.h"
#include "common/core/host.h"
#include "common/core/text.h"
#include "common/rendezvous/agreement.h"
#include "common/rendezvous/socket.h"

namespace lockstep {

// --- How ranks wait for each other ---------------------------------------------------------------

namespace {

using Clock = std::chrono::steady_clock;

/// How often the thread looks without leaving its core, some 2 us; then how long it looks while it
/// lets others run. To be woken takes longer.
constexpr int kLooks = 100;
constexpr std::chrono::microseconds kYields{50};

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
  std::vector<std::string> names;
  for (int r = 0; r < world_size(); ++r) {
    if (r != rank_ && awaited(r)) names.push_back(name_of(r));
  }
  return listed(names);
}

// --- How ranks come to share memory --------------------------------------------------------------
//
// Each listens under a name that nobody can guess; the higher rank of two connects, and both prove
// the job's key; then rank 0 sends all others the descriptor of the memory. That it arrives proves
// that they are on one host: a name or an address does not.

namespace {

constexpr const char* kAllConnections = "all connections";

std::string name_in_store(const std::string& what) { return "shared memory: " + what; }

std::string random_name() {
  std::random_device random;
  std::string name = "lockstep";
  for (int i = 0; i < 4; ++i) name += fmt::format("-{:08x}", random());
  return name;
}

/// How one rank connects. Whatever all_do() has failed on all if it has failed on one.
class ShmMeeting {
 public:
  ShmMeeting(Store& store, double timeout_seconds)
      : store_(store), deadline_(timeout_seconds), sockets_(size_t(store.world_size())) {}

  std::unique_ptr<ShmPeers> meet(double timeout_seconds) {
    std::string name;
    const std::vector<std::string> names = all_do("a socket", [&] {
      name = random_name();
      listener_ = listen_under(name);
      meeting_.emplace(store_, listener_, name);
      if (store_.rank() == 0) create_memory();
      return name;
    });
    all_do("a connection", [&] { return connect_to_lower(names); });
    all_do(kAllConnections, [&] { return meet_all(); });
    all_do("the memory", [&] { return hand_round(); });
    return std::make_unique<ShmPeers>(memory_, store_.rank(), std::move(sockets_), timeout_seconds);
  }

 private:
  /// Returns the ranks' results of `work`, which throws EnvironmentError where it cannot be done.
  /// A peer that closed its connection may only have given up; one that has gone is missed below.
  std::vector<std::string> all_do(const std::string& what,
                                  const std::function<std::string()>& work) {
    std::string done, failure;
    try {
      done = work();
    } catch (const EnvironmentError& error) {
      failure = error.what();
    } catch (const ConnectionClosed& error) {
      failure = error.what();
    }
    if (!failure.empty()) close_all();
    const auto exchanged = [&](const std::string& mine) {
      return exchange(store_, name_in_store(what), mine, deadline_.seconds_left());
    };
    try {
      return together(exchanged, [&] {
        if (!failure.empty()) {
          fail<EnvironmentError>("{}: {}", store_.name_of(store_.rank()), failure);
        }
        return done;
      });
    } catch (const EnvironmentError& error) {
      throw NoSharedMemory(error.what());
    }
  }

  /// Whoever waits at one of its sockets, or ours, does so no longer.
  void close_all() {
    meeting_.reset();
    sockets_.clear();
    listener_.close();
  }

  void create_memory() {
    const int ranks = store_.world_size();
    memory_ = std::make_shared<SharedMemory>(
        SharedMemory::create(ShmLayout::bytes(ranks), ShmLayout::used_bytes(ranks)));
    ShmLayout(memory_->data(), store_.world_size()).begin();
  }

  /// Without waiting for an answer: all have to know first whether all could connect.
  std::string connect_to_lower(const std::vector<std::string>& names) {
    for (int lower = 0; lower < store_.rank(); ++lower) {
      const std::string& name = names[size_t(lower)];
      meeting_->add(
          lower,
          [name, peer = store_.name_of(lower)](const Deadline& until) {
            return connect_under(name, peer, until);
          },
          name, deadline_);
    }
    return "";
  }

  std::string meet_all() {
    sockets_ = meeting_->meet(
        deadline_, {.own_user_only = true, .check_missing = [&](const std::vector<int>& missing) {
                      require_not_given_up(missing);
                    }});
    return "";
  }

  /// All have connected: who says that it could not come will not. Who says that it has is let in a
  /// moment later: this rank has answered it, and its proof waits here.
  void require_not_given_up(const std::vector<int>& missing) {
    const Meeting met = look(store_, name_in_store(kAllConnections));
    for (const int rank : missing) {
      const std::optional<std::string>& text = met.texts.at(size_t(rank));
      if (!text || !is_failure(*text)) continue;
      fail<EnvironmentError>("{} has not connected, or as another user", store_.name_of(rank));
    }
  }

  std::string hand_round() {
    if (store_.rank() > 0) {
      const int ranks = store_.world_size();
      memory_ = std::make_shared<SharedMemory>(
          SharedMemory::open(receive_descriptor(sockets_[0], deadline_), ShmLayout::bytes(ranks),
                             ShmLayout::used_bytes(ranks)));
      return "";
    }
    for (size_t rank = 1; rank < sockets_.size(); ++rank) {
      send_descriptor(sockets_[rank], memory_->descriptor());
    }
    return "";
  }

  Store& store_;
  Deadline deadline_;
  Socket listener_;
  std::optional<PeerMeeting> meeting_;
  std::shared_ptr<SharedMemory> memory_;
  std::vector<Socket> sockets_;
};

}  // namespace

std::unique_ptr<ShmPeers> meet_in_shm(Store& store, double timeout_seconds) {
  return ShmMeeting(store, timeout_seconds).meet(timeout_seconds);
}

}  // namespace lockstep
