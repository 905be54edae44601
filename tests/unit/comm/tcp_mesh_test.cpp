// Bytes between ranks over their own connections: any size, in any pattern, and what a rank learns
// about one that dies, hangs or never comes. Ranks are threads.

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/comm/peer_meeting.h"
#include "common/comm/tcp_transport.h"
#include "common/core/error.h"
#include "common/rendezvous/handshake.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/store.h"
#include "common/rendezvous/wire.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/own_addresses.h"
#include "tests/support/proofs.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tasks.h"
#include "tests/support/tcp_stores.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::Clock;
using testing::kLong;
using testing::kShort;
using testing::kSoon;
using testing::message_of;
using testing::run_ranks;
using testing::seconds_since;
using testing::Stores;
using Texts = std::vector<std::string>;

/// The meshes of all ranks, as they are after their constructors.
struct Meshes {
  explicit Meshes(int world_size, const std::string& host = "127.0.0.1")
      : stores(world_size, host), all(static_cast<size_t>(world_size)) {
    errors = run_ranks(world_size, [&](int rank) {
      all[static_cast<size_t>(rank)] = std::make_unique<TcpMesh>(stores[rank], kLong);
    });
  }
  TcpMesh& operator[](int rank) const { return *all[static_cast<size_t>(rank)]; }
  void drop(int rank) { all[static_cast<size_t>(rank)].reset(); }

  Stores stores;
  std::vector<std::unique_ptr<TcpMesh>> all;
  Texts errors;
};

/// `size` bytes that differ from place to place, and between pairs of ranks.
std::string content(int from, int to, size_t size) {
  std::string bytes(size, '\0');
  char* const data = bytes.data();  // a plain pointer: test code is not optimised
  for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
    const uint64_t word = (i + 1) * 0x9E3779B97F4A7C15U + uint64_t(31 * from + to);
    std::memcpy(data + i, &word, std::min(sizeof word, size - i));
  }
  return bytes;
}

/// Checks that what `from` has for `to` has come; throws if it is something else.
void check_content(const std::string& bytes, int from, int to) {
  if (bytes == content(from, to, bytes.size())) return;
  fail<BadInput>("{} wrong bytes from rank {} to rank {}", bytes.size(), from, to);
}

constexpr size_t kSizes[] = {0, 1, 3, (size_t{1} << 20) + 1};

TEST_CASE("What one rank sends another receives, whatever its size", "[mesh][tsan]") {
  constexpr int kRanks = 5;
  const Meshes meshes(kRanks);
  CHECK(meshes.errors == Texts(kRanks));
  const Texts errors = run_ranks(kRanks, [&](int me) {
    for (const size_t size : kSizes) {
      for (int from = 0; from < kRanks; ++from) {
        for (int to = 0; to < kRanks; ++to) {
          if (from == to) continue;
          std::string bytes(size, '\0');
          if (me == from) meshes[me].send(to, bytes_of(content(from, to, size)), kLong);
          if (me == to) meshes[me].receive(from, writable_bytes_of(bytes), kLong);
          if (me == to) check_content(bytes, from, to);
        }
      }
    }
  });
  CHECK(errors == Texts(kRanks));
}

TEST_CASE("Ranks that all send and receive at the same time never wait for each other",
          "[mesh][tsan]") {
  constexpr int kRanks = 5;
  constexpr size_t kMoreThanBuffersHold = size_t{12} << 20;
  const Meshes meshes(kRanks);
  const Texts errors = run_ranks(kRanks, [&](int me) {
    const auto exchange = [&](int to, size_t to_size, int from, size_t from_size) {
      std::string bytes(from_size, '\0');
      meshes[me].exchange(to, bytes_of(content(me, to, to_size)), from, writable_bytes_of(bytes),
                          kLong);
      check_content(bytes, from, me);
    };
    for (const size_t size : kSizes) {
      for (int step = 1; step < kRanks; ++step) {  // rings of every length
        exchange((me + step) % kRanks, size, (me + kRanks - step) % kRanks, size);
      }
    }
    const size_t mine = size_t(me + 1) * 1000, theirs = size_t((me + kRanks - 1) % kRanks + 1);
    exchange((me + 1) % kRanks, mine, (me + kRanks - 1) % kRanks, theirs * 1000);
    if (me > 1) return;
    exchange(1 - me, kMoreThanBuffersHold, 1 - me, kMoreThanBuffersHold);  // a pair
    exchange(1 - me, me == 0 ? 0 : kSizes[3], 1 - me, me == 0 ? kSizes[3] : 0);
  });
  CHECK(errors == Texts(kRanks));
}

