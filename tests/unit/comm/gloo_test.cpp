// What is special about Gloo (for what it computes see transports_test.cpp). All ranks of a group
// are in this process.

#include "common/comm/host_transport.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <iostream>
#include <map>
#include <sstream>

#include "common/options/report.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/wire.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/local_store.h"
#include "tests/support/process.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using testing::gloo_ranks;
using testing::Ranks;

/// The error of rank 0, which alone makes this call.
std::string error_of_first_rank(Ranks& ranks) {
  const auto x = testing::numbered<int64_t>(ranks, 3, 1);
  ranks.comms[0]->all_reduce(ranks.streams[0], x[0]);
  const std::string text = testing::message_of<PeerLost>([&] { ranks.streams[0].synchronize(); });
  CHECK_THAT(
      text, Catch::Matchers::StartsWith("rank 0: collective 1 (all_reduce of 3 i64, sum): Gloo: "));
  return text;
}

TEST_CASE("With Gloo a rank that does not come is missed in time", "[comm][gloo][row72]") {
  Ranks ranks = gloo_ranks(2, 0.5);
  const auto begin = testing::Clock::now();
  CHECK_THAT(error_of_first_rank(ranks), Catch::Matchers::ContainsSubstring("Timed out"));
  CHECK(testing::seconds_since(begin) >= 0.4);
  CHECK(testing::seconds_since(begin) < 10);
}

TEST_CASE("With Gloo a rank that has gone is noticed at once", "[comm][gloo][row67]") {
  Ranks ranks = gloo_ranks(2, 60);
  ranks.comms[1].reset();
  const auto begin = testing::Clock::now();
  CHECK_THAT(error_of_first_rank(ranks), Catch::Matchers::ContainsSubstring("closed"));
  CHECK(testing::seconds_since(begin) < 10);
}

TEST_CASE("What Gloo prints while it connects stays out of the program's output", "[comm][gloo]") {
  testing::LocalStore store;
  RendezvousStore loud = store.view();
  loud.set = [&](const std::string& key, const std::string& value) {
    std::cout << "Rank 0 is connected to 1 peer ranks\n";
    store.set(key, value);
  };
  std::ostringstream out, err;
  std::streambuf* const before_out = std::cout.rdbuf(out.rdbuf());
  std::streambuf* const before_err = std::cerr.rdbuf(err.rdbuf());
  connect_gloo(0, 1, loud, "127.0.0.1", 20);
  std::cout << "the program's own\n";
  std::cerr.rdbuf(before_err);
  std::cout.rdbuf(before_out);
  CHECK(out.str() == "the program's own\n");
  CHECK_THAT(err.str(), Catch::Matchers::ContainsSubstring("connected to 1 peer"));
}

/// The signals that each thread of this process holds back, by its id.
std::map<std::string, uint64_t> blocked_signals() {
  std::map<std::string, uint64_t> blocked;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(thread.path() / "status");
    for (std::string line; std::getline(status, line);) {
      if (!line.starts_with("SigBlk:")) continue;
      blocked[thread.path().filename()] = std::stoull(line.substr(7), nullptr, 16);
    }
  }
  return blocked;
}

TEST_CASE("Gloo's thread is not ended by SIGPIPE, and nobody else's signals change",
          "[comm][gloo][row67]") {
  const auto before = blocked_signals();
  testing::LocalStore store;
  const auto transport = connect_gloo(0, 1, store.view(), "127.0.0.1", 20);
  transport->run({}, 1);
  size_t threads_of_gloo = 0;
  for (const auto& [thread, blocked] : blocked_signals()) {
    const bool holds_back = (blocked >> (SIGPIPE - 1) & 1) != 0;
    if (before.contains(thread)) {
      CHECK(blocked == before.at(thread));
    } else {
      CHECK(holds_back);
      ++threads_of_gloo;
    }
  }
  CHECK(threads_of_gloo > 0);
}

/// The ports of 127.0.0.1 in what Gloo tells the other ranks: a sockaddr_in for each connection.
std::vector<int> ports_in(const std::string& told) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(told[i]); };
  std::vector<int> ports;
  for (size_t i = 0; i + 8 <= told.size(); ++i) {
    const bool found = byte(i) == AF_INET && byte(i + 1) == 0 && byte(i + 4) == 127 &&
                       byte(i + 5) == 0 && byte(i + 6) == 0 && byte(i + 7) == 1;
    if (found) ports.push_back(256 * byte(i + 2) + byte(i + 3));
  }
  return ports;
}

