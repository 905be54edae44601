// Whole meshes trained on ranks that are threads, and the order of their messages.

#include <fmt/format.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/blocking_calls.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/mesh_training.h"
#include "tests/support/process.h"
#include "tests/unit/comm/process_group_job.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using namespace lockstep::testing::mesh;
using Catch::Matchers::ContainsSubstring;

/// What the ranks of a mesh have after these steps, by rank.
struct MeshRun {
  std::vector<MeshResult> found;
  std::vector<FlightRank> flights;  // of the steps alone
};

MeshRun train_on(int ranks, const MeshSetting& setting, const std::vector<Samples>& batches) {
  MeshRun run{.found = std::vector<MeshResult>(size_t(ranks)), .flights = {}};
  const TempDir folder;
  group::Job job(ranks, "shm");
  job.options_of_rank = [&](int, ProcessGroupOptions& options) {
    options.flight_file = folder / "flight";
  };
  const Words errors = job.run([&](ProcessGroup& group) {
    const auto device = open_device({DeviceId::Kind::cpu, group.rank()}, {});
    const std::unique_ptr<Communicator> world = group.connect(*device);
    MeshMember member(group, *world, device->create_stream("compute"),
                      device->create_stream("communication"), setting);
    for (const Samples& batch : batches) member.step(batch);
    member.stream.synchronize();
    group.barrier();
    if (group.rank() == 0) run.flights = read_flight_files(folder / "flight");
    group.barrier();
    run.found[size_t(group.rank())] = member.trained();
  });
  CHECK(errors == Words(size_t(ranks)));
  return run;
}

// --- The weights ---------------------------------------------------------------------------------

TEST_CASE("Meshes of threads train one process's weights", "[mesh][tsan]") {
  const std::vector<Samples> batches{Samples(13, 1), Samples(13, 2), Samples(6, 3)};
  std::vector<MeshSetting> settings{{"data=2,shard=2", kSeedBn}, {"data=2,tensor=2"}};
  if (full_campaign()) {
    settings.push_back({"shard=2,tensor=2", kSeedBn});
    settings.push_back({"data=2,pipeline=2", kSeed, {.micro_batches = 3}});
  }
  for (const MeshSetting& setting : settings) {
    INFO(setting.mesh);
    const MeshResult alone = train_in_one_process(batches, setting.model);
    for (const MeshResult& rank : train_on(4, setting, batches).found) {
      CHECK(relative_error(rank.weights, alone.weights) < kTolerance);
      CHECK(rank.loss == Approx(alone.loss).epsilon(kTolerance));
    }
  }
}

// --- A gradient that is not finite ---------------------------------------------------------------

/// Three steps. In the second one rank writes infinity into a gradient of its own, of its first
/// layer, where backward has just written it. By rank and step: what `ask` says of the rank then.
std::vector<std::vector<int64_t>> after_steps(const MeshSetting& setting, int bad_rank,
                                              int64_t (MeshMember::*ask)() const) {
  std::vector<std::vector<int64_t>> answers(4);
  const Words errors = group::Job(4, "shm").run([&](ProcessGroup& group) {
    const auto device = open_device({DeviceId::Kind::cpu, group.rank()}, {});
    const std::unique_ptr<Communicator> world = group.connect(*device);
    MeshMember member(group, *world, device->create_stream("compute"),
                      device->create_stream("communication"), setting);
    Unit& unit = *member.network.sharded().units().front();
    unit.in_order().front()->on_gradient_ready = [&](Parameter& p) {
      if (group.rank() != bad_rank || member.steps != 2) return;
      member.stream.kernels().fill(member.stream, std::numeric_limits<Real>::infinity(),
                                   p.grad.range(0, {1}));
    };
    for (int step = 0; step < 3; ++step) {
      member.feed(Samples(13, uint32_t(step) + 1));
      member.forward_and_backward();
      member.update();  // without the norm, which would tell others, too
      answers[size_t(group.rank())].push_back((member.*ask)());
    }
  });
  CHECK(errors == Words(4));
  return answers;
}

const PipelinePlan kTwoMicroBatches{.micro_batches = 2};
const std::vector<MeshSetting> kSettings{{"data=2,shard=2"},
                                         {"data=4"},
                                         {"data=2,tensor=2"},
                                         {"tensor=2,shard=2"},
                                         {"data=2,pipeline=2", kSeed, kTwoMicroBatches},
                                         {"pipeline=2,tensor=2", kSeed, kTwoMicroBatches}};

TEST_CASE("A gradient that is not finite on one rank stops all ranks in the same step", "[mesh]") {
  for (const MeshSetting& setting : kSettings) {
    for (const int bad_rank : {0, 3}) {
      INFO(setting.mesh << ", rank " << bad_rank);
      for (const auto& stops : after_steps(setting, bad_rank, &MeshMember::failed_step)) {
        CHECK(stops == std::vector<int64_t>{-1, 1, 1});
      }
    }
  }
}

#ifndef LOCKSTEP_DOUBLE  // which has no other precision
TEST_CASE("In fp16 a gradient that is not finite on one rank skips the step on all ranks",
          "[mesh][sixteen]") {
  for (MeshSetting setting : kSettings) {
    setting.sharding.precision = Precision::fp16;
    for (const int bad_rank : {0, 3}) {
      INFO(setting.mesh << ", rank " << bad_rank);
      for (const auto& skipped : after_steps(setting, bad_rank, &MeshMember::skipped_steps)) {
        CHECK(skipped == std::vector<int64_t>{0, 1, 1});
      }
    }
  }
}
#endif

