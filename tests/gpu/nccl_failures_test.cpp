// NCCL ranks that fail, and ranks that do not come.

#include <filesystem>

#include "common/core/stream_backend.h"
#include "tests/gpu/gpu_test_support.h"
#include "tests/gpu/nccl_test_support.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/stage.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using namespace testing::nccl;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using testing::Clock;
using testing::kLong;
using testing::message_of;
using testing::numbered;
using testing::occupy;
using testing::Ranks;
using testing::ScopedEnvironment;
using testing::seconds_since;

// --- Ranks that fail, and ranks that do not come -------------------------------------------------

TEST_CASE("NCCL ranks that do not find each other in time are named, and others can follow",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  const std::string text = message_of<PeerLost>([&] { make_nccl_world(ranks.devices, 0); });
  INFO(text);
  CHECK_THAT(text, ContainsSubstring("rank 0 (cuda:0), rank 1 (cuda:1) not ready within 0 s"));
  const auto x = numbered<float>(ranks, 5, 1);
  all_reduce(ranks, x);
  CHECK(x[0].to_host() == std::vector<float>(5, 3));
}

TEST_CASE("A rank that NCCL never sees ends at the deadline", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  LOCKSTEP_NEEDS_THE_MODEL(ranks);
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclCommInitRankConfig:7:2:async");
  const auto begin = Clock::now();
  const std::string text = message_of<PeerLost>([&] { make_nccl_world(ranks.devices, 0.1); });
  CHECK_THAT(text, ContainsSubstring("not ready within 0.1 s"));
  CHECK(seconds_since(begin) < 5);
}

TEST_CASE("An NCCL rank that does not come is named, the others are freed", "[cuda][comm][row72]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  const auto x = numbered<float>(ranks, 5, 1);
  all_reduce(ranks, x);
  ranks.world->wait(kLong);
  occupy(ranks.streams[1], 0.5);
  for (int i = 0; i < 3; ++i) all_reduce(ranks, x);
  const auto begin = Clock::now();
  const std::string text = message_of<PeerLost>([&] { ranks.world->wait(0.05); });
  INFO(text);
  CHECK(seconds_since(begin) < 10);
  CHECK_THAT(text, StartsWith("group 2 of collectives (all_reduce of 5 f32, sum): rank 1 (cuda:1) "
                              "did not come within 0.05 s"));
  CHECK_THAT(text, !ContainsSubstring("rank 0"));
  CHECK(message_of<PeerLost>([&] { all_reduce(ranks, x); }) == text);
  for (const Stream& stream : ranks.streams) {  // and nobody takes what is there for a result
    CHECK(message_of<PeerLost>([&] { stream.synchronize(); }) == text);
  }
}

TEST_CASE("An error that NCCL notices in the background ends all ranks", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  LOCKSTEP_NEEDS_THE_MODEL(ranks);
  const auto x = numbered<float>(ranks, 5, 1);
  occupy(ranks.streams[1], 0.05);  // so that it is not noticed before the group has closed
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclAllReduce:6:2:async");  // rank 1's call
  const auto begin = Clock::now();
  const std::string text = message_of<PeerLost>([&] {
    all_reduce(ranks, x);
    ranks.world->wait(kLong);
  });
  INFO(text);
  CHECK(seconds_since(begin) < 5);  // not at the deadline
  CHECK_THAT(text, ContainsSubstring("group 1 of collectives (all_reduce of 5 f32, sum)"));
  CHECK_THAT(text, ContainsSubstring("rank 1 (cuda:1)") && ContainsSubstring("network error"));
  CHECK(text.find('\n') == std::string::npos);
  for (const Stream& stream : ranks.streams) CHECK_THROWS_AS(stream.synchronize(), PeerLost);
}

TEST_CASE("What NCCL's host asks the GPU for errors does not grow with the groups in flight",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  LOCKSTEP_NEEDS_THE_MODEL(ranks);
  const auto x = numbered<float>(ranks, 5, 1);
  all_reduce(ranks, x);
  ranks.world->wait(kLong);
  constexpr int kGroups = 40, kQuestions = 5;  // for each group: asking all would take about 40
  testing::Gate gate;
  ranks.streams[0].backend().host_task("gate", [&] { gate.pass(); });
  {
    const ScopedEnvironment fault("CUDA_MODEL_FAULT",
                                  fmt::format("cudaEventQuery:719:{}", kGroups * kQuestions));
    CHECK_NOTHROW([&] {
      for (int i = 0; i < kGroups; ++i) all_reduce(ranks, x);
    }());
  }
  gate.open();
  CHECK_NOTHROW(ranks.world->wait(kLong));
}

