// NCCL's ranks that fail, ranks that do not come, and what it costs to watch for that.

#include <fmt/ranges.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <latch>

#include "common/core/stream_backend.h"
#include "common/launch/flight_table.h"
#include "common/system/flight_recorder.h"
#include "tests/gpu/nccl_test_support.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using namespace testing::nccl;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using testing::calls_of;
using testing::Clock;
using testing::message_of;
using testing::numbered;
using testing::occupy;
using testing::Ranks;
using testing::ScopedEnvironment;
using testing::seconds_since;
using Floats = BasicTensor<float>;

/// A variable that a hidden case got.
int number_in(const char* variable) { return std::atoi(std::getenv(variable)); }

/// NCCL's calls block, or it continues in the background: what is seen of a lost rank is the same.
const std::vector<std::pair<std::string, std::string>> kBothWays{{"NCCL_COMM_BLOCKING", "1"},
                                                                 {"NCCL_COMM_BLOCKING", "0"}};

/// Of these, for what takes seconds.
std::vector<std::pair<std::string, std::string>> ways() {
  return testing::full_campaign() ? kBothWays : std::vector{kBothWays[0]};
}

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

TEST_CASE("A rank whose group nobody else comes to", "[.never-comes]") {
  report_uncaught_errors();
  nccl_rank(0, number_in("RANKS"), nccl_unique_id(), 0.3);
}

TEST_CASE("With NCCL a rank that never comes is missed at the deadline, by name",
          "[cuda][comm][row61]") {
  LOCKSTEP_NEEDS_NCCL(2);
  for (const auto& way : kBothWays) {
    const auto begin = Clock::now();
    check_lost(run_hidden("[.never-comes]", {way, {"RANKS", "2"}}),
               "ncclCommInitRankConfig: rank 0 (cuda:0) not ready within 0.3 s: rank 1 did not "
               "come, or the ranks do not reach each other; NCCL_DEBUG=INFO shows where they stop");
    CHECK(seconds_since(begin) < 30);
  }
  check_lost(run_hidden("[.never-comes]", {{"RANKS", "4"}}),
             ": one of the other 3 ranks did not come, or");
}

TEST_CASE("Ranks of which NCCL never sees one", "[.never-seen]") {
  report_uncaught_errors();
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclCommInitRankConfig:7:2:async");
  const auto nothing = [](Ranks&, int) {};
  run_nccl_ranks(2, nothing, 0.1);
}

TEST_CASE("A rank that NCCL never sees ends all at the deadline", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  check_lost(run_hidden("[.never-seen]"), "not ready within 0.1 s: rank ");
}

TEST_CASE("A rank that NCCL does not get to an end", "[.never-ends]") {
  report_uncaught_errors();
  LoneRank rank(1);
  rank.all_reduce();
  CHECK(rank.x.to_host() == std::vector<float>(5, 1));
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclCommFinalize:7:1:async");
  rank.ranks.comms[0].reset();
}

TEST_CASE("A rank of NCCL's goes even where NCCL does not get to an end", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(1);
  LOCKSTEP_NEEDS_THE_MODEL();
  check_lost(run_hidden("[.never-ends]"),
             "ncclCommFinalize: rank 0 (cuda:0) not ready within 1 s: the ranks do not reach");
  LoneRank refused;
  refused.all_reduce();
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclCommFinalize:3:1");
  refused.ranks.comms[0].reset();
  CHECK(refused.x.to_host() == std::vector<float>(5, 1));
}

TEST_CASE("A rank that goes while several calls are queued", "[.long-queue]") {
  report_uncaught_errors();
  LoneRank rank(1);
  for (int call = 0; call < 4; ++call) {
    rank.stream.backend().host_task(
        "work", [] { std::this_thread::sleep_for(std::chrono::milliseconds(400)); });
    rank.all_reduce();
  }
  rank.ranks.comms[0].reset();
  CHECK(rank.x.to_host() == std::vector<float>(5, 1));
}

