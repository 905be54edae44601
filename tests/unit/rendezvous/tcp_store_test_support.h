#pragma once
// A store and the ranks and strangers that come to it.

#include <memory>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "common/rendezvous/tcp_store.h"
#include "common/sockets/connect.h"
#include "common/sockets/transfer.h"
#include "common/sockets/wire.h"
#include "tests/support/catch.h"
#include "tests/support/tasks.h"

namespace lockstep::testing::store {

inline const std::string kLoopback = "127.0.0.1";

/// Options of a rank whose store rank 0 hosts here; rank 0 itself gets port 0.
inline StoreOptions options_of(int rank, int world_size, int port = 0) {
  return {.address = {kLoopback, port},
          .rank = rank,
          .world_size = world_size,
          .connect_seconds = kLong,
          .answer_seconds = kLong,
          .late_seconds = kLong};
}

/// Rank 0's store of a world.
struct Host {
  explicit Host(int world_size)
      : world_size(world_size), store(std::make_unique<TcpStore>(options_of(0, world_size))) {}
  StoreOptions options(int rank) const {
    return options_of(rank, world_size, store->address().port);
  }
  std::unique_ptr<TcpStore> client(int rank) const {
    return std::make_unique<TcpStore>(options(rank));
  }
  Socket stranger() const { return connect_to(store->address(), Deadline(kLong)); }

  int world_size;
  std::unique_ptr<TcpStore> store;
};

inline void check_all_say(const std::vector<std::string>& errors, const std::string& text) {
  for (const std::string& error : errors) {
    CHECK_THAT(error, Catch::Matchers::ContainsSubstring(text));
    CHECK(error.find('\n') == error.npos);
  }
}

inline bool has_closed(const Socket& socket) {
  std::string byte(1, '\0');
  try {
    receive_all(socket, writable_bytes_of(byte), Deadline(kSoon));
  } catch (const ConnectionClosed&) {
    return true;
  } catch (const PeerLost&) {
  }
  return false;
}

inline std::string hello_bytes(const Hello& hello) {
  return std::string(kStoreMagic) + frame(encode(hello));
}

inline void say(const Socket& socket, const std::string& text) {
  send_all(socket, bytes_of(text), Deadline(kLong));
}

/// False on a host without IPv6, where listening says so.
inline bool has_ipv6() {
  try {
    return listen_on({"::1", 0}).is_open();
  } catch (const EnvironmentError& error) {
    CHECK_THAT(error.what(), Catch::Matchers::ContainsSubstring("cannot listen on [::1]:0"));
    return false;
  }
}

}  // namespace lockstep::testing::store
