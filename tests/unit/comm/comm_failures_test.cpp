// Ranks that fail, and ranks that do not come.

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/tasks.h"
#include "tests/unit/comm/comm_test_support.h"

namespace lockstep {
namespace {

using namespace testing::comm;
using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;
using testing::Clock;
using testing::collectives;
using testing::device_ids;
using testing::enqueue;
using testing::Gate;
using testing::kLong;
using testing::message_of;
using testing::numbered;
using testing::Ranks;
using testing::seconds_since;
using Floats = BasicTensor<float>;

}  // namespace

// --- Ranks that fail, and ranks that do not come -------------------------------------------------

TEST_CASE("A rank that failed is reported by every rank's stream, by name", "[comm][tsan]") {
  for (int wrong = 0; wrong < 3; ++wrong) {
    Ranks ranks(device_ids(3));
    const auto x = numbered<float>(ranks, 4, 1);
    enqueue(ranks.streams[wrong], [] { throw DeviceError("a planted fault"); });
    ranks.together(
        [&](Communicator& rank, Stream stream) { rank.all_reduce(stream, x[rank.rank()]); });
    const std::string named = fmt::format("cpu:{} failed: a planted fault", wrong);
    for (int rank = 0; rank < 3; ++rank) {
      const auto synchronize = [&] { ranks.streams[rank].synchronize(); };
      INFO("rank " << wrong << " failed, asked rank " << rank);
      if (rank == wrong) CHECK(message_of<DeviceError>(synchronize) == "a planted fault");
      if (rank != wrong) CHECK(message_of<PeerLost>(synchronize) == named);
    }
  }
}

TEST_CASE("wait() throws what a rank failed of, or the next group does, and no group follows",
          "[comm][tsan]") {
  for (int wrong = 0; wrong < 6; ++wrong) {
    Ranks ranks(device_ids(3));
    const auto barrier = [&] {
      ranks.together([](Communicator& rank, Stream stream) { rank.barrier(stream); });
    };
    enqueue(ranks.streams[wrong % 3], [] { throw DeviceError("a planted fault"); });
    barrier();
    const bool waits = wrong < 3;
    for (const Stream& s : ranks.streams) {
      if (!waits) s.backend().block(s.backend().record());
    }
    const std::string text =
        message_of<Error>([&] { waits ? ranks.world->wait(kLong) : barrier(); });
    INFO("rank " << wrong % 3 << " failed: " << text);
    CHECK_THAT(text, ContainsSubstring("a planted fault"));
    CHECK_THAT(text, ContainsSubstring(fmt::format("cpu:{}", wrong % 3)));
    CHECK(message_of<Error>([&] { const CollectiveGroup next(*ranks.world); }) == text);
  }
}

TEST_CASE("wait() names the rank that did not come, and no group follows", "[comm][tsan][row72]") {
  Gate gate;
  Ranks ranks(device_ids(3));
  const auto x = numbered<float>(ranks, 4, 1);
  CHECK(counts_its_ranks(ranks));
  enqueue(ranks.streams[1], [&] { gate.pass(); });
  const auto all_reduce = [&](Communicator& rank, Stream s) { rank.all_reduce(s, x[rank.rank()]); };
  SECTION("to one collective") { ranks.together(all_reduce); }
  SECTION("to the first of several in a group") {
    ranks.together([&](Communicator& rank, Stream stream) {
      for (int i = 0; i < 3; ++i) all_reduce(rank, stream);
    });
  }
  SECTION("to the first of several groups") {
    for (int i = 0; i < 3; ++i) ranks.together(all_reduce);
  }
  SECTION("to a transfer") {
    ranks.together([&](Communicator& rank, Stream stream) {
      if (rank.rank() == 1) rank.send(stream, x[1], 2);
      if (rank.rank() == 2) rank.receive(stream, x[2], 1);
    });
  }
  const auto begin = Clock::now();
  const std::string text = message_of<PeerLost>([&] { ranks.world->wait(0.2); });
  const double took = seconds_since(begin);
  INFO(text);
  CHECK(took >= 0.2);
  CHECK(took < 10);
  CHECK(text.find('\n') == std::string::npos);
  CHECK_THAT(text, ContainsSubstring("group 2 ") && ContainsSubstring("rank 1 (cpu:1)"));
  CHECK_THAT(text, ContainsSubstring("0.2 s"));
  CHECK_THAT(text, !ContainsSubstring("rank 0 (") && !ContainsSubstring("rank 2 ("));
  CHECK(message_of<PeerLost>([&] { const CollectiveGroup next(*ranks.world); }) == text);
  gate.open();  // the ranks' memory may only go when no task works on it
  for (const Stream& stream : ranks.streams) stream.backend().block(stream.backend().record());
}

TEST_CASE("wait() names all ranks that did not come", "[comm]") {
  Gate gate;
  Ranks ranks(device_ids(4));
  for (const int rank : {0, 3}) enqueue(ranks.streams[rank], [&] { gate.pass(); });
  ranks.together([](Communicator& rank, Stream stream) { rank.barrier(stream); });
  const std::string text = message_of<PeerLost>([&] { ranks.world->wait(0.1); });
  gate.open();
  CHECK_THAT(text, ContainsSubstring("rank 0 (cpu:0), rank 3 (cpu:3)"));
  CHECK_THAT(text, !ContainsSubstring("rank 1") && !ContainsSubstring("rank 2"));
}

TEST_CASE("wait() waits for the groups and for nothing else", "[comm][tsan]") {
  Gate gate;
  std::vector<int> done(2, 0);  // plain: ThreadSanitizer watches
  Ranks ranks(device_ids(2));
  ranks.world->wait(0);  // no group yet
  const auto x = numbered<float>(ranks, 4, 1);
  std::vector<Stream> second;
  for (Device* device : ranks.devices) second.push_back(device->create_stream("second"));
  const auto slow = [&](Stream stream, int rank) {
    enqueue(stream, [&done, rank] {
      std::this_thread::sleep_for(milliseconds(30));
      ++done[rank];
    });
  };
  SECTION("a collective") {
    slow(ranks.streams[0], 0), slow(ranks.streams[1], 1);
    ranks.together([](Communicator& rank, Stream stream) { rank.barrier(stream); });
  }
  SECTION("collectives on several streams of a rank, the last one not the slowest") {
    slow(ranks.streams[0], 0), slow(ranks.streams[1], 1);
    ranks.together([&](Communicator& rank, Stream stream) {
      rank.all_reduce(stream, x[rank.rank()]);
      rank.barrier(second[rank.rank()]);
    });
  }
  SECTION("a transfer") {
    slow(ranks.streams[0], 0), slow(ranks.streams[1], 1);
    ranks.together([&](Communicator& rank, Stream stream) {
      if (rank.rank() == 0) rank.send(stream, x[0], 1);
      if (rank.rank() == 1) rank.receive(stream, x[1], 0);
    });
  }
  SECTION("a slow group before one on other streams") {
    slow(ranks.streams[0], 0), slow(ranks.streams[1], 1);
    ranks.together([](Communicator& rank, Stream stream) { rank.barrier(stream); });
    ranks.together([&](Communicator& rank, Stream) { rank.barrier(second[rank.rank()]); });
  }
  enqueue(ranks.streams[0], [&] { gate.pass(); });  // after the groups: wait() ignores it
  ranks.world->wait(kLong);
  CHECK(done == std::vector<int>{1, 1});
  gate.open();
  ranks.synchronize();
}

TEST_CASE("A world may go while its groups still run", "[comm][tsan]") {
  Gate gate;
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 4, 1);
  enqueue(ranks.streams[1], [&] { gate.pass(); });
  ranks.together(
      [&](Communicator& rank, Stream stream) { rank.all_reduce(stream, x[rank.rank()]); });
  ranks.world.reset();
  gate.open();
  for (const Floats& sum : x) CHECK(sum.to_host() == std::vector<float>(4, 3));
}

}  // namespace lockstep