TEST_CASE("A rank's end waits for all queued calls, each with its own deadline", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(1);
  for (const auto& way : kBothWays) {
    const testing::ProcessResult ended = run_hidden("[.long-queue]", {way});
    INFO(testing::story(ended));
    CHECK(ended.status == 0);
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

/// What `messages` all-reduces cost the host: its calls of each of these functions.
std::vector<long> cost_of(const LoneRank& rank, int messages) {
  const std::vector<const char*> functions{
      "thread",        "cudaEventRecord", "cudaEventQuery",       "cudaEventSynchronize",
      "ncclAllReduce", "ncclGroupEnd",    "ncclCommGetAsyncError"};
  std::vector<long> cost;
  for (const char* function : functions) cost.push_back(-calls_of(function));
  for (int i = 0; i < messages; ++i) rank.all_reduce();
  for (size_t i = 0; i < functions.size(); ++i) cost[i] += calls_of(functions[i]);
  return cost;
}

TEST_CASE("A message of NCCL's costs its host two events, or four with times, and no question",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(1);
  LOCKSTEP_NEEDS_THE_MODEL();
  constexpr long kFew = 30;
  for (const bool recorded : {false, true}) {
    const LoneRank rank;
    const auto recorder = std::make_shared<FlightRecorder>(0, 1, 0, "");
    if (recorded) rank.ranks.comms[0]->record_in({.recorder = recorder});
    rank.all_reduce();
    rank.stream.synchronize();
    testing::Gate gate;  // no message ends meanwhile
    rank.stream.backend().host_task("gate", [&] { gate.pass(); });
    const long events = recorded ? 4 : 2;
    const std::vector<long> few = cost_of(rank, kFew), more = cost_of(rank, kFew);
    gate.open();
    INFO(fmt::format("{}; {}", fmt::join(few, " "), fmt::join(more, " ")));
    CHECK(few == std::vector<long>{0, events * kFew, 0, 0, kFew, kFew, 0});
    // From the 33rd on, a question for each: whether the oldest has ended, and if recorded, begun.
    CHECK(more[0] == 0);
    CHECK(more[2] <= (recorded ? 2 : 1) * kFew);
    CHECK(more[6] == 0);
    rank.stream.synchronize();
  }
}

TEST_CASE("A message of NCCL's starts a thread where its communicator does not block",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(1);
  LOCKSTEP_NEEDS_THE_MODEL();
  const ScopedEnvironment way("NCCL_COMM_BLOCKING", "0");
  const LoneRank rank;
  const std::vector<long> cost = cost_of(rank, 30);
  CHECK(cost[0] == 30);
  CHECK(cost[6] >= 30);
  CHECK(rank.x.to_host() == std::vector<float>(5, 1));
}

TEST_CASE("A rank whose stream failed says so at once, with the call and the GPU's words",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(1);
  LOCKSTEP_NEEDS_THE_MODEL();
  for (const bool before : {true, false}) {  // the first call
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
    CHECK_THAT(text,
               StartsWith(fmt::format("rank 0: collective {} (all_reduce of 5 f32, sum): rank 0 "
                                      "(cuda:0) failed: ",
                                      before ? 1 : 2)) &&
                   ContainsSubstring("cudaErrorLaunchFailure"));
  }
}

// --- Other ranks ---------------------------------------------------------------------------------

constexpr const char* kFirst = "error: rank 0: collective 1 (all_reduce of 5 f32, sum): ";

/// Two ranks, of which rank 0 waits for two seconds, and rank 1 does something else.
void run_beside(const std::function<void(Ranks&, const Floats&)>& rank_0,
                const std::function<void(Ranks&, const Floats&)>& rank_1,
                const DeviceOptions& options = {}) {
  const std::string id = nccl_unique_id();
  std::latch both(2);  // to open a device takes its time
  testing::run_ranks(2, [&](int me) noexcept {
    Ranks ranks({kCuda, me}, me, 2, options, [&](Device& device) {
      both.arrive_and_wait();
      return make_nccl_rank(device, me, 2, id, me == 0 ? 2 : testing::kLong);
    });
    (me == 0 ? rank_0 : rank_1)(ranks, numbered<float>(ranks, 5, 1)[me]);
  });
}

void all_reduce_and_wait(Ranks& ranks, const Floats& x) {
  ranks.comms[0]->all_reduce(ranks.streams[0], x);
  ranks.streams[0].synchronize();
}

TEST_CASE("A rank that makes one call and no second one", "[.silent]") {
  report_uncaught_errors();
  const auto recorder = std::make_shared<FlightRecorder>(0, 2, 0, std::getenv("FLIGHT_FILE"));
  const auto two_calls = [&](Ranks& ranks, const Floats& x) {
    ranks.comms[0]->record_in({.recorder = recorder});
    for (int call = 0; call < 2; ++call) ranks.comms[0]->all_reduce(ranks.streams[0], x);
  };
  run_beside(two_calls, [](Ranks& ranks, const Floats& x) {
    ranks.comms[1]->all_reduce(ranks.streams[1], x);
    wait_for_the_end();
  });
}

TEST_CASE("A rank whose stream does not come to its call", "[.stuck]") {
  report_uncaught_errors();
  testing::Gate gate;
  run_beside(all_reduce_and_wait, [&](Ranks& ranks, const Floats& x) {
    ranks.streams[1].backend().host_task("gate", [&] { gate.pass(); });
    ranks.comms[1]->all_reduce(ranks.streams[1], x);
    wait_for_the_end();
  });
}

TEST_CASE("With NCCL a rank that is silent is named at the deadline, on the host and on the GPU",
          "[cuda][comm][flight][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  for (const auto& way : kBothWays) {
    const testing::TempDir folder;
    check_lost(run_hidden("[.silent]", {way, {"FLIGHT_FILE", folder / "flight"}}),
               "error: rank 0: collective 2 (all_reduce of 5 f32, sum): ncclGroupEnd: rank 0 "
               "(cuda:0) not ready within 2 s: rank 1 did not come");
    const FlightLog log = read_flight_files(folder / "flight").at(0).log;
    REQUIRE(log.entries.size() == 2);  // for the launcher's table
    CHECK(log.entries[0].completed_ns > 0);
    CHECK(log.entries[1].completed_ns == 0);
    CHECK(log.gave_up_ns > 0);
    check_lost(run_hidden("[.stuck]", {way}),
               std::string(kFirst) + "no answer from rank 1 within 2 s");
  }
}

TEST_CASE("A rank that dies within its call, the second one of all", "[.dies-in-call]") {
  report_uncaught_errors();
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", std::getenv("DIES"));
  run_beside(all_reduce_and_wait, [](Ranks& ranks, const Floats& x) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ranks.comms[1]->all_reduce(ranks.streams[1], x);
    wait_for_the_end();
  });
}

