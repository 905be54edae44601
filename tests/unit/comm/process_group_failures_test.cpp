// The process group: who is named when a rank is missing, and LOCKSTEP_DEBUG=collectives.

#include "common/comm/process_group.h"

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/tasks.h"
#include "tests/unit/comm/process_group_job.h"

namespace lockstep {
namespace {

using namespace testing::group;
using Catch::Matchers::ContainsSubstring;
using testing::Clock;
using testing::kLong;
using testing::kShort;
using testing::kSoon;
using testing::message_of;
using testing::ScopedEnvironment;
using testing::seconds_since;
using Texts = std::vector<std::string>;

// --- Who is missing ------------------------------------------------------------------------------

/// Returns when it is true; throws if that takes too long.
void await(const std::function<bool()>& is_true) {
  const auto begin = Clock::now();
  while (!is_true()) {
    if (seconds_since(begin) > kLong) fail<EnvironmentError>("waited in vain");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST_CASE("A collective that times out names operation, number and the rank that does not come",
          "[group][gloo][tcp][row68][row72]") {
  for (const std::string& backend : host_backends()) {
    INFO(backend);
    std::atomic<int> failed{0};
    const auto begin = Clock::now();
    const Texts errors =
        Job(3, backend, 2 * kShort)
            .run_connected([&](ProcessGroup& group, Communicator& ranks, Stream stream) {
              reduce(ranks, stream);
              if (group.rank() == 2) return await([&] { return failed == 2; });
              const std::string error = message_of<PeerLost>([&] { reduce(ranks, stream, 87360); });
              ++failed;
              throw PeerLost(error);
            });
    const std::string what = "collective 2 (all_reduce of 87360 f32, sum): ";
    const std::string why = "no answer from rank 2 within 0.6 s";
    for (const int rank : {0, 1}) {
      const std::string mine = fmt::format("rank {}: {}", rank, what);
      // The rank that times out second may hear of the first: the reason is the same.
      const std::string heard = fmt::format("{}rank {} gave up: {}{}", mine, 1 - rank, what, why);
      INFO(errors[rank]);
      CHECK((errors[rank] == mine + why || errors[rank] == heard));
    }
    CHECK(errors[2].empty());
    CHECK(seconds_since(begin) >= 2 * kShort);
    CHECK(seconds_since(begin) < kLong);
  }
}

TEST_CASE("A transfer that times out names the rank that does not come, and nobody else",
          "[group][gloo][tcp][row68]") {
  for (const std::string& backend : host_backends()) {
    const Texts errors =
        Job(3, backend, kShort)
            .run_connected([&](ProcessGroup& group, Communicator& ranks, Stream stream) {
              if (group.rank() > 0)
                return await([&] { return !look(group.store(), "").gone.empty(); });
              const auto x = BasicTensor<int64_t>::from_host(stream, {1}, {1});
              ranks.receive(stream, x, 1);
              stream.synchronize();
            });
    CHECK(errors[0] == "rank 0: receive of 1 i64 from rank 1: no answer from rank 1 within 0.3 s");
  }
}

TEST_CASE("A rank that dies is named at once by all who wait for it", "[group][gloo][tcp][row67]") {
  for (const std::string& backend : host_backends()) {
    for (const int victim : {0, 1, 2, 3}) {
      INFO(backend << ", rank " << victim << " dies");
      const auto begin = Clock::now();
      const Texts errors =
          Job(4, backend)
              .run_connected([&](ProcessGroup& group, Communicator& ranks, Stream stream) {
                reduce(ranks, stream);
                if (group.rank() == victim) fail<BadInput>("has had enough");
                reduce(ranks, stream);
              });
      for (int rank = 0; rank < 4; ++rank) {
        if (rank == victim) continue;
        CHECK_THAT(errors[rank], Catch::Matchers::StartsWith(fmt::format(
                                     "rank {}: collective 2 (all_reduce of 10 f32, sum): ", rank)));
        CHECK_THAT(errors[rank], ContainsSubstring(fmt::format("rank {}", victim)) &&
                                     ContainsSubstring("closed the connection"));
      }
      CHECK(seconds_since(begin) < kSoon);
    }
  }
}

/// Ranks 0 to 3 as a mesh of data=2,tensor=2.
std::string place_of(int rank) { return fmt::format("data {}, tensor {}", rank / 2, rank % 2); }
std::string with_place(int rank) { return fmt::format("rank {} ({})", rank, place_of(rank)); }

TEST_CASE("A rank is named with its place, in a group, too", "[group][gloo][tcp][mesh]") {
  for (const std::string& backend : host_backends()) {
    for (const int victim : {0, 3}) {
      INFO(backend << ", rank " << victim << " dies");
      const Texts errors =
          Job(4, backend)
              .run_connected([&](ProcessGroup& group, Communicator& ranks, Stream stream) {
                group.name_places(place_of, ranks);
                const auto along_data =
                    group.new_group(stream.device(), [](int rank) { return rank % 2; });
                reduce(*along_data, stream);
                reduce(ranks, stream);  // nobody connects any more
                if (group.rank() == victim) fail<BadInput>("has had enough");
                reduce(*along_data, stream);
                reduce(ranks, stream);
              });
      for (int rank = 0; rank < 4; ++rank) {
        if (rank == victim) continue;
        INFO(errors[rank]);
        const bool in_its_group = rank % 2 == victim % 2;
        const std::string who = with_place(rank) + (!in_its_group   ? ""
                                                    : rank % 2 == 0 ? " of ranks 0, 2"
                                                                    : " of ranks 1, 3");
        CHECK_THAT(errors[rank], Catch::Matchers::StartsWith(who + ": collective "));
        CHECK_THAT(errors[rank], ContainsSubstring(with_place(victim)) &&
                                     ContainsSubstring("closed the connection"));
      }
    }
  }
}

TEST_CASE("A rank is named with its place before the mesh is made", "[group][tcp][mesh]") {
  for (const int victim : {0, 3}) {
    INFO("rank " << victim << " dies");
    Job job(4);
    job.options_of_rank = [](int, ProcessGroupOptions& options) { options.place_of = place_of; };
    const Texts died = job.run([&](ProcessGroup& group) {
      if (group.rank() == victim) fail<BadInput>("has had enough");
      group.barrier();
    });
    const Texts failed = job.run([&](ProcessGroup& group) {
      group.together([&] { require(group.rank() != victim, "has had enough"); });
    });
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      INFO(died[rank] << '\n' << failed[rank]);
      CHECK_THAT(died[rank], Catch::Matchers::StartsWith(with_place(rank) + ": "));
      CHECK_THAT(died[rank], ContainsSubstring(with_place(victim)));
      if (victim > 0) CHECK(failed[rank] == with_place(victim) + ": has had enough");
    }
  }
}

TEST_CASE("Missing ranks, and those of a transfer, are named with their places",
          "[group][tcp][mesh]") {
  std::atomic<int> failed{0};
  const Texts errors =
      Job(4, "tcp", kShort)
          .run_connected([&](ProcessGroup& group, Communicator& ranks, Stream stream) {
            group.name_places(place_of, ranks);
            const auto along_data =
                group.new_group(stream.device(), [](int rank) { return rank % 2; });
            if (group.rank() > 1) return await([&] { return failed == 2; });
            const std::string error = message_of<PeerLost>([&] {
              if (group.rank() == 0) return group.barrier();
              const auto x = BasicTensor<int64_t>::from_host(stream, {1}, {1});
              along_data->receive(stream, x, 1);
              stream.synchronize();
            });
            ++failed;
            throw PeerLost(error);
          });
  CHECK_THAT(errors[0], Catch::Matchers::StartsWith(with_place(0) + ": barrier 1: "));
  CHECK_THAT(errors[0], ContainsSubstring(with_place(2) + ", " + with_place(3)) ||
                            ContainsSubstring(with_place(1) + " gave up"));
  CHECK_THAT(errors[1],
             Catch::Matchers::StartsWith(with_place(1) + " of ranks 1, 3: receive of 1 i64 from " +
                                         with_place(3) + ": "));
  CHECK(errors[2].empty());
  CHECK(errors[3].empty());
}

TEST_CASE("A rank that has lost a group keeps nobody waiting in another one",
          "[group][tcp][mesh][tsan]") {
  for (const std::string backend : {"tcp", "shm"}) {
    INFO(backend);
    std::atomic<bool> heard = false;
    const auto begin = Clock::now();
    const Texts errors =
        Job(4, backend).run_connected([&](ProcessGroup& group, Communicator&, Stream stream) {
          const int me = group.rank();
          const auto row = group.new_group(stream.device(), [](int rank) { return rank / 2; }),
                     column = group.new_group(stream.device(), [](int rank) { return rank % 2; });
          reduce(*row, stream);
          if (me == 1) fail<BadInput>("has had enough");
          const std::string error = message_of<PeerLost>([&] {
            if (me == 0) return reduce(*row, stream);  // rank 0 stays, and is awaited by rank 2
            const auto x = BasicTensor<int64_t>::from_host(stream, {1}, {1});
            if (me == 2) column->receive(stream, x, 0);
            if (me == 3) await([&] { return heard.load(); });
            stream.synchronize();
          });
          if (me == 2) heard = true;
          await([&] { return heard.load(); });
          throw PeerLost(error);
        });
    CHECK_THAT(errors[2], ContainsSubstring("receive of 1 i64 from rank 0: ") &&
                              ContainsSubstring("rank 1 closed the connection"));
    CHECK(seconds_since(begin) < kSoon);
  }
}

TEST_CASE("A rank that comes too late hears why the first one gave up", "[group][tcp][tsan]") {
  const Texts errors =
      Job(3, "tcp", kShort)
          .run_connected([&](ProcessGroup& group, Communicator& ranks, Stream stream) {
            if (group.rank() != 1) {
              await([&] { return !look(group.store(), "").gone.empty(); });
            }
            if (group.rank() != 2) reduce(ranks, stream);
          });
  const std::string what = "collective 1 (all_reduce of 10 f32, sum): ";
  const std::string why = what + "no answer from ranks 0, 2 within 0.3 s";
  CHECK(errors[1] == "rank 1: " + why);
  CHECK(errors[0] == "rank 0: " + what + "rank 1 gave up: " + why);
  CHECK(errors[2].empty());
}

TEST_CASE("Ranks stuck in different collectives are told what the other one called",
          "[group][tcp][shm][tsan][row71]") {
  for (const std::string backend : {"tcp", "shm"}) {
    const Texts errors =
        Job(2, backend, kShort)
            .run_connected([&](ProcessGroup& group, Communicator& ranks, Stream stream) {
              const auto x = BasicTensor<float>::from_host(stream, {10}, std::vector<float>(10));
              if (group.rank() == 0) ranks.all_reduce(stream, x);
              if (group.rank() == 1) ranks.broadcast(stream, x, 0);
              stream.synchronize();
            });
    // The rank that gives up second may hear it in the other's words, which name both calls, too.
    CHECK_THAT(errors[0], ContainsSubstring("collective 1 (broadcast of 10 f32, root 0)") &&
                              ContainsSubstring("; LOCKSTEP_DEBUG=collectives"));
    CHECK_THAT(errors[1], ContainsSubstring("collective 1 (all_reduce of 10 f32, sum)") &&
                              ContainsSubstring("; LOCKSTEP_DEBUG=collectives"));
  }
}

// --- Ranks that make different calls
// ---------------------------------------------------------------

/// Two calls that do not fit together, with their names.
struct Mismatch {
  std::function<void(Communicator&, Stream)> first, other;
  std::string first_name, other_name;
};

template <class T>
BasicTensor<T> ones(Stream stream, int64_t count) {
  return BasicTensor<T>::from_host(stream, {count}, std::vector<T>(size_t(count), T(1)));
}

std::vector<Mismatch> mismatches() {
  const auto sum = [](Communicator& ranks, Stream s) { ranks.all_reduce(s, ones<float>(s, 10)); };
  const std::string sum_name = "all_reduce of 10 f32, sum";
  const auto root = [](int rank) {
    return [=](Communicator& ranks, Stream s) { ranks.broadcast(s, ones<float>(s, 10), rank); };
  };
  return {
      {sum, [](auto& ranks, Stream s) { ranks.all_reduce(s, ones<float>(s, 12)); }, sum_name,
       "all_reduce of 12 f32, sum"},
      {sum, [](auto& ranks, Stream s) { ranks.all_reduce(s, ones<double>(s, 10)); }, sum_name,
       "all_reduce of 10 f64, sum"},
      {sum,
       [](auto& ranks, Stream s) { ranks.all_reduce(s, ones<float>(s, 10), Reduction::average); },
       sum_name, "all_reduce of 10 f32, average"},
      {root(0), root(2), "broadcast of 10 f32, root 0", "broadcast of 10 f32, root 2"},
      {sum, root(1), sum_name, "broadcast of 10 f32, root 1"},
      {[](auto& ranks, Stream s) { ranks.barrier(s); }, sum, "barrier", sum_name},
  };
}

TEST_CASE("In shared memory nobody takes another call's numbers for those of its own",
          "[group][shm][row71]") {
  for (const Mismatch& mismatch : mismatches()) {
    INFO(mismatch.first_name << " and " << mismatch.other_name);
    const Texts errors =
        Job(3, "shm").run_connected([&](ProcessGroup& group, Communicator& ranks, Stream stream) {
          reduce(ranks, stream);
          (group.rank() == 1 ? mismatch.other : mismatch.first)(ranks, stream);
          stream.synchronize();
        });
    for (int rank = 0; rank < 3; ++rank) {
      CHECK_THAT(errors[rank],
                 ContainsSubstring(rank == 1 ? mismatch.first_name : mismatch.other_name));
    }
  }
}

TEST_CASE("With LOCKSTEP_DEBUG=collectives a difference is an error on all ranks, with both calls",
          "[group][gloo][tcp][row71]") {
  const ScopedEnvironment debug("LOCKSTEP_DEBUG", "collectives");
  for (const std::string& backend : host_backends()) {
    for (const Mismatch& mismatch : mismatches()) {
      INFO(backend << ": " << mismatch.first_name << " and " << mismatch.other_name);
      const Texts errors =
          Job(3, backend)
              .run_connected([&](ProcessGroup& group, Communicator& ranks, Stream stream) {
                reduce(ranks, stream);
                (group.rank() == 1 ? mismatch.other : mismatch.first)(ranks, stream);
                const std::string error = message_of<PeerLost>([&] { stream.synchronize(); });
                throw PeerLost(error);
              });
      for (int rank = 0; rank < 3; ++rank) {
        const std::string& called = rank == 1 ? mismatch.other_name : mismatch.first_name;
        CHECK(errors[rank] ==
              fmt::format("rank {}: collective 2 ({}): rank 0 called {}, rank 1 called {}; all "
                          "ranks must make the same calls in the same order",
                          rank, called, mismatch.first_name, mismatch.other_name));
      }
    }
  }
}

TEST_CASE("With LOCKSTEP_DEBUG=collectives calls that fit together compute what they did",
          "[group][gloo][tcp][row71]") {
  const ScopedEnvironment debug("LOCKSTEP_DEBUG", "collectives");
  for (const std::string& backend : host_backends()) {
    const Texts errors =
        Job(2, backend).run_connected([&](ProcessGroup& group, Communicator& ranks, Stream stream) {
          const int me = group.rank();
          const auto x = BasicTensor<int64_t>::from_host(stream, {1}, {me + 1});
          const auto all = BasicTensor<int64_t>::from_host(stream, {2}, {0, 0});
          for (int i = 0; i < 3; ++i) {
            ranks.all_reduce(stream, x);  // 3, 6, 12
            ranks.broadcast(stream, x, 1);
            ranks.open_group();
            ranks.send(stream, x, 1 - me);
            ranks.receive(stream, Elements(all).part(1, 1), 1 - me);
            ranks.close_group();
            ranks.barrier(stream);
          }
          ranks.all_gather(stream, x, all);
          require(all.to_host() == std::vector<int64_t>{12, 12}, "another result");
        });
    CHECK(errors == Texts(2));
  }
}

}  // namespace
}  // namespace lockstep