TEST_CASE("A call that NCCL refuses breaks the world with NCCL's words", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  LOCKSTEP_NEEDS_THE_MODEL(ranks);
  const auto x = numbered<float>(ranks, 5, 1);
  std::string text;
  {
    const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclAllReduce:3:2");
    text = message_of<PeerLost>([&] { all_reduce(ranks, x); });
  }
  CHECK_THAT(text, ContainsSubstring("rank 1 (cuda:1): ncclAllReduce: internal error") &&
                       ContainsSubstring("planted by CUDA_MODEL_FAULT"));
  CHECK(message_of<PeerLost>([&] { all_reduce(ranks, x); }) == text);
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclGetUniqueId:2");
  CHECK_THAT(message_of<PeerLost>([&] { make_nccl_world(ranks.devices); }),
             ContainsSubstring("ncclGetUniqueId: unhandled system error"));
}

TEST_CASE("A rank whose stream failed is named to all, at once", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  for (const bool before : {true, false}) {
    const Ranks ranks = nccl_ranks(2);
    LOCKSTEP_NEEDS_THE_MODEL(ranks);
    const auto x = numbered<float>(ranks, 5, 1);
    const auto fail_rank_1 = [&] {
      const ScopedEnvironment fault("CUDA_MODEL_FAULT",  // the first call in either case
                                    before ? "cudaMemcpyAsync:719" : "cudaMemcpyAsync:719:1");
      ranks.streams[1].copy(x[1].data(), x[1].data(), 4);
    };
    const auto begin = Clock::now();
    const std::string text = message_of<PeerLost>([&] {
      if (before) fail_rank_1();
      occupy(ranks.streams[0], 0.02);
      all_reduce(ranks, x);
      if (!before) fail_rank_1();
      ranks.world->wait(kLong);
    });
    INFO(text);
    CHECK(seconds_since(begin) < 5);
    CHECK_THAT(text, ContainsSubstring("group 1 of collectives") &&
                         ContainsSubstring("rank 1 (cuda:1) failed: ") &&
                         ContainsSubstring("cudaErrorLaunchFailure"));
    CHECK(message_of<PeerLost>([&] { ranks.streams[0].synchronize(); }) == text);
  }
}

TEST_CASE("The child of the next case: cuda:1 fails, the host waits for cuda:0", "[.gpu-is-lost]") {
  const Ranks ranks = nccl_ranks(2);
  const auto x = numbered<float>(ranks, 5, 1);
  ranks.streams[1].synchronize();
  {
    occupy(ranks.streams[1], 0.1);  // so that the host does not see it before it waits
    const ScopedEnvironment fault("CUDA_MODEL_FAULT", "kernel:719:1:async");
    ranks.streams[1].kernels().fill(ranks.streams[1], 0, x[1]);
  }
  const auto begin = Clock::now();
  const std::string text = message_of<PeerLost>([&] {
    all_reduce(ranks, x);
    x[0].to_host();
  });
  INFO(text);
  CHECK(seconds_since(begin) < 5);
  CHECK_THAT(text, ContainsSubstring("group 1 of collectives") &&
                       ContainsSubstring("rank 1 (cuda:1) failed: ") &&
                       ContainsSubstring("cudaErrorLaunchFailure"));
}

TEST_CASE("A host that waits for a rank is freed when another rank fails", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL(nccl_ranks(2));
  // A process cannot use a GPU any more after its kernel has failed there.
  const testing::ProcessResult child =
      testing::run_process({std::filesystem::read_symlink("/proc/self/exe"), "[.gpu-is-lost]"}, 60,
                           {{"LOCKSTEP_TEST_LOG", "/dev/null"}});
  INFO(testing::story(child));
  CHECK_FALSE(child.timed_out);
  CHECK(child.status == 0);
}

}  // namespace
}  // namespace lockstep