TEST_CASE("With NCCL a rank that dies within a call is named, and ends the one that waits in it",
          "[cuda][comm][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  const std::pair<std::string, std::string> silent{"DIES", "ncclGroupEnd:7:2"};
  for (const auto& way : ways()) {
    check_lost(run_hidden("[.dies-in-call]", {way, silent}),
               std::string(kFirst) +
                   "ncclGroupEnd: rank 0 (cuda:0) not ready within 2 s: rank 1 did not come");
  }
}

TEST_CASE("A rank that NCCL finds gone, in the background", "[.found-gone]") {
  report_uncaught_errors();
  // NCCL tells one of the two that its peer is gone; no deadline comes.
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclAllReduce:6:3:async");
  run_nccl_ranks(2, [](Ranks& ranks, int me) noexcept {
    const Floats x = numbered<float>(ranks, 5, 1)[me];
    for (int call = 0; call < 2; ++call) {  // the third call is a second one
      ranks.comms[me]->all_reduce(ranks.streams[me], x);
      const Stream behind = ranks.devices[me]->create_stream("behind");  // as an optimizer's
      behind.wait(ranks.streams[me].record());
      behind.synchronize();
    }
  });
}

TEST_CASE("With NCCL a rank that is found gone ends the others at once", "[cuda][comm][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  for (const auto& way : kBothWays) {
    const auto begin = Clock::now();
    const testing::ProcessResult ended = run_hidden("[.found-gone]", {way});
    CHECK(seconds_since(begin) < testing::kLong / 2);
    check_lost(ended, ": collective 2 (all_reduce of 5 f32, sum): rank ");
    CHECK_THAT(ended.err, ContainsSubstring("remote process exited"));
  }
  // Within a call NCCL says it itself.
  const LoneRank rank;
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclGroupEnd:6:1");
  CHECK_THAT(message_of<PeerLost>([&] { rank.all_reduce(); }),
             StartsWith("rank 0: collective 1 (all_reduce of 5 f32, sum): rank 0 (cuda:0): "
                        "ncclGroupEnd: remote process exited"));
}

TEST_CASE("With NCCL a rank that is late, by less than the deadline each time, is waited for",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  const auto late = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1500)); };
  for (const auto& [variable, blocking] : ways()) {
    const ScopedEnvironment way(variable, blocking);
    CHECK(run_nccl_ranks(
              2,
              [&](Ranks& ranks, int me) {
                const Floats x = numbered<float>(ranks, 5, 1)[me];
                for (const bool host : {true, false, true}) {
                  if (me == 1 && host) late();
                  if (me == 1 && !host) ranks.streams[1].backend().host_task("late", late);
                  ranks.comms[me]->all_reduce(ranks.streams[me], x);
                }
                require_numbers(x, std::vector<float>(5, 12));  // 1 + 2, twice doubled
              },
              4) == no_errors(2));
  }
}