TEST_CASE("Messages of two ranks keep their order, however many are on their way", "[mesh][tsan]") {
  constexpr int kRanks = 3;
  constexpr size_t kLarge = (size_t{1} << 20) + 1;  // small ones must not slip in between
  constexpr size_t kOrder[] = {kLarge, 3, kLarge, 0, 1, kLarge};
  const Meshes meshes(kRanks);
  CHECK(meshes.errors == Texts(kRanks));
  const Texts errors = run_ranks(kRanks, [&](int rank) {
    std::deque<std::string> sent, received;
    std::vector<OutgoingBytes> out;
    std::vector<IncomingBytes> in;
    for (int other = 0; other < kRanks; ++other) {
      for (const size_t size : kOrder) {
        if (other == rank) continue;
        out.push_back({other, bytes_of(sent.emplace_back(content(rank, other, size)))});
        in.push_back({other, writable_bytes_of(received.emplace_back(size, '\0'))});
      }
    }
    meshes[rank].exchange(out, in, kLong);
    for (size_t i = 0; i < in.size(); ++i) check_content(received[i], in[i].from, rank);
  });
  CHECK(errors == Texts(kRanks));
}

TEST_CASE("A mesh works over IPv6 where the host has it, and for one rank", "[mesh][tsan]") {
  bool has_v6 = true;
  try {
    listen_on({"::1", 0});
  } catch (const EnvironmentError&) {
    has_v6 = false;
  }
  const Meshes meshes(2, has_v6 ? "::1" : "localhost");
  CHECK(meshes.errors == Texts(2));
  meshes[0].send(1, bytes_of("hello"), kLong);
  std::string bytes(5, '\0');
  meshes[1].receive(0, writable_bytes_of(bytes), kLong);
  CHECK(bytes == "hello");
  const Meshes alone(1);
  CHECK(alone.errors == Texts(1));
  CHECK(alone[0].world_size() == 1);
}

TEST_CASE("A rank has no connection to itself or to a rank that is none", "[mesh]") {
  const Meshes meshes(2);
  std::string bytes(1, '\0');
  for (const int rank : {0, 2, -1}) {
    CHECK_THROWS_AS(meshes[0].send(rank, bytes_of(bytes), kLong), BadInput);
    CHECK_THROWS_AS(meshes[0].receive(rank, writable_bytes_of(bytes), kLong), BadInput);
  }
  meshes[0].send(1, bytes_of("x"), kLong);  // nothing is broken by that
  meshes[1].receive(0, writable_bytes_of(bytes), kLong);
  CHECK(bytes == "x");
}

// --- Peers that are lost
// ---------------------------------------------------------------------------

TEST_CASE("Whoever sends to, or waits for, a rank that died hears its name at once",
          "[mesh][tsan][row67]") {
  Meshes meshes(4);
  const auto begin = Clock::now();
  const Texts errors = run_ranks(4, [&](int rank) {
    std::string bytes(size_t{32} << 20, '\0');  // more than buffers hold
    if (rank == 0) meshes[0].receive(2, writable_bytes_of(bytes), kLong);
    if (rank == 1) meshes[1].send(2, bytes_of(bytes), kLong);
    if (rank == 3) meshes[3].exchange(2, bytes_of(bytes), 2, writable_bytes_of(bytes), kLong);
    if (rank != 2) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    meshes.drop(2);
  });
  CHECK(seconds_since(begin) < kSoon);
  for (const int rank : {0, 1, 3}) {
    CHECK_THAT(errors[size_t(rank)], ContainsSubstring("rank 2 closed the connection"));
    // From here on the stream between the two could be out of step.
    std::string byte(1, '\0');
    CHECK(message_of<PeerLost>([&] { meshes[rank].send((rank + 1) % 4, bytes_of(byte), kLong); }) ==
          errors[size_t(rank)]);
  }
}

