// NCCL's ranks that fail, and ranks that do not come.

#include <filesystem>

#include "common/core/stream_backend.h"
#include "tests/gpu/nccl_test_support.h"
#include "tests/support/data_test_files.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace testing::nccl;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using testing::Clock;
using testing::message_of;
using testing::numbered;
using testing::occupy;
using testing::Ranks;
using testing::ScopedEnvironment;
using testing::seconds_since;
using Floats = BasicTensor<float>;

/// A rank alone, with five numbers.
struct LoneRank {
  explicit LoneRank(double timeout_seconds = testing::kLong)
      : ranks(nccl_rank(0, 1, nccl_unique_id(), timeout_seconds)) {}
  void all_reduce() const { ranks.comms[0]->all_reduce(stream, x); }

  Ranks ranks;
  Stream stream = ranks.streams[0];
  Floats x = numbered<float>(ranks, 5, 1)[0];
};

// --- Set-up and end ------------------------------------------------------------------------------

TEST_CASE("With NCCL what is no id of a group is refused", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(1);
  const std::string text = message_of<BadInput>([] { nccl_rank(0, 1, "id"); });
  CHECK_THAT(text, ContainsSubstring("has 128 bytes, found 2: all ranks take what"));
}

TEST_CASE("With NCCL a rank that never comes is missed at the deadline, by name",
          "[cuda][comm][row61]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const auto begin = Clock::now();
  const auto rank_0_of = [](int world_size) {
    return message_of<PeerLost>([&] { nccl_rank(0, world_size, nccl_unique_id(), 0.3); });
  };
  const std::string of_two = rank_0_of(2);
  INFO(of_two);
  CHECK(seconds_since(begin) < testing::kSoon);
  CHECK_THAT(of_two, ContainsSubstring("rank 0 (cuda:0) not ready within 0.3 s: rank 1 did not "
                                       "come, or the ranks do not reach each other; "));
  CHECK_THAT(rank_0_of(4), ContainsSubstring(": one of the other 3 ranks did not come, or"));
  CHECK(run_nccl_ranks(2, [](Ranks& ranks, int me) {  // others can follow
          const Floats x = numbered<float>(ranks, 5, 1)[me];
          ranks.comms[me]->all_reduce(ranks.streams[me], x);
          require_numbers(x, std::vector<float>(5, 3));
        }) == no_errors(2));
}

TEST_CASE("A rank that NCCL never sees ends all at the deadline", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclCommInitRankConfig:7:2:async");
  const auto begin = Clock::now();
  const auto nothing = [](Ranks&, int) {};
  for (const std::string& error : run_nccl_ranks(2, nothing, 0.1)) {
    CHECK_THAT(error, ContainsSubstring("not ready within 0.1 s: rank "));
  }
  CHECK(seconds_since(begin) < 5);
}

TEST_CASE("A rank of NCCL's goes even where NCCL does not get to an end", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(1);
  LOCKSTEP_NEEDS_THE_MODEL();
  LoneRank slow(1), refused;
  for (const LoneRank* rank : {&slow, &refused}) rank->all_reduce();
  {
    const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclCommFinalize:7:1:async");
    const auto begin = Clock::now();
    slow.ranks.comms[0].reset();
    CHECK(seconds_since(begin) >= 1);
    CHECK(seconds_since(begin) < 5);
  }
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclCommFinalize:3:1");
  refused.ranks.comms[0].reset();
  for (const LoneRank* rank : {&slow, &refused}) {
    CHECK(rank->x.to_host() == std::vector<float>(5, 1));
  }
}

// --- Calls ---------------------------------------------------------------------------------------