// --- Planted faults ------------------------------------------------------------------------------

#if defined(__SANITIZE_THREAD__)
ProcessResult deaf_mesh(const char* mesh, const char* fault) {
  return run_process({build_dir() + "/tests/unit/deaf-mesh", mesh, fault}, 60);
}

TEST_CASE("ThreadSanitizer reports a wait that is missing between a mesh's passes and messages",
          "[mesh][tsan]") {
  for (const auto& [mesh, fault] : {std::pair("data=2,shard=2", "compute"),
                                    {"data=2,shard=2", "communication"},
                                    {"data=2,shard=2", "norm"},
                                    {"data=2,shard=2", "replicas"},
                                    {"data=2,tensor=2", "compute"},
                                    {"data=2,tensor=2", "communication"},
                                    {"data=2,tensor=2", "norm"}}) {
    const ProcessResult result = deaf_mesh(mesh, fault);
    INFO(mesh << ", " << fault << ": " << result.err);
    CHECK(result.status > 0);
    CHECK_THAT(result.err, ContainsSubstring("ThreadSanitizer: data race") ||
                               ContainsSubstring("ThreadSanitizer: heap-use-after-free"));
  }
}

TEST_CASE("ThreadSanitizer is silent where a mesh's streams wait for each other", "[mesh][tsan]") {
  for (const auto& [mesh, fault] : {std::pair("data=2,shard=2", "none"),
                                    {"data=2,shard=2", "shards"},
                                    {"data=2,tensor=2", "none"}}) {
    const ProcessResult result = deaf_mesh(mesh, fault);
    INFO(mesh << ", " << fault);
    CHECK(result.status == 0);
    CHECK(result.err == "");
  }
}
#endif

// --- The order of messages -----------------------------------------------------------------------

/// Which call this is, of whichever ranks along its axes: these have made as many groups, in one
/// order. Their samples may be more or fewer, and so a call's numbers.
std::string call_of_axes(const FlightEntry& call) {
  return fmt::format("axes {}, call {}: {} {}", call.group >> 32, call.number,
                     flight_text(call.name), flight_text(call.label));
}

TEST_CASE("The k-th message of every rank belongs to the same axes", "[mesh]") {
  for (const MeshSetting& setting :
       {MeshSetting{"data=2,shard=2", kSeedBn}, {"data=2,tensor=2"}, {"shard=2,tensor=2"}}) {
    INFO(setting.mesh);
    std::vector<Words> calls;
    for (const FlightRank& rank : train_on(4, setting, {Samples(13, 1)}).flights) {
      calls.emplace_back();
      for (const FlightEntry& call : rank.log.entries) calls.back().push_back(call_of_axes(call));
    }
    REQUIRE(calls.size() == 4);
    CHECK(calls[0].size() > 5);
    for (const Words& others : calls) CHECK(others == calls[0]);
  }
}

FlightEntry call_of_group(uint64_t group, uint64_t members) {
  FlightEntry call{.number = 1, .group = group, .members = members};
  put_flight_text(call.text, fmt::format("call of {:b}", members));
  return call;
}

TEST_CASE("Ranks that begin along different axes wait in a circle", "[mesh]") {
  // data=2,tensor=2: ranks 0 and 1 are a row along tensor, 0 and 2 a column along data.
  const auto calls = [](bool rows_first, int rank) {
    FlightRank all{};
    all.log.entries = {call_of_group(1, rank < 2 ? 0b0011 : 0b1100),
                       call_of_group(2, rank % 2 == 0 ? 0b0101 : 0b1010)};
    if (!rows_first) std::swap(all.log.entries[0], all.log.entries[1]);
    return all;
  };
  CHECK(where_blocking_calls_stop(
            {calls(true, 0), calls(true, 1), calls(true, 2), calls(true, 3)}) == "");
  CHECK(where_blocking_calls_stop(
            {calls(true, 0), calls(false, 1), calls(false, 2), calls(true, 3)}) ==
        "rank 0 in call of 11; rank 1 in call of 1010; rank 2 in call of 101; rank 3 in call of "
        "1100");
}

/// A step of every kind of mesh, one with two micro-batches.
TEST_CASE("No rank of a mesh waits for ever, even if every call keeps its host until all have come",
          "[mesh][pipeline]") {
  const PipelinePlan two{.micro_batches = 2}, gpipe{ScheduleKind::gpipe, 2};
  for (const MeshSetting& setting : {MeshSetting{"data=2,shard=2", kSeedBn},
                                     {"tensor=2,data=2"},
                                     {"data=2,pipeline=2", kSeed, two},
                                     {"pipeline=2,tensor=2", kSeed, gpipe},
                                     {"shard=2,pipeline=2", kSeedBn, two}}) {
    INFO(setting.mesh);
    const std::vector<FlightRank> ranks = train_on(4, setting, {Samples(8, 1)}).flights;
    REQUIRE(ranks.size() == 4);
    for (const FlightRank& rank : ranks) {
      REQUIRE(rank.log.entries.size() > 5);
      REQUIRE(rank.log.entries.front().record == 1);  // none is forgotten
    }
    CHECK(where_blocking_calls_stop(ranks) == "");
  }
}

}  // namespace
}  // namespace lockstep