/// Rank 0 connects to a rank that says where it is and does no more: what rank 0 throws. Nothing if
/// it is the other rank that connects: the ports, which the system chooses, decide that.
std::string error_beside_silent_rank(double timeout_seconds) {
  testing::LocalStore store;
  std::promise<void> over;
  RendezvousStore silent = store.view();
  silent.get = [&](const std::string& key) {
    const std::string value = store.get(key);
    if (!ports_in(value).empty()) {
      over.get_future().wait();
      fail<PeerLost>("too late");
    }
    return value;
  };
  const auto rank_1 = std::async(std::launch::async, [&] {
    CHECK_THROWS_AS(connect_gloo(1, 2, silent, "127.0.0.1", timeout_seconds), PeerLost);
  });
  std::string text;
  try {
    connect_gloo(0, 2, store.view(), "127.0.0.1", timeout_seconds);
  } catch (const PeerLost& error) {
    text = error.what();
  }
  over.set_value();
  return text;
}

TEST_CASE("A rank that does not come to connect is missed in the time that was asked for",
          "[comm][gloo][row68]") {
  std::string text;
  const auto begin = testing::Clock::now();
  for (int trial = 0; trial < 20 && text.empty(); ++trial) text = error_beside_silent_rank(2);
  if (!text.empty()) CHECK_THAT(text, Catch::Matchers::ContainsSubstring("timeout"));
  CHECK(testing::seconds_since(begin) < 9);  // Gloo's own patience is 5 times as long
}

/// Two ranks add up ones, after a stranger has said `text` on every port that Gloo opened.
void check_sum_among_strangers(const std::string& text) {
  testing::LocalStore store;
  std::vector<Socket> strangers;
  RendezvousStore told = store.view();
  told.set = [&](const std::string& key, const std::string& value) {
    for (const int port : ports_in(value)) {
      strangers.push_back(connect_to({"127.0.0.1", port}, Deadline(testing::kLong)));
      send_all(strangers.back(), bytes_of(text), Deadline(testing::kLong));
    }
    store.set(key, value);
  };
  const RendezvousStore others = store.view();
  Ranks ranks(2, [&](int rank) {
    return connect_gloo(rank, 2, rank == 0 ? told : others, "127.0.0.1", 1);
  });
  const auto x = testing::numbered<int64_t>(ranks, 1, 1);
  for (int rank = 0; rank < 2; ++rank) {
    ranks.comms[rank]->all_reduce(ranks.streams[rank], x[rank]);
  }
  require(!strangers.empty(), "no port was found");
  require(x[0].to_host() == x[1].to_host(), "two sums");
}

TEST_CASE("A stranger on Gloo's ports may end the job, with an error, and changes no number",
          "[comm][gloo][row73]") {
  if (const char* text = std::getenv("LOCKSTEP_STRANGER")) {  // in a process of its own
    report_uncaught_errors();                                 // which Gloo's own thread may end
    try {
      check_sum_among_strangers(text);
    } catch (...) {
      std::_Exit(report_current_exception());
    }
    std::_Exit(0);
  }
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  for (const std::string& text : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(400, '\xff'),
                                  std::string(400, '\x01'), std::string()}) {
    const testing::ProcessResult run = testing::run_process(
        {"env", "-u", "LOCKSTEP_TEST_LOG", program, "A stranger on Gloo's ports*"},
        testing::kDeadline, {{"LOCKSTEP_STRANGER", text}});
    INFO(run.out << run.err);
    CHECK_FALSE(run.timed_out);
    if (run.status == 0) continue;  // this Gloo has turned the stranger away
    CHECK((run.status == 1 || run.status == 2));
    CHECK_THAT(run.err, Catch::Matchers::StartsWith("error: ") &&
                            !Catch::Matchers::ContainsSubstring("two sums") &&
                            !Catch::Matchers::ContainsSubstring("no port"));
  }
}

}  // namespace
}  // namespace lockstep