TEST_CASE("A call on another device's stream is refused before NCCL sees it", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const LoneRank rank;
  const auto other = open_device({kCuda, 1}, {});
  const Stream stream = other->create_stream("other");
  const Elements x(rank.x.data(), 5, ElementType::f32);
  CHECK(message_of<BadInput>([&] { rank.ranks.comms[0]->all_reduce(stream, x); }) ==
        "rank 0: all_reduce of 5 f32, sum on a stream of cuda:1, the rank is on cuda:0");
  rank.all_reduce();
  CHECK(rank.x.to_host() == std::vector<float>(5, 1));
}

TEST_CASE("A call that NCCL refuses breaks the rank with NCCL's words", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(1);
  LOCKSTEP_NEEDS_THE_MODEL();
  const LoneRank rank;
  std::string text;
  {
    const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclAllReduce:3:1");
    text = message_of<PeerLost>([&] { rank.all_reduce(); });
  }
  CHECK_THAT(text, StartsWith("rank 0: collective 1 (all_reduce of 5 f32, sum): rank 0 (cuda:0): "
                              "ncclAllReduce: internal error") &&
                       ContainsSubstring("planted by CUDA_MODEL_FAULT"));
  CHECK(text.find('\n') == std::string::npos);
  CHECK(message_of<PeerLost>([&] { rank.all_reduce(); }) == text);
  // And nobody takes what is there for a result.
  CHECK(message_of<PeerLost>([&] { rank.stream.synchronize(); }) == text);
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclGetUniqueId:2");
  CHECK_THAT(message_of<PeerLost>([] { nccl_unique_id(); }),
             ContainsSubstring("ncclGetUniqueId: unhandled system error"));
}

TEST_CASE("What NCCL's host asks the GPU for errors does not grow with the calls in flight",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(1);
  LOCKSTEP_NEEDS_THE_MODEL();
  const LoneRank rank;
  rank.all_reduce();
  rank.stream.synchronize();
  constexpr int kCalls = 40, kQuestions = 5;  // for each: asking all would take about 40
  testing::Gate gate;
  rank.stream.backend().host_task("gate", [&] { gate.pass(); });
  {
    const ScopedEnvironment fault("CUDA_MODEL_FAULT",
                                  fmt::format("cudaEventQuery:719:{}", kCalls * kQuestions));
    CHECK_NOTHROW([&] {
      for (int i = 0; i < kCalls; ++i) rank.all_reduce();
    }());
  }
  gate.open();
  CHECK_NOTHROW(rank.stream.synchronize());
}

TEST_CASE("A rank whose stream failed says so at once, with the call and the GPU's words",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(1);
  LOCKSTEP_NEEDS_THE_MODEL();
  for (const bool before : {true, false}) {
    const LoneRank rank;
    const auto fail_stream = [&] {
      const ScopedEnvironment fault("CUDA_MODEL_FAULT",  // the first call in either case
                                    before ? "cudaMemcpyAsync:719" : "cudaMemcpyAsync:719:1");
      rank.stream.copy(rank.x.data(), rank.x.data(), 4);
    };
    const auto begin = Clock::now();
    const std::string text = message_of<PeerLost>([&] {
      if (before) fail_stream();
      rank.all_reduce();
      if (!before) fail_stream();
      rank.all_reduce();
    });
    INFO(text);
    CHECK(seconds_since(begin) < 5);
    CHECK_THAT(text, StartsWith("rank 0: collective 1 (all_reduce of 5 f32, sum): rank 0 (cuda:0) "
                                "failed: ") &&
                         ContainsSubstring("cudaErrorLaunchFailure"));
  }
}

// --- Other ranks ---------------------------------------------------------------------------------

