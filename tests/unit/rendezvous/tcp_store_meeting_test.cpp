// Everything that prevents ranks from meeting at their store.

#include <sys/socket.h>

#include <string>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/store.h"
#include "common/rendezvous/store_server.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/free_port.h"
#include "tests/support/proofs.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tasks.h"
#include "tests/unit/rendezvous/tcp_store_test_support.h"

namespace lockstep {
namespace {

using namespace testing::store;
using Catch::Matchers::ContainsSubstring;
using testing::Clock;
using testing::kLong;
using testing::kShort;
using testing::kSoon;
using testing::message_of;
using testing::run_ranks;
using testing::seconds_since;
using Texts = std::vector<std::string>;

TEST_CASE("A taken port stops rank 0 at once, with errno, port and a way out", "[store][row60]") {
  const Socket taken = listen_on({kLoopback, 0});
  const Socket taken6 = listen_on({has_ipv6() ? "::1" : kLoopback, 0});  // IPv4 has it free
  for (const auto& [host, socket] : {std::pair("127.0.0.1", &taken), std::pair("0.0.0.0", &taken),
                                     std::pair("0.0.0.0", &taken6)}) {
    const int port = socket->local_address().port;
    StoreOptions options = options_of(0, 2, port);
    options.address.host = host;
    const auto begin = Clock::now();
    CHECK_THAT(message_of<EnvironmentError>([&] { TcpStore store(options); }),
               ContainsSubstring("errno 98: Address already in use") &&
                   ContainsSubstring(std::to_string(port)) && ContainsSubstring("port 0") &&
                   ContainsSubstring("--standalone"));
    CHECK(seconds_since(begin) < kSoon);
  }
}

TEST_CASE("Ranks with a secret meet although a process has the name under which rank 0 offers keys",
          "[store]") {
  LOCKSTEP_NEEDS_PROOFS();
  const int port = testing::free_port();
  const Socket squatter = listen_under(fmt::format("lockstep-key-127.0.0.1:{}", port));
  StoreOptions options = options_of(0, 2, port);
  CHECK_THAT(message_of<EnvironmentError>([&] { TcpStore store(options); }),
             ContainsSubstring("another process has it; give another MASTER_PORT, or a LOCKSTEP"));
  options.key = {JobKey::Source::secret, "0123456789abcdef"};
  const TcpStore rank_0(options);
  options.rank = 1;
  CHECK_NOTHROW(TcpStore(options));
}

/// Rank 1's message when it comes to `listener`, which does `answer` with every connection.
template <class Answer>
std::string error_at(const Socket& listener, Answer answer) {
  std::string error;
  std::atomic<bool> done{false};
  std::thread rank([&] {
    StoreOptions options = options_of(1, 2, listener.local_address().port);
    options.answer_seconds = kShort;
    options.key = testing::some_key();
    error = message_of<Error>([&] { TcpStore store(options); });
    done = true;
  });
  std::vector<Socket> open;
  while (!done) {
    pollfd entry{listener.fd(), POLLIN, 0};
    if (!wait_ready({&entry, 1}, Deadline(0.02))) continue;
    if (auto socket = accept_from(listener)) {
      if (answer(*socket)) open.push_back(std::move(*socket));
    }
  }
  rank.join();
  return error;
}

TEST_CASE("A rank that meets another program on the port says so, long before its timeout",
          "[store][tsan][row60]") {
  const Socket listener = listen_on({kLoopback, 0});
  const std::string port = std::to_string(listener.local_address().port);
  const auto begin = Clock::now();
  const std::string silent = error_at(listener, [](Socket&) { return true; });
  const std::string deaf = error_at(listener, [](Socket&) { return false; });
  const std::string web = error_at(listener, [](Socket& socket) {
    say(socket, "HTTP/1.1 400 Bad Request\r\n\r\n");
    return true;
  });
  CHECK(seconds_since(begin) < 3 * kSoon);
  const std::string expected = "what listens on 127.0.0.1:" + port + " is no store of Lockstep";
  check_all_say({web}, expected);
  // It may also be rank 0, stopped or without descriptors.
  CHECK_THAT(silent, ContainsSubstring("rank 1: nobody answers at 127.0.0.1:" + port) &&
                         ContainsSubstring("0.3 s passed; rank 0 stands still or has no descript"));
  CHECK_THAT(deaf, ContainsSubstring("rank 1: 127.0.0.1:" + port + " closed the connection") &&
                       ContainsSubstring("rank 0 has ended, and says why, or another program"));
  CHECK_THAT(web, ContainsSubstring("another protocol"));
}

TEST_CASE("Ranks that never come are named to all who wait for them", "[store][tsan][row61]") {
  const Host host(5);
  const auto begin = Clock::now();
  const Texts errors = run_ranks(std::vector<int>{0, 2, 4}, [&](int rank) {
    if (rank == 0) return host.store->wait_for_all(kShort);
    host.client(rank)->wait_for_all(kLong);
  });
  CHECK(seconds_since(begin) >= kShort);
  CHECK(seconds_since(begin) < kSoon);
  check_all_say(errors, "missing ranks: 1, 3 (of 5): they did not come within 0.3 s");
  // Too late: it hears the same.
  CHECK_THAT(message_of<PeerLost>([&] { host.client(1); }),
             ContainsSubstring("missing ranks: 1, 3"));
}

TEST_CASE("A rank that never comes is named to rank 0 alone", "[store][tsan][row61]") {
  const Host host(2);
  CHECK_THAT(message_of<PeerLost>([&] { host.store->wait_for_all(kShort); }),
             ContainsSubstring("missing ranks: 1 (of 2)"));
}

TEST_CASE("A long list of missing ranks is cut", "[store][tsan][row61]") {
  const Host host(100);
  CHECK_THAT(message_of<PeerLost>([&] { host.store->wait_for_all(0); }),
             ContainsSubstring("1, 2, 3, 4, ") && ContainsSubstring("10, ... and 89 more"));
}

TEST_CASE("Two processes that claim one rank are reported to all", "[store][tsan][row62]") {
  for (const int world_size : {2, 3, 5}) {
    const Host host(world_size);
    std::vector<int> ranks{1};  // a second time
    for (int rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
    const auto begin = Clock::now();
    const Texts errors = run_ranks(ranks, [&](int rank) {
      const auto client = rank == 0 ? nullptr : host.client(rank);
      TcpStore& store = rank == 0 ? *host.store : *client;
      store.wait_for_all(kLong);
      store.get("what comes next", kLong);  // where the double comes last
    });
    CHECK(seconds_since(begin) < kSoon);
    check_all_say(errors, "rank 1 claimed twice");
  }
}

TEST_CASE("Different world sizes are reported to all, with both", "[store][tsan][row63]") {
  const Host host(2);
  const auto begin = Clock::now();
  const Texts errors = run_ranks(3, [&](int rank) {
    if (rank == 0) return host.store->wait_for_all(kLong);
    StoreOptions options = host.options(rank);
    options.world_size = 3;
    TcpStore(options).wait_for_all(kLong);
  });
  CHECK(seconds_since(begin) < kSoon);
  check_all_say(errors, "WORLD_SIZE is 2 on rank 0 but 3 on rank ");
}

TEST_CASE("Rank 0, whose process takes the store along, hears last of a mistake",
          "[store][row62]") {
  StoreState state(4, "");
  const auto join = [&](int rank) { return state.join({.world_size = 4, .rank = rank}).kind; };
  const auto told = [&] {
    std::vector<int> ranks;
    for (const auto& [rank, reply] : state.take_answers()) ranks.push_back(rank);
    return ranks;
  };
  for (const int rank : {0, 1, 2}) {
    REQUIRE(join(rank) == Reply::Kind::ok);
    state.handle(rank, {.op = Request::Op::wait_for_all, .seconds = kLong});
  }
  CHECK(join(1) == Reply::Kind::bad_input);
  CHECK(told() == std::vector<int>{1, 2});
  CHECK(join(3) == Reply::Kind::bad_input);
  CHECK(told() == std::vector<int>{0});
  // Also where it comes after the mistake, and before a rank that has come asks for anything.
  StoreState late(2, "");
  const auto come = [&](int rank) { return late.join({.world_size = 2, .rank = rank}).kind; };
  REQUIRE(come(1) == Reply::Kind::ok);
  CHECK(come(1) == Reply::Kind::bad_input);
  CHECK(come(0) == Reply::Kind::ok);
  late.handle(0, {.op = Request::Op::wait_for_all, .seconds = kLong});
  CHECK(late.take_answers().empty());
  late.handle(1, {.op = Request::Op::wait_for_all, .seconds = kLong});
  const auto last = late.take_answers();
  REQUIRE(last.size() == 2);
  CHECK((last[0].first == 1 && last[1].first == 0));
  CHECK_THAT(last[1].second.text, ContainsSubstring("rank 1 claimed twice"));
  // Rank 2 of the world that rank 1 believes in may still come; the deadline ends that.
  StoreState other(2, "");
  other.join({.world_size = 2, .rank = 0});
  other.join({.world_size = 3, .rank = 1});
  other.handle(0, {.op = Request::Op::get, .key = "key", .seconds = kLong});
  CHECK(other.take_answers().empty());
  REQUIRE(other.next_deadline().has_value());
  CHECK(other.next_deadline()->seconds_left() <= 1);
  std::this_thread::sleep_until(other.next_deadline()->time());
  other.expire();
  CHECK(other.take_answers().size() == 1);
}

TEST_CASE("Where rank 0 cannot accept ranks, the error that misses them says why",
          "[store][row61]") {
  StoreState state(2, "");
  REQUIRE(state.join({.world_size = 2, .rank = 0}).kind == Reply::Kind::ok);
  state.cannot_accept("cannot accept a connection: Too many open files");
  state.handle(0, {.op = Request::Op::wait_for_all, .seconds = 0});
  state.expire();
  const auto told = state.take_answers();
  REQUIRE(told.size() == 1);
  CHECK_THAT(told[0].second.text,
             ContainsSubstring("missing ranks: 1 (of 2)") &&
                 ContainsSubstring("; rank 0: cannot accept a connection: Too many open files"));
}

TEST_CASE("A job that runs is not ended by a process that comes to it by mistake",
          "[store][row62][row63]") {
  StoreState state(2, "", /*start_seconds=*/0);
  for (const int rank : {0, 1}) {
    REQUIRE(state.join({.world_size = 2, .rank = rank}).kind == Reply::Kind::ok);
    state.handle(rank, {.op = Request::Op::wait_for_all, .seconds = kLong});
  }
  REQUIRE(state.take_answers().size() == 2);
  for (const int world_size : {2, 3}) {
    const Reply reply = state.join({.world_size = world_size, .rank = 1});
    CHECK(reply.kind == Reply::Kind::bad_input);
    CHECK_THAT(reply.text, ContainsSubstring(fmt::format("rank 1 of {}: ", world_size)) &&
                               ContainsSubstring("all of its 2 ranks") &&
                               ContainsSubstring("another MASTER_PORT"));
  }
  state.handle(1, {.op = Request::Op::set, .key = "key", .value = "goes on"});
  CHECK(state.take_answers().at(0).second.kind == Reply::Kind::ok);
}

TEST_CASE("Unknown hosts, refused ports and silence have texts of their own",
          "[store][tsan][row64]") {
  const auto error_of = [](const Address& address) {
    StoreOptions options = options_of(1, 2, address.port);
    options.address.host = address.host;
    options.connect_seconds = kShort;
    return message_of<EnvironmentError>([&] { TcpStore store(options); });
  };
  const Texts unknown{error_of({"no-such-host.invalid", 29500})};
  check_all_say(unknown, "cannot resolve the host name 'no-such-host.invalid'");

  const int closed = listen_on({kLoopback, 0}).local_address().port;
  const auto begin = Clock::now();
  const Texts refused{error_of({kLoopback, closed})};
  check_all_say(refused, fmt::format("cannot connect to 127.0.0.1:{} within 0.3 s: Connection "
                                     "refused: nothing listens there",
                                     closed));
  CHECK(seconds_since(begin) >= kShort);
  CHECK(seconds_since(begin) < kSoon);

  // A listener without room for one more is as silent as a firewall.
  const Socket full = listen_on({kLoopback, 0});
  REQUIRE(::listen(full.fd(), 0) == 0);
  const Socket guest = connect_to(full.local_address(), Deadline(kLong));
  check_all_say({error_of(full.local_address())}, "no answer at all");
}

TEST_CASE("A rank waits for a store that starts late", "[store][tsan][row64]") {
  const int port = listen_on({kLoopback, 0}).local_address().port;
  const Texts errors = run_ranks(2, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    TcpStore store(options_of(rank, 2, port));
    if (rank == 1) store.set("rank 1 came", "");
    store.get("rank 1 came", kLong);
    if (rank == 0) store.get("rank 1 goes", kLong);
    if (rank == 1) store.set("rank 1 goes", "");
  });
  CHECK(errors == Texts(2));
}

TEST_CASE("Impossible options are refused before anything is opened", "[store]") {
  const auto refusal = [](StoreOptions options) {
    return message_of<BadInput>([&] { TcpStore store(options); });
  };
  CHECK_THAT(refusal(options_of(0, 0)), ContainsSubstring("world size is 0"));
  CHECK_THAT(refusal(options_of(2, 2, 80)), ContainsSubstring("rank 2, expected 0 to 1"));
  CHECK_THAT(refusal(options_of(-1, 2, 80)), ContainsSubstring("rank -1"));
  CHECK_THAT(refusal(options_of(1, 2, 0)), ContainsSubstring("port 0 on rank 1"));
}

}  // namespace
}  // namespace lockstep
