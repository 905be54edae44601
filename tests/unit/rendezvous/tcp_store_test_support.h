#pragma once
// A store and the ranks and strangers that come to it.

#include <memory>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "common/rendezvous/handshake.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/store.h"
#include "common/rendezvous/store_server.h"
#include "common/rendezvous/wire.h"
#include "tests/support/catch.h"
#include "tests/support/proofs.h"
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

/// Listening on all interfaces, a store has no key of its own: the job trusts its network.
inline const std::string kEverywhere = "0.0.0.0";

/// Rank 0's store of a world.
struct Host {
  explicit Host(int world_size, const std::string& at = kLoopback) : world_size(world_size) {
    StoreOptions mine = options_of(0, world_size);
    mine.address.host = at;
    store = std::make_unique<TcpStore>(mine);
  }
  StoreOptions options(int rank) const {
    StoreOptions other = options_of(rank, world_size);
    other.address = store->address();
    other.run_id = run_id;
    return other;
  }
  std::unique_ptr<TcpStore> client(int rank) const {
    return std::make_unique<TcpStore>(options(rank));
  }
  Socket stranger() const { return connect_to(store->address(), Deadline(kLong)); }

  int world_size;
  std::string run_id{};
  std::unique_ptr<TcpStore> store;
};

inline void check_all_say(const std::vector<std::string>& errors, const std::string& text) {
  for (const std::string& error : errors) {
    CHECK_THAT(error, Catch::Matchers::ContainsSubstring(text));
    CHECK(error.find('\n') == error.npos);
  }
}

/// Whether the other side has closed the connection; it may say anything before.
inline bool has_closed(const Socket& socket) {
  std::string byte(1, '\0');
  const Deadline deadline(kSoon);
  try {
    while (true) receive_all(socket, writable_bytes_of(byte), deadline);
  } catch (const ConnectionClosed&) {
    return true;
  } catch (const PeerLost&) {
  }
  return false;
}

/// A rank's first message to a store.
inline std::string first_message(const JobKey& key, int rank) {
  return Handshake::of_caller(key, kStoreMeeting, 0, rank).take_output();
}

/// All that a rank says to a store that trusts its network, without waiting for answers.
inline std::string hello_bytes(const Hello& hello) {
  return first_message({}, hello.rank) + std::string(32, '\0') + frame(encode(hello));
}

inline void say(const Socket& socket, const std::string& text) {
  send_all(socket, bytes_of(text), Deadline(kLong));
}

/// Bytes of a rank's first message, of the store's answer, and of its reply to a hello.
constexpr size_t kFirstSize = 49, kAnswerSize = 77, kReplySize = 9;

/// The listener's part of a handshake.
inline void prove_to_caller(const Socket& socket, const JobKey& key) {
  Handshake handshake = Handshake::of_listener(key, kStoreMeeting, 0);
  while (handshake.state() == Handshake::State::going) {
    std::string some(handshake.wanted(), '\0');
    receive_all(socket, writable_bytes_of(some), Deadline(kLong));
    handshake.take(some);
    say(socket, handshake.take_output());
  }
}

/// Whether this host has IPv6; without it, listening must say so.
inline bool has_ipv6() {
  try {
    return listen_on({"::1", 0}).is_open();
  } catch (const EnvironmentError& error) {
    CHECK_THAT(error.what(), Catch::Matchers::ContainsSubstring("cannot listen on [::1]:0"));
    return false;
  }
}

}  // namespace lockstep::testing::store
