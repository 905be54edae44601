#pragma once
// A rendezvous between ranks that are threads of one process.

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "common/comm/host_transport.h"
#include "common/core/error.h"
#include "tests/support/comm_trial.h"

namespace lockstep::testing {

class LocalStore {
 public:
  void set(const std::string& key, const std::string& value) {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key) {
    std::unique_lock lock(mutex_);
    const auto known = [&] { return values_.contains(key); };
    if (!changed_.wait_for(lock, std::chrono::seconds(20), known)) {
      fail<PeerLost>("store: nobody set {}", key);
    }
    return values_[key];
  }

  RendezvousStore view() {
    return {[this](const std::string& key, const std::string& value) { set(key, value); },
            [this](const std::string& key) { return get(key); }};
  }
  /// Gives this rank's text to all, and returns all ranks' texts, as often as they like.
  std::vector<std::string> exchange(int rank, int world_size, const std::string& mine) {
    const int number = next_exchange(rank);
    const auto key = [&](int of) { return fmt::format("text {} of {}", number, of); };
    set(key(rank), mine);
    std::vector<std::string> all;
    for (int other = 0; other < world_size; ++other) all.push_back(get(key(other)));
    return all;
  }

 private:
  int next_exchange(int rank) {
    const std::lock_guard lock(mutex_);
    return exchanges_[rank]++;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<int, int> exchanges_;  // so far, by rank
};

/// The ranks of a Gloo group, all in this process.
inline Ranks gloo_ranks(int world_size, double timeout_seconds = 20) {
  LocalStore store;
  const RendezvousStore view = store.view();
  return Ranks(world_size, [&](int rank) {
    return connect_gloo(rank, world_size, view, "127.0.0.1", timeout_seconds);
  });
}

}  // namespace lockstep::testing