TEST_CASE("What a rank sent before it left can still be received", "[mesh][tsan]") {
  Meshes meshes(2);
  meshes[1].send(0, bytes_of("last words"), kLong);
  meshes.drop(1);
  std::string bytes(10, '\0');
  meshes[0].receive(1, writable_bytes_of(bytes), kLong);
  CHECK(bytes == "last words");
  CHECK_THAT(message_of<PeerLost>([&] { meshes[0].receive(1, writable_bytes_of(bytes), kLong); }),
             ContainsSubstring("rank 1 closed the connection"));
}

TEST_CASE("Sending on and on to a rank that is gone is an error, not a signal", "[mesh][tsan]") {
  const auto before = ::signal(SIGPIPE, SIG_DFL);
  Meshes meshes(2);
  meshes.drop(1);
  const auto begin = Clock::now();
  const std::string text = message_of<PeerLost>([&] {
    while (seconds_since(begin) < kSoon) meshes[0].send(1, bytes_of("x"), kLong);
  });
  ::signal(SIGPIPE, before);
  CHECK_THAT(text, ContainsSubstring("rank 1 closed the connection"));
}

TEST_CASE("A rank that hangs is named after the deadline, with what came through",
          "[mesh][tsan][row68]") {
  const Meshes meshes(4);
  meshes[2].send(0, bytes_of("abc"), kLong);
  const auto begin = Clock::now();
  std::string bytes(size_t{32} << 20, '\0');
  CHECK(message_of<PeerLost>([&] { meshes[0].receive(2, writable_bytes_of(bytes), kShort); }) ==
        "rank 2 did not answer within 0.3 s: 3 of 33554432 bytes came");
  CHECK_THAT(message_of<PeerLost>([&] { meshes[1].send(2, bytes_of(bytes), kShort); }),
             ContainsSubstring("rank 2 did not answer within 0.3 s: it took ") &&
                 ContainsSubstring(" of 33554432 bytes"));
  CHECK_THAT(
      message_of<PeerLost>([&] { meshes[3].exchange(1, {}, 2, writable_bytes_of(bytes), kShort); }),
      ContainsSubstring("rank 2 did not answer within 0.3 s"));
  CHECK(seconds_since(begin) >= 3 * kShort);
  CHECK(seconds_since(begin) < kSoon);
}