TEST_CASE("With NCCL a rank that is found gone ends the others at once, silence later",
          "[cuda][comm][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  // NCCL tells one of the two that its peer is gone; from then on that one is gone for the other.
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclAllReduce:6:3:async");
  const auto begin = Clock::now();
  std::vector<std::string> errors = run_nccl_ranks(
      2,
      [](Ranks& ranks, int me) {
        const Floats x = numbered<float>(ranks, 5, 1)[me];
        const std::string first = message_of<PeerLost>([&] {
          ranks.comms[me]->all_reduce(ranks.streams[me], x);
          ranks.streams[me].synchronize();  // both have made it: the third call is a second one
          ranks.comms[me]->all_reduce(ranks.streams[me], x);
          const Stream behind = ranks.devices[me]->create_stream("behind");  // as an optimizer's
          behind.wait(ranks.streams[me].record());
          behind.synchronize();
        });
        const std::string next =
            message_of<PeerLost>([&] { ranks.comms[me]->barrier(ranks.streams[me]); });
        if (next != first) fail<BadInput>("first {}, then {}", first, next);
        throw PeerLost(first);
      },
      1);
  CHECK(seconds_since(begin) < 10);
  std::sort(errors.begin(), errors.end(), [](const std::string& a, const std::string& b) {
    return a.find("remote process exited") < b.find("remote process exited");
  });
  INFO(errors[0] << "\n" << errors[1]);
  const std::string call = "collective 2 (all_reduce of 5 f32, sum): ";
  CHECK_THAT(errors[0], ContainsSubstring(call) && ContainsSubstring("remote process exited"));
  CHECK_THAT(errors[1],
             ContainsSubstring(call + "no answer from rank ") && ContainsSubstring(" within 1 s"));
}

/// Rank 0 makes `calls` on its stream, of which a send to rank 1 is one; rank 1 receives nothing
/// until rank 0 has given up, or far too late. What rank 0 threw.
std::string error_beside_silence(
    const std::function<void(Communicator&, Stream, const Floats&)>& calls,
    const DeviceOptions& options = {}) {
  std::atomic<bool> over = false;
  const auto run = [&](Ranks& ranks, int me) {
    const Floats x = numbered<float>(ranks, 5, 1)[me];
    if (me == 0) {
      const std::string text = message_of<PeerLost>([&] {
        calls(*ranks.comms[0], ranks.streams[0], x);
        ranks.streams[0].synchronize();
      });
      over = true;
      throw PeerLost(text);
    }
    const auto begin = Clock::now();
    while (!over && seconds_since(begin) < testing::kSoon) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (int i = 0; i < 1000 && !over; ++i) ranks.comms[1]->receive(ranks.streams[1], x, 0);
  };
  return run_nccl_ranks(2, run, 1, options)[0];
}

TEST_CASE("With NCCL a host that is hundreds of calls ahead still names the rank that is silent",
          "[cuda][comm][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  const std::string expected = "rank 0: send of 5 f32 to rank 1: no answer from rank 1 within 1 s";
  for (const int events : {0, 2, 20}) {  // of others, beside each call's own
    CHECK(error_beside_silence([&](Communicator& comm, Stream stream, const Floats& x) {
            for (int i = 0; i < 600; ++i) {
              comm.send(stream, x, 1);
              for (int event = 0; event < events; ++event) stream.record();
            }
          }) == expected);
  }
}

TEST_CASE("With NCCL a rank that gives up a group is not held by its calls in another one",
          "[cuda][comm][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  const std::string id = nccl_unique_id();
  std::atomic<bool> over = false;
  double seconds = 0;
  const std::vector<std::string> errors = run_nccl_ranks(
      2,
      [&](Ranks& ranks, int me) {
        const auto second = make_nccl_rank(*ranks.devices[me], me, 2, id, 1);
        const Stream stream = ranks.streams[me], other = ranks.devices[me]->create_stream("other");
        const Floats x = numbered<float>(ranks, 5, 1)[me], y = numbered<float>(ranks, 5, 1)[me];
        const auto begin = Clock::now();
        if (me == 1) {
          while (!over && seconds_since(begin) < 2 * testing::kSoon) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          return;
        }
        ranks.comms[0]->send(stream, x, 1);
        second->send(other, y, 1);
        const std::string text = message_of<PeerLost>([&] { stream.synchronize(); });
        seconds = seconds_since(begin);
        over = true;
        throw PeerLost(text);
      },
      1);
  CHECK_THAT(errors[0], ContainsSubstring("no answer from rank 1 within 1 s"));
  CHECK(seconds < testing::kSoon);
}

