// What is special about Gloo (what it computes: ring_transport_test.cpp). All ranks of a group are
// in this process.

#include "common/comm/process/gloo_transport.h"

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/local_store.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using testing::gloo_ranks;
using testing::Ranks;

/// The error of rank 0, which alone makes this call.
std::string error_of_first_rank(Ranks& ranks) {
  const auto x = testing::numbered<int64_t>(ranks, 3, 1);
  ranks.processes[0]->all_reduce(ranks.streams[0], x[0]);
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
  ranks.processes[1].reset();
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

}  // namespace
}  // namespace lockstep
