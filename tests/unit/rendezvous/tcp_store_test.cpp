// The store through which ranks find each other: values, and everything that keeps ranks from
// coming together. Ranks are threads; strangers and dying processes are real.

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "common/rendezvous/store_server.h"
#include "common/rendezvous/store_state.h"
#include "common/rendezvous/tcp_store.h"
#include "common/sockets/connect.h"
#include "common/sockets/transfer.h"
#include "common/sockets/wire.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/process.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tasks.h"

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
using Texts = std::vector<std::string>;

const std::string kLoopback = "127.0.0.1";

/// Options of a rank whose store rank 0 hosts here; rank 0 itself gets port 0.
StoreOptions options_of(int rank, int world_size, int port = 0) {
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

void check_all_say(const Texts& errors, const std::string& text) {
  for (const std::string& error : errors) {
    CHECK_THAT(error, ContainsSubstring(text));
    CHECK(error.find('\n') == error.npos);
  }
}

bool has_closed(const Socket& socket) {
  std::string byte(1, '\0');
  try {
    receive_all(socket, writable_bytes_of(byte), Deadline(kSoon));
  } catch (const ConnectionClosed&) {
    return true;
  } catch (const PeerLost&) {
  }
  return false;
}

std::string hello_bytes(const Hello& hello) {
  return std::string(kStoreMagic) + frame(encode(hello));
}

void say(const Socket& socket, const std::string& text) {
  send_all(socket, bytes_of(text), Deadline(kLong));
}

// --- Values --------------------------------------------------------------------------------------

TEST_CASE("Ranks share what they set, count and wait for", "[store][tsan]") {
  constexpr int kRanks = 5;
  const Host host(kRanks);
  std::vector<int64_t> sums(kRanks);
  Texts values(kRanks);
  const Texts errors = run_ranks(kRanks, [&](int rank) {
    const auto client = rank == 0 ? nullptr : host.client(rank);
    TcpStore& store = rank == 0 ? *host.store : *client;
    store.wait_for_all(kLong);
    const std::string mine = "value " + std::to_string(rank);
    store.set(mine, std::string(3, '\0') + mine);
    store.wait({"value 0", "value 1", "value 2", "value 3", "value 4"}, kLong);
    values[rank] = store.get("value " + std::to_string((rank + 1) % kRanks), kLong);
    for (int i = 0; i < 100; ++i) store.add("count", rank);
    if (store.add("arrived", 1) == kRanks) store.set("done", "");
    store.get("done", kLong);
    sums[rank] = store.add("count", 0);
  });
  CHECK(errors == Texts(kRanks));
  CHECK(sums == std::vector<int64_t>(kRanks, 1000));
  for (int rank = 0; rank < kRanks; ++rank) {
    CHECK(values[rank] == std::string(3, '\0') + "value " + std::to_string((rank + 1) % kRanks));
  }
}

TEST_CASE("A value may be empty or a megabyte, and no more", "[store][tsan]") {
  const Host host(1);
  TcpStore& store = *host.store;
  const std::string large(kLargestValue - 5, 'x');
  store.set("large", large);
  CHECK(store.get("large", 0) == large);
  CHECK_THAT(message_of<BadInput>([&] { store.set("large", large + "x"); }),
             ContainsSubstring("1048577 bytes, expected at most 1048576"));
  CHECK_FALSE(store.check("empty"));
  store.set("empty", "");
  CHECK(store.check("empty"));
  CHECK(store.get("empty", 0).empty());
}

TEST_CASE("Adding goes on from a number that was set, and refuses what is none", "[store][tsan]") {
  const Host host(1);
  TcpStore& store = *host.store;
  CHECK(store.add("n", -3) == -3);
  CHECK(store.get("n", 0) == "-3");
  store.set("n", "9223372036854775807");
  CHECK_THAT(message_of<BadInput>([&] { store.add("n", 1); }), ContainsSubstring("too large"));
  store.set("n", "seven");
  CHECK_THAT(message_of<BadInput>([&] { store.add("n", 1); }),
             ContainsSubstring("no whole number"));
  CHECK(store.get("n", 0) == "seven");
}

TEST_CASE("A value that nobody sets is waited for as long as told, and the store goes on",
          "[store][tsan]") {
  const Host host(2);
  const auto other = host.client(1);
  for (TcpStore* store : {host.store.get(), other.get()}) {
    const auto begin = Clock::now();
    CHECK_THAT(message_of<PeerLost>([&] { store->get("never", kShort); }),
               ContainsSubstring("no rank set 'never' in the store within 0.3 s"));
    CHECK(seconds_since(begin) >= kShort);
    CHECK(seconds_since(begin) < kSoon);
  }
  const auto begin = Clock::now();
  const std::vector<std::string> both{"a", "b"};
  CHECK_THAT(message_of<PeerLost>([&] { host.store->wait(both, kShort); }),
             ContainsSubstring("'a'"));
  CHECK(seconds_since(begin) < kSoon);
  other->set("never", "now");
  CHECK(host.store->get("never", 0) == "now");
}

/// False on a host without IPv6, where listening says so.
bool has_ipv6() {
  try {
    return listen_on({"::1", 0}).is_open();
  } catch (const EnvironmentError& error) {
    CHECK_THAT(error.what(), ContainsSubstring("cannot listen on [::1]:0"));
    return false;
  }
}

TEST_CASE("The store works over IPv6 where the host has it", "[store][tsan]") {
  StoreOptions options = options_of(0, 2);
  options.address.host = has_ipv6() ? "::1" : kLoopback;
  TcpStore store(options);
  options.address = store.address();
  options.rank = 1;
  TcpStore other(options);
  other.set("key", "value");
  CHECK(store.get("key", kLong) == "value");
  CHECK(other.local_address().host == options.address.host);
  CHECK(other.host_address() == store.address());
}

TEST_CASE("A store of several hosts listens on all interfaces, one of this host on loopback only",
          "[store]") {
  const StoreServer everywhere({"0.0.0.0", 0}, 1, "", kLong);
  const StoreServer here({"localhost", 0}, 1, "", kLong);
  CHECK(connect_to({kLoopback, everywhere.port()}, Deadline(kLong)).is_open());
  CHECK(connect_to({"localhost", here.port()}, Deadline(kLong)).is_open());
}

// --- Ranks that do not come together
// ---------------------------------------------------------------

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

/// What rank 1 says when it comes to `listener`, which does `answer` with every connection.
template <class Answer>
std::string error_at(const Socket& listener, Answer answer) {
  std::string error;
  std::atomic<bool> done{false};
  std::thread rank([&] {
    StoreOptions options = options_of(1, 2, listener.local_address().port);
    options.answer_seconds = kShort;
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

// --- Strangers ---------------------------------------------------------------------------------

/// The job still works: rank 1 comes in, and a value goes through.
void check_job_goes_on(const Host& host) {
  const auto other = host.client(1);
  host.store->wait_for_all(kLong);
  other->set("key", "value");
  CHECK(host.store->get("key", kLong) == "value");
}

TEST_CASE("Garbage is dropped and the job goes on", "[store][tsan][row73]") {
  const Host host(2);
  const std::string magic(kStoreMagic);
  const std::string hello = frame(encode(Hello{.world_size = 2, .rank = 1}));
  const Texts garbage{"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                      std::string(100000, '\0'),
                      "\x16\x03\x01\x02",
                      magic + std::string(4, '\xff'),  // a frame of four gigabytes
                      magic + frame("abc"),
                      magic + frame(encode(Hello{.world_size = 2, .rank = 1}) + "more"),
                      magic + frame(std::string(kLargestHello + 1, 'x'))};
  for (const std::string& text : garbage) {
    const Socket stranger = host.stranger();
    try {
      say(stranger, text);
    } catch (const ConnectionClosed&) {  // before the last of it was sent
    }
    CHECK(has_closed(stranger));
  }
  const Socket silent = host.stranger();
  const Socket half = host.stranger();
  say(half, magic + hello.substr(0, hello.size() - 1));
  for (size_t cut = 0; cut < hello.size(); ++cut)
    say(host.stranger(), magic + hello.substr(0, cut));
  check_job_goes_on(host);
}

TEST_CASE("A call that waits for others is given up a little after its own timeout", "[store]") {
  const Socket listener = listen_on({kLoopback, 0});
  StoreOptions options = options_of(1, 2, listener.local_address().port);
  options.late_seconds = kShort;
  // A store that says hello and then nothing, as one whose process is stopped.
  std::optional<Socket> silent;
  std::thread store([&] {
    pollfd entry{listener.fd(), POLLIN, 0};
    if (wait_ready({&entry, 1}, Deadline(kLong))) silent = accept_from(listener);
    if (silent) say(*silent, std::string(kStoreMagic) + frame(encode(Reply{})));
  });
  TcpStore rank(options);
  store.join();
  const auto begin = Clock::now();
  CHECK_THAT(message_of<PeerLost>([&] { rank.get("never", kShort); }),
             ContainsSubstring("did not answer within 0.6 s"));
  CHECK(seconds_since(begin) >= 2 * kShort);
  CHECK(seconds_since(begin) < kSoon);
  CHECK_THROWS_AS(rank.wait_for_all(kLong), PeerLost);  // at once: a late answer would fit nothing
}

TEST_CASE("Who connects and says nothing is dropped after a while", "[store][tsan][row73]") {
  StoreOptions options = options_of(0, 2);
  options.answer_seconds = kShort;
  Host host(2);
  host.store = std::make_unique<TcpStore>(options);
  const auto begin = Clock::now();
  const Socket silent = host.stranger();
  CHECK(has_closed(silent));
  CHECK(seconds_since(begin) >= kShort / 2);
  check_job_goes_on(host);
}

TEST_CASE("Many silent connections do not keep a rank out", "[store][tsan][row73]") {
  const Host host(2);
  std::vector<Socket> scanners;
  for (int i = 0; i < 200; ++i) scanners.push_back(host.stranger());
  check_job_goes_on(host);
  CHECK(has_closed(scanners.front()));
}

TEST_CASE("Random bytes never end the store", "[store][tsan][row73]") {
  const Host host(2);
  std::mt19937 random(1);
  const Hello hello{.world_size = 2, .rank = 5};  // no rank of this world
  for (int i = 0; i < (testing::full_campaign() ? 5000 : 200); ++i) {
    std::string text = hello_bytes(hello);
    if (i % 2 == 0) text += frame(encode(Request{.key = "key", .value = "value"}));
    const size_t at = random() % text.size();
    // Another world size or rank is well-formed, and a mistake of the job.
    if (at >= kStoreMagic.size() + 8 && at < kStoreMagic.size() + 16) continue;
    text[at] = static_cast<char>(text[at] ^ (1 + random() % 255));
    say(host.stranger(), text.substr(0, 1 + random() % text.size()));
  }
  check_job_goes_on(host);
}

TEST_CASE("A rank of another job, or another build, is turned away and the job goes on",
          "[store][tsan][row73]") {
  const Host host(2);
  StoreOptions other = host.options(1);
  other.run_id = "other";
  other.world_size = 7;
  CHECK_THAT(message_of<BadInput>([&] { TcpStore store(other); }),
             ContainsSubstring("another job: its run id is '', this rank's is 'other'"));
  const Socket newer = host.stranger();
  say(newer, hello_bytes({.version = 2, .world_size = 2, .rank = 1}));
  std::string answer(200, '\0');
  CHECK_THROWS_AS(receive_all(newer, writable_bytes_of(answer), Deadline(kSoon)), ConnectionClosed);
  CHECK_THAT(answer, ContainsSubstring("version 1 of its protocol, this rank version 2"));
  check_job_goes_on(host);
}

// --- Ranks that leave --------------------------------------------------------------------------

/// Rank 2's connection, by hand: it can break like that of a process that dies.
Socket bare_rank(const Host& host, int rank) {
  Socket socket = host.stranger();
  say(socket, hello_bytes({.world_size = host.world_size, .rank = rank}));
  std::string magic(kStoreMagic.size(), '\0');
  receive_all(socket, writable_bytes_of(magic), Deadline(kLong));
  return socket;
}

TEST_CASE("Who waits for a value hears at once that a rank died", "[store][tsan]") {
  const Host host(3);
  Socket second = bare_rank(host, 2);
  const auto begin = Clock::now();
  const Texts errors = run_ranks(std::vector<int>{0, 1, 2}, [&](int rank) {
    if (rank == 0) host.store->get("never", kLong);
    if (rank == 1) host.client(1)->get("never", kLong);
    if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(50)), second.close();
  });
  CHECK(seconds_since(begin) < kSoon);
  CHECK_THAT(errors[0], ContainsSubstring("rank 2") && ContainsSubstring("left without a word"));
  CHECK_THAT(errors[1], ContainsSubstring("rank 2") && ContainsSubstring("left without a word"));
  host.store->set("here", "value");
  CHECK(host.store->get("here", kLong) == "value");  // what is there needs nobody
}

TEST_CASE("A rank that leaves in good order disturbs nobody", "[store][tsan]") {
  const Host host(4);
  const auto stays = host.client(3);
  host.client(1)->set("bye 1", "");
  const Texts errors = run_ranks(std::vector<int>{0, 2, 3}, [&](int rank) {
    if (rank == 0) host.store->get("bye 3", kLong);
    if (rank == 2) host.client(2)->set("bye 2", "");
    if (rank != 3) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    stays->set("bye 3", "");
  });
  CHECK(errors == Texts(3));
  host.store->wait_for_all(kLong);
  host.store->wait({"bye 1", "bye 2", "bye 3"}, kLong);
  CHECK_THAT(message_of<PeerLost>([&] { host.store->get("never", 0.05); }),
             ContainsSubstring("no rank set 'never'") && ContainsSubstring("ranks 1, 2 had left"));
}

TEST_CASE("A rank that an exception takes away has died", "[store][tsan]") {
  const Host host(2);
  const Texts errors = run_ranks(std::vector<int>{0, 1}, [&](int rank) {
    if (rank == 0) return host.store->get("never", kLong), void();
    const auto client = host.client(1);
    fail<BadInput>("bad luck");
  });
  CHECK(errors[1] == "bad luck");
  CHECK_THAT(errors[0], ContainsSubstring("rank 1 left without a word"));
}

TEST_CASE("Who waits for all ranks hears at once that one died again", "[store][tsan]") {
  const Host host(3);
  bare_rank(host, 1);
  const auto begin = Clock::now();
  CHECK_THAT(
      message_of<PeerLost>([&] { host.store->wait_for_all(kLong); }),
      ContainsSubstring("rank 1 left without a word before all ranks had come; missing ranks: 2"));
  CHECK(seconds_since(begin) < kSoon);
}

/// A shell command that plays rank 1 of 2: it introduces itself over its descriptor 3.
std::string shell_rank(int port) {
  std::string escaped;
  for (const char c : hello_bytes({.world_size = 2, .rank = 1})) {
    escaped += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  }
  return fmt::format("exec 3<>/dev/tcp/127.0.0.1/{}; printf '{}' >&3; head -c 8 <&3 >/dev/null; ",
                     port, escaped);
}

TEST_CASE("A process that is killed has left, and so has one that talks nonsense",
          "[store][tsan]") {
  for (const std::string end : {"kill -9 $$", "printf '\\x80' >&3; kill -9 $$",
                                "printf '\\xff\\xff\\xff\\xff' >&3; cat <&3"}) {
    const Host host(2);
    std::thread shell([&] {
      testing::run_process({"bash", "-c", shell_rank(host.store->address().port) + end}, kLong);
    });
    std::string waiting = message_of<PeerLost>([&] {
      host.store->wait_for_all(kLong);
      host.store->get("never", kLong);
    });
    shell.join();
    CHECK_THAT(waiting,
               ContainsSubstring("rank 1 left without a word: rank 0 waits in vain for 'never'"));
  }
}

TEST_CASE("A store that goes closes all connections within milliseconds", "[store][tsan]") {
  Host host(3);
  const auto first = host.client(1), second = host.client(2);
  double took = 0;
  const Texts errors = run_ranks(3, [&](int rank) {
    if (rank == 1) first->get("never", kLong);
    if (rank == 2) second->wait_for_all(kLong), second->get("never", kLong);
    if (rank != 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto begin = Clock::now();
    host.store.reset();
    took = seconds_since(begin);
  });
  CHECK(took < kSoon);
  for (const int rank : {1, 2}) {
    CHECK_THAT(errors[rank],
               ContainsSubstring("closed the connection") || ContainsSubstring("rank 0 left"));
  }
  CHECK_THROWS_AS(first->set("key", "value"), PeerLost);
}

TEST_CASE("The next store has the port of the last one at once", "[store][tsan]") {
  int port = 0;
  std::vector<std::unique_ptr<TcpStore>> clients;  // who outlive it leave its side half closed
  for (int i = 0; i < 3; ++i) {
    const TcpStore store(options_of(0, 2, port));
    port = store.address().port;
    clients.push_back(std::make_unique<TcpStore>(options_of(1, 2, port)));
    clients.back()->set("key", "value");
  }
  CHECK(clients.size() == 3);
}

/// The sockets of this process, and of those the ones that a program it starts would get.
std::pair<int, int> count_sockets() {
  int sockets = 0, inherited = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (gone || (!target.starts_with("socket:") && target != "anon_inode:[eventfd]")) continue;
    ++sockets;
    const int flags = ::fcntl(std::stoi(entry.path().filename().string()), F_GETFD);
    if ((flags & FD_CLOEXEC) == 0) ++inherited;
  }
  return {sockets, inherited};
}

TEST_CASE("A store leaves no socket behind, here or in a program that is started", "[store]") {
  const auto before = count_sockets();
  {
    const Host host(2);
    const auto client = host.client(1);
    const auto during = count_sockets();
    CHECK(during.first > before.first + 4);
    CHECK(during.second == before.second);
  }
  CHECK(count_sockets() == before);
}

}  // namespace
}  // namespace lockstep