TEST_CASE("With NCCL a traced host still names the rank that is silent", "[cuda][comm][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  // As many operations as a trace keeps before it looks for their times, and less after the send
  // than the host may be ahead.
  const auto calls = [](Communicator& comm, Stream stream, const Floats& x) {
    for (int i = 0; i < 3950; ++i) stream.kernels().fill(stream, 0, x);
    comm.send(stream, x, 1);
    for (int i = 0; i < 200; ++i) stream.kernels().fill(stream, 0, x);
  };
  CHECK(error_beside_silence(calls, {.trace = true}) ==
        "rank 0: send of 5 f32 to rank 1: no answer from rank 1 within 1 s");
}

TEST_CASE("With NCCL a host is freed even where the GPU stays stuck", "[cuda][comm][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  testing::Gate gate;  // rank 1's stream comes to it, and rank 0's when NCCL has let it go
  const auto pass = [&] { gate.pass(); };
  const std::vector<std::string> errors = run_nccl_ranks(
      2,
      [&](Ranks& ranks, int me) {
        const Stream stream = ranks.streams[me];
        const Floats x = numbered<float>(ranks, 5, 1)[me];
        if (me == 1) stream.backend().host_task("gate", pass);
        ranks.comms[me]->all_reduce(stream, x);
        if (me == 0) stream.backend().host_task("gate", pass);
        const auto begin = Clock::now();
        const std::string text = message_of<PeerLost>([&] { stream.synchronize(); });
        const double seconds = seconds_since(begin);
        if (me == 0) gate.open();
        if (me == 0 && (seconds < 2 || seconds > 10)) fail<BadInput>("{} s: {}", seconds, text);
        throw PeerLost(text);
      },
      0.3);
  INFO(errors[0] << "\n" << errors[1]);
  CHECK_THAT(errors[0],
             StartsWith("rank 0: collective 1 (all_reduce of 5 f32, sum): no answer from "
                        "rank 1 within 0.3 s"));
  CHECK_THAT(errors[1], StartsWith("rank 1: collective 1 (all_reduce of 5 f32, sum): "));
}

TEST_CASE("The child of the next case: cuda:1 fails, the other rank's host waits for cuda:0",
          "[.gpu-is-lost]") {
  std::atomic<bool> planted = false;
  const auto begin = Clock::now();
  const std::vector<std::string> errors = run_nccl_ranks(
      2,
      [&](Ranks& ranks, int me) {
        const Stream stream = ranks.streams[me];
        const Floats x = numbered<float>(ranks, 5, 1)[me];
        stream.synchronize();
        if (me == 1) {
          occupy(stream, 0.1);  // so that no host sees it before it waits
          const ScopedEnvironment fault("CUDA_MODEL_FAULT", "kernel:719:1:async");
          stream.kernels().fill(stream, 0, x);
          planted = true;
        }
        while (!planted) std::this_thread::yield();
        ranks.comms[me]->all_reduce(stream, x);
        x.to_host();
      },
      1);
  INFO(errors[0] << "\n" << errors[1]);
  CHECK(seconds_since(begin) < 10);
  // On a busy machine the kernel may have failed before NCCL is called, which then says it itself.
  CHECK_THAT(errors[1], ContainsSubstring("cuda:1"));
  CHECK_THAT(errors[1], ContainsSubstring("cudaErrorLaunchFailure") ||
                            ContainsSubstring("unspecified launch failure"));
  CHECK_THAT(errors[0], StartsWith("rank 0: collective 1 (all_reduce of 5 f32, sum): no answer "
                                   "from rank 1 within 1 s"));
}

TEST_CASE("With NCCL a host that waits for a rank is freed when that rank's GPU fails",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
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
