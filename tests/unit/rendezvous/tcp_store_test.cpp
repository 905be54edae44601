// The store through which ranks find each other: values, strangers, and ranks that leave. Ranks are
// threads; strangers and dying processes are real.

#include <fcntl.h>

#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "common/rendezvous/agreement.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/store.h"
#include "common/rendezvous/store_server.h"
#include "common/rendezvous/wire.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/own_addresses.h"
#include "tests/support/process.h"
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

// --- Values --------------------------------------------------------------------------------------

TEST_CASE("Ranks share what they set and wait for", "[store][tsan]") {
  constexpr int kRanks = 5;
  const Host host(kRanks);
  Texts values(kRanks);
  const Texts errors = run_ranks(kRanks, [&](int rank) {
    const auto client = rank == 0 ? nullptr : host.client(rank);
    TcpStore& store = rank == 0 ? *host.store : *client;
    store.wait_for_all(kLong);
    const std::string mine = "value " + std::to_string(rank);
    store.set(mine, std::string(3, '\0') + mine);
    values[rank] = store.get("value " + std::to_string((rank + 1) % kRanks), kLong);
    store.meet("all have read", "", all_ranks(store), kLong);
  });
  CHECK(errors == Texts(kRanks));
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
  CHECK_THROWS_AS(store.get("empty", 0), PeerLost);
  store.set("empty", "");
  CHECK(store.get("empty", 0).empty());
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
  other->set("never", "now");
  CHECK(host.store->get("never", 0) == "now");
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
  CHECK(interface_of("localhost") == "localhost");
  CHECK(is_own_address("127.0.0.5"));
  // No address of this host, its name, no interface alone, nothing that is an address.
  for (const std::string host : {"192.0.2.77", "node7.example", "0.0.0.0", "::", "127.0.0.5.6"}) {
    CHECK_FALSE(is_own_address(host));
  }
  CHECK(interface_of("192.0.2.77").empty());
  for (const std::string& own : testing::own_addresses()) CHECK(interface_of(own) == own);
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
  LOCKSTEP_NEEDS_PROOFS();  // without a key some of it is a rank's
  const Host host(2);
  const JobKey& key = host.store->key();
  const std::string first = first_message(key, 1), magic(kHandshakeMagic);
  const Texts garbage{"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                      std::string(100000, '\0'),
                      "\x16\x03\x01\x02",
                      magic + std::string(4, '\xff'),                    // another version
                      first_message({}, 1),                              // no key
                      first + std::string(32, 'x'),                      // a wrong proof
                      first_message(key, 1 << 30) + std::string(32, 0),  // of no rank
                      hello_bytes({.world_size = 2, .rank = 1})};
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
  say(half, first);
  for (size_t cut = 0; cut < first.size(); ++cut) say(host.stranger(), first.substr(0, cut));
  check_job_goes_on(host);
}

TEST_CASE("Whoever has the key and talks nonsense is dropped, too", "[store][tsan][row73]") {
  const Host host(2);
  const std::string hello = encode(Hello{.world_size = 2, .rank = 1});
  for (const std::string& text :
       {std::string(4, '\xff'), frame("abc"), frame(hello + "more"),  // first: four gigabytes
        frame(encode(Hello{.world_size = 2, .rank = 0})),             // it has proven to be rank 1
        frame(std::string(kLargestHello + 1, 'x'))}) {
    const Socket rank = host.stranger();
    prove_to_listener(rank, Handshake::of_caller(host.store->key(), kStoreMeeting, 0, 1),
                      Deadline(kLong));
    say(rank, text);
    CHECK(has_closed(rank));
  }
  check_job_goes_on(host);
}