TEST_CASE("A host that is hundreds of calls ahead of a silent rank", "[.ahead]") {
  report_uncaught_errors();
  const auto calls = [events = number_in("EVENTS")](Ranks& ranks, const Floats& x) {
    const Stream stream = ranks.streams[0];
    for (int i = 0; i < 600; ++i) {
      ranks.comms[0]->send(stream, x, 1);
      for (int event = 0; event < events; ++event) stream.record();
    }
    stream.synchronize();
  };
  run_beside(calls, [](Ranks&, const Floats&) { wait_for_the_end(); });
}

TEST_CASE("With NCCL a host that is hundreds of calls ahead still names the rank that is silent",
          "[cuda][comm][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  for (const char* events : {"0", "20"}) {  // of others, beside each call's own
    check_lost(run_hidden("[.ahead]", {{"EVENTS", events}}),
               "error: rank 0: send of 5 f32 to rank 1: no answer from rank 1 within 2 s");
  }
}

TEST_CASE("A traced host whose peer is silent", "[.traced]") {
  report_uncaught_errors();
  // As many operations as a trace keeps before it looks for their times, and less after the send
  // than the host may be ahead.
  const auto calls = [](Ranks& ranks, const Floats& x) {
    const Stream stream = ranks.streams[0];
    for (int i = 0; i < 3950; ++i) stream.kernels().fill(stream, 0, x);
    ranks.comms[0]->send(stream, x, 1);
    for (int i = 0; i < 200; ++i) stream.kernels().fill(stream, 0, x);
    stream.synchronize();
  };
  run_beside(calls, [](Ranks&, const Floats&) { wait_for_the_end(); }, {.trace = true});
}

TEST_CASE("With NCCL a traced host still names the rank that is silent", "[cuda][comm][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  check_lost(run_hidden("[.traced]"),
             "error: rank 0: send of 5 f32 to rank 1: no answer from rank 1 within 2 s");
}

TEST_CASE("A rank whose calls in two groups wait", "[.two-groups]") {
  report_uncaught_errors();
  const std::string id = nccl_unique_id();
  const auto calls = [&](Ranks& ranks, const Floats& x) {
    const auto second = make_nccl_rank(*ranks.devices[0], 0, 2, id, testing::kLong);
    const Floats y = numbered<float>(ranks, 5, 1)[0];
    second->send(ranks.devices[0]->create_stream("other"), y, 1);
    ranks.comms[0]->send(ranks.streams[0], x, 1);
    ranks.streams[0].synchronize();
  };
  run_beside(calls, [&](Ranks& ranks, const Floats&) {
    const auto second = make_nccl_rank(*ranks.devices[1], 1, 2, id, testing::kLong);
    wait_for_the_end();
  });
}

TEST_CASE("With NCCL a rank that gives up a group is not held by its calls in another one",
          "[cuda][comm][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  check_lost(run_hidden("[.two-groups]"), "no answer from rank 1 within 2 s");
}

TEST_CASE("A rank whose GPU fails, and one whose host waits for it", "[.gpu-is-lost]") {
  report_uncaught_errors();
  const auto fails = [](Ranks& ranks, const Floats& x) {
    try {
      const Stream stream = ranks.streams[1];
      occupy(stream, 0.1);  // so that no host sees it before it waits
      const ScopedEnvironment fault("CUDA_MODEL_FAULT", "kernel:719:1:async");
      stream.kernels().fill(stream, 0, x);
      ranks.comms[1]->all_reduce(stream, x);
      x.to_host();
    } catch (const std::exception& error) {
      std::puts(error.what());
      wait_for_the_end();
    }
  };
  run_beside(all_reduce_and_wait, fails);
}

TEST_CASE("With NCCL a host that waits for a rank is freed when that rank's GPU fails",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  // A process cannot use a GPU any more after its kernel has failed there.
  const testing::ProcessResult ended = run_hidden("[.gpu-is-lost]");
  check_lost(ended, kFirst);
  CHECK_THAT(ended.err, ContainsSubstring("rank 1"));
  CHECK_THAT(ended.out, ContainsSubstring("cuda:1"));
  // On a busy machine the kernel may have failed before NCCL is called, which then says it itself.
  CHECK_THAT(ended.out, ContainsSubstring("cudaErrorLaunchFailure") ||
                            ContainsSubstring("unspecified launch failure"));
}

}  // namespace
}  // namespace lockstep