TEST_CASE("A deadline holds for a rank that sends drop by drop, too", "[mesh][tsan]") {
  const Meshes meshes(2);
  std::atomic<bool> done{false};
  std::thread dripping([&] {
    while (!done) {
      meshes[1].send(0, bytes_of("x"), kLong);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  std::string bytes(1000000, '\0');
  const auto begin = Clock::now();
  const std::string text =
      message_of<PeerLost>([&] { meshes[0].receive(1, writable_bytes_of(bytes), kShort); });
  done = true;
  dripping.join();
  CHECK_THAT(text, ContainsSubstring("rank 1 did not answer within 0.3 s"));
  CHECK(seconds_since(begin) < kSoon);
}

// --- Ranks that do not come together
// ---------------------------------------------------------------

/// What a rank that makes a mesh tells the others, by hand.
void leave_address(Store& store, const std::string& where) {
  store.meet("addresses", where, {}, 0);
}

std::string address_of_rank_0(Store& store) {
  return store.meet("addresses", {}, {0}, kLong).texts.at(0).value();
}

TEST_CASE("A rank that makes no mesh is named after the timeout", "[mesh][tsan]") {
  const Stores stores(4);
  const auto begin = Clock::now();
  const Texts errors = run_ranks(4, [&](int rank) {
    if (rank != 2) TcpMesh(stores[rank], kShort);
  });
  CHECK(seconds_since(begin) < kSoon);
  for (const int rank : {0, 1, 3}) {
    CHECK_THAT(errors[size_t(rank)],
               ContainsSubstring("addresses: rank 2 did not come within") ||
                   ContainsSubstring("gave up: addresses: rank 2 did not come within"));
  }
}

TEST_CASE("A rank that fails while the mesh is made is named at once", "[mesh][tsan]") {
  Stores stores(4);
  const auto begin = Clock::now();
  const Texts errors = run_ranks(4, [&](int rank) {
    if (rank != 3) TcpMesh(stores[rank], kLong);
    if (rank != 3) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto mine = std::move(stores.all[3]);
    fail<BadInput>("bad luck");
  });
  CHECK(seconds_since(begin) < kSoon);
  for (const int rank : {0, 1, 2}) {
    CHECK(errors[size_t(rank)] == "addresses: rank 3 closed the connection");
  }
}

TEST_CASE("A rank that ends before it connects is named at once", "[mesh][tsan]") {
  Stores stores(2);
  const auto begin = Clock::now();
  const Texts errors = run_ranks(2, [&](int rank) {
    if (rank == 0) TcpMesh(stores[0], kLong);
    if (rank == 0) return;
    leave_address(stores[1], "127.0.0.1:1");
    const auto mine = std::move(stores.all[1]);
    fail<BadInput>("bad luck");
  });
  CHECK(seconds_since(begin) < kSoon);
  CHECK_THAT(errors[0], ContainsSubstring("rank 1"));
}

TEST_CASE("A rank that others reach by its host's loopback address only is named", "[mesh]") {
  for (const std::string& own : testing::own_addresses()) {
    const bool loopback = is_loopback(own);
    const Stores stores(3, own);
    const Socket first = listen_on({own, 0}), second = listen_on({"127.0.0.1", 0});
    leave_address(stores[0], first.local_address().text());
    leave_address(stores[1], second.local_address().text());
    const auto connect = [&] { TcpMesh(stores[2], kShort); };
    const std::string error =
        loopback ? message_of<PeerLost>(connect) : message_of<EnvironmentError>(connect);
    CHECK_THAT(error, ContainsSubstring(loopback ? "ranks 0, 1 did not connect to rank 2"
                                                 : "rank 1 can be reached from its own host only"));
  }
}

TEST_CASE("Strangers who come to a rank's port are dropped", "[mesh][tsan][row73]") {
  LOCKSTEP_NEEDS_PROOFS();  // without a key the first who says a rank's number is that rank
  const Stores stores(2);
  std::string moved;
  const Texts errors = run_ranks(2, [&](int rank) {
    std::vector<Socket> strangers;
    if (rank == 1) {
      const Address lower = parse_address(address_of_rank_0(stores[1]), "rank 0's address");
      // As rank 1, without a proof, before it; of no rank; of a job without a key; half of it.
      const auto first = [&](const JobKey& key, int rank) {
        return Handshake::of_caller(key, lower.text(), 0, rank).take_output();
      };
      const JobKey& key = stores[1].key();
      const std::string proof(32, '\0');
      for (const std::string& text :
           Texts{"", "GET / HTTP/1.1\r\n", "LOCK", first(key, 1), first(key, 1) + proof,
                 first(key, 7), first({}, 1) + proof}) {
        strangers.push_back(connect_to(lower, Deadline(kLong)));
        send_all(strangers.back(), bytes_of(text), Deadline(kLong));
      }
    }
    TcpMesh mesh(stores[rank], kLong);
    if (rank == 1) return mesh.send(0, bytes_of("hello"), kLong);
    moved.resize(5);
    mesh.receive(1, writable_bytes_of(moved), kLong);
  });
  CHECK(errors == Texts(2));
  CHECK(moved == "hello");
}

TEST_CASE("Who comes as a rank that is here already, or as the listener, is not taken for it",
          "[mesh][row73]") {
  const Stores stores(3);
  const Socket listener = listen_on({"127.0.0.1", 0});
  std::vector<Socket> callers, met;
  const Texts errors = run_ranks(2, [&](int thread) {
    if (thread == 0) {
      PeerMeeting meeting(stores[0], listener, "here");
      met = meeting.meet(Deadline(kLong), {.check_missing = [](const std::vector<int>&) {}});
      return;
    }
    for (const int rank : {0, 1, 1, 2}) {
      callers.push_back(connect_to(listener.local_address(), Deadline(kLong)));
      prove_to_listener(callers.back(), Handshake::of_caller(stores[0].key(), "here", 0, rank),
                        Deadline(kLong));
    }
  });
  CHECK(errors == Texts(2));
  REQUIRE(met.size() == 3);
  CHECK_FALSE(met[0].is_open());
  CHECK(met[1].peer_address().text() == callers[1].local_address().text());
  CHECK(met[2].peer_address().text() == callers[3].local_address().text());
}

TEST_CASE("A rank whose place at the door was taken comes again, before its proof and after it",
          "[mesh][row73]") {
  for (const bool answers : {false, true}) {
    const Stores stores(2);
    const Socket listeners[] = {listen_on({"127.0.0.1", 0}), listen_on({"127.0.0.1", 0})};
    std::vector<Socket> met[2];
    const Texts errors = run_ranks(2, [&](int rank) {
      PeerMeeting meeting(stores[rank], listeners[rank], "here");
      const auto connect = [&](const Deadline& until) {
        return connect_to(listeners[0].local_address(), until);
      };
      if (rank == 1) meeting.add(0, connect, "here", Deadline(kLong));
      FrontDoor door(listeners[0], stores[0].key(), "here", 0, 2, kLong);
      for (bool one_left = rank == 1; !one_left;) {
        if (answers) door.accept_some();
        one_left = answers ? !door.hear().empty() : accept_from(listeners[0]).has_value();
      }
      met[rank] = meeting.meet(Deadline(kLong), {.check_missing = [](const std::vector<int>&) {}});
    });
    REQUIRE((errors == Texts(2) && met[0].size() == 2 && met[1].size() == 2));
    CHECK(met[0][1].peer_address().text() == met[1][0].local_address().text());
  }
}

TEST_CASE("A flood of strangers does not keep ranks from each other", "[mesh][tsan][row73]") {
  const Stores stores(3);
  std::atomic<bool> done = false;
  std::vector<std::thread> flood;
  for (const std::string kind : {"closing", "silent", "half"}) {
    flood.emplace_back([&stores, &done, kind] {
      const Address lowest = parse_address(address_of_rank_0(stores[2]), "rank 0's address");
      std::vector<Socket> open(100);
      for (size_t next = 0; !done; next = (next + 1) % open.size()) {
        try {
          Socket socket = connect_to(lowest, Deadline(kShort));
          if (kind == "half") {
            Handshake half = Handshake::of_caller(stores[2].key(), lowest.text(), 0, 1);
            send_all(socket, bytes_of(half.take_output()), Deadline(kShort));
          }
          if (kind != "closing") open[next] = std::move(socket);
        } catch (const Error&) {
          // Rank 0 has its mesh, and listens no more.
        }
      }
    });
  }
  const Texts errors = run_ranks(3, [&](int rank) {
    if (rank > 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    TcpMesh(stores[rank], kLong);
  });
  done = true;
  for (std::thread& thread : flood) thread.join();
  CHECK(errors == Texts(3));
}

TEST_CASE("A rank may introduce itself in pieces", "[mesh][tsan]") {
  const Stores stores(2);
  std::string moved(5, '\0');
  const Texts errors = run_ranks(2, [&](int rank) {
    if (rank == 0) {
      TcpMesh mesh(stores[0], kLong);
      return mesh.receive(1, writable_bytes_of(moved), kLong);
    }
    const std::string where = address_of_rank_0(stores[1]);
    leave_address(stores[1], "127.0.0.1:1");
    const Socket socket = connect_to(parse_address(where, "rank 0"), Deadline(kLong));
    Handshake handshake = Handshake::of_caller(stores[1].key(), where, 0, 1);
    const std::string first = handshake.take_output();
    for (size_t at = 0; at < first.size(); at += 7) {
      send_all(socket, bytes_of(first.substr(at, 7)), Deadline(kLong));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    while (handshake.state() == Handshake::State::going) {
      std::string some(handshake.wanted(), '\0');
      receive_all(socket, writable_bytes_of(some), Deadline(kLong));
      handshake.take(some);
    }
    send_all(socket, bytes_of(handshake.take_output() + "hello"), Deadline(kLong));
  });
  CHECK(errors == Texts(2));
  CHECK(moved == "hello");
}

}  // namespace
}  // namespace lockstep