TEST_CASE("A call that waits for others is given up a little after its own timeout", "[store]") {
  const Socket listener = listen_on({kLoopback, 0});
  StoreOptions options = options_of(1, 2, listener.local_address().port);
  options.late_seconds = kShort;
  options.key = testing::some_key();
  // A store that says hello and then nothing, as one whose process is stopped.
  std::optional<Socket> silent;
  std::thread store([&] {
    pollfd entry{listener.fd(), POLLIN, 0};
    if (wait_ready({&entry, 1}, Deadline(kLong))) silent = accept_from(listener);
    if (!silent) return;
    prove_to_caller(*silent, options.key);
    say(*silent, frame(encode(Reply{})));
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

TEST_CASE("Nor do many who come in and do not say who they are", "[store][row73]") {
  const Host host(2, kEverywhere);  // without a key anybody comes in
  std::vector<Socket> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(host.stranger());
    say(strangers.back(), first_message({}, 1) + std::string(32, '\0'));
  }
  check_job_goes_on(host);
  CHECK(has_closed(strangers.front()));
}

TEST_CASE("Random bytes never end the store", "[store][tsan][row73]") {
  const Host host(2, kEverywhere);  // without a key more of the bytes are read
  const size_t world_size = kFirstSize + 32 + kFrameHead;
  std::mt19937 random(1);
  const Hello hello{.world_size = 2, .rank = 5};  // no rank of this world
  for (int i = 0; i < (testing::full_campaign() ? 5000 : 200); ++i) {
    std::string text = hello_bytes(hello);
    if (i % 2 == 0) text += frame(encode(Request{.key = "key", .value = "value"}));
    const size_t at = random() % text.size();
    if (world_size <= at && at < world_size + 4) continue;  // well-formed, and a mistake of the job
    text[at] = static_cast<char>(text[at] ^ (1 + random() % 255));
    say(host.stranger(), text.substr(0, 1 + random() % text.size()));
  }
  check_job_goes_on(host);
}

TEST_CASE("A rank of another job, or another build, is turned away and the job goes on",
          "[store][tsan][row73]") {
  Host host(2);
  StoreOptions mine = options_of(0, 2);
  mine.run_id = "mine";
  host.store = std::make_unique<TcpStore>(mine);
  host.run_id = mine.run_id;
  StoreOptions other = host.options(1);
  other.run_id = "other";
  other.world_size = 7;
  const std::string error = message_of<BadInput>([&] { TcpStore store(other); });
  CHECK_THAT(error, ContainsSubstring("another job: its run id (TORCHELASTIC_RUN_ID) is not that"));
  CHECK(error.find("mine") == error.npos);  // whoever asks could then join
  const Socket newer = host.stranger();
  std::string newer_first = first_message(host.store->key(), 1);
  ++newer_first[kHandshakeMagic.size()];
  say(newer, newer_first);
  CHECK(has_closed(newer));
  check_job_goes_on(host);
}

// --- Ranks that leave --------------------------------------------------------------------------

/// Rank 2's connection, by hand: it can break like that of a process that dies.
Socket bare_rank(const Host& host, int rank) {
  Socket socket = host.stranger();
  prove_to_listener(socket, Handshake::of_caller(host.store->key(), kStoreMeeting, 0, rank),
                    Deadline(kLong));
  say(socket, frame(encode(Hello{.world_size = host.world_size, .rank = rank})));
  std::string reply(kReplySize, '\0');
  receive_all(socket, writable_bytes_of(reply), Deadline(kLong));
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
  for (const std::string bye : {"bye 1", "bye 2", "bye 3"}) host.store->get(bye, kLong);
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
  return fmt::format("exec 3<>/dev/tcp/127.0.0.1/{}; printf '{}' >&3; head -c {} <&3 >/dev/null; ",
                     port, escaped, kAnswerSize + kReplySize);
}

TEST_CASE("A process that is killed has left, and so has one that talks nonsense",
          "[store][tsan]") {
  for (const std::string end : {"kill -9 $$", "printf '\\x80' >&3; kill -9 $$",
                                "printf '\\xff\\xff\\xff\\xff' >&3; cat <&3"}) {
    const Host host(2, kEverywhere);  // bash can prove no key
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
