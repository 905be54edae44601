#pragma once
// The store of a job whose ranks all live in this process.

#include <memory>
#include <string>
#include <vector>

#include "common/comm/host_transport.h"
#include "common/rendezvous/store.h"
#include "tests/support/comm_trial.h"

namespace lockstep::testing {

/// All ranks' connections to the store; rank 0's is made first and closed last.
struct Stores {
  explicit Stores(int world_size, const std::string& host = "127.0.0.1") {
    for (int rank = 0; rank < world_size; ++rank) {
      const int port = rank == 0 ? 0 : all[0]->address().port;
      all.push_back(std::make_shared<TcpStore>(
          StoreOptions{.address = {host, port}, .rank = rank, .world_size = world_size}));
    }
  }
  ~Stores() {
    while (!all.empty()) all.pop_back();
  }
  Stores(const Stores&) = delete;
  Stores& operator=(const Stores&) = delete;
  TcpStore& operator[](int rank) const { return *all[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(all.size()); }
  std::vector<std::shared_ptr<TcpStore>> all;
};

/// The ranks of a group that are connected by TCP.
inline Ranks tcp_ranks(int world_size, double timeout_seconds = 20) {
  const Stores stores(world_size);
  return Ranks(world_size, [&](int rank) { return connect_tcp(stores[rank], timeout_seconds); });
}

}  // namespace lockstep::testing
