// NCCL with one rank per process, which are threads here.

#include <fmt/ranges.h>

#include "common/core/stream_backend.h"
#include "common/group/process_group.h"
#include "common/launch/flight_table.h"
#include "tests/gpu/gpu_test_support.h"
#include "tests/gpu/nccl_test_support.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/free_port.h"
#include "tests/support/rank_threads.h"
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
using testing::Ranks;
using testing::ScopedEnvironment;
using testing::seconds_since;
using Floats = BasicTensor<float>;

// --- One rank per process, as threads here ------------------------------------------------------

/// Rank `rank`, on the GPU of that number.
Ranks nccl_communicator(int rank, int world_size, const std::string& id,
                        double timeout_seconds = kLong, const DeviceOptions& options = {}) {
  return Ranks({kCuda, rank}, rank, world_size, options, [&](Device& device) {
    return make_nccl_rank(device, rank, world_size, id, timeout_seconds);
  });
}

void check_processes(int world_size) {
  const std::string id = nccl_unique_id();
  const std::vector<std::string> errors = testing::run_ranks(world_size, [&](int rank) {
    Ranks ranks = nccl_communicator(rank, world_size, id);
    const std::string fault = testing::first_fault_of_all(ranks, {0, 1, 2, 3, 1000});
    if (!fault.empty()) fail<BadInput>("{}", fault);
  });
  CHECK(errors == std::vector<std::string>(static_cast<size_t>(world_size)));
}

TEST_CASE("NCCL over processes: every collective is what a serial program computes, for one rank",
          "[cuda][comm][ncclprocess][row70][row122]") {
  LOCKSTEP_NEEDS_NCCL(1);
  check_processes(1);
}

TEST_CASE("NCCL over processes: every collective is what a serial program computes, for two ranks",
          "[cuda][comm][ncclprocess][row70]") {
  LOCKSTEP_NEEDS_NCCL(2);
  check_processes(2);
}

TEST_CASE("NCCL over processes: the calls of a group take effect in their order, traced by name",
          "[cuda][comm][ncclprocess]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const std::string id = nccl_unique_id();
  const auto run = [&](int me) {
    const Ranks ranks = nccl_communicator(me, 2, id, kLong, {.trace = true});
    const Floats x = numbered<float>(ranks, 2, 1)[me], sums = numbered<float>(ranks, 4, 0)[me];
    ranks.streams[me].synchronize();
    const size_t before = ranks.streams[me].backend().timeline().size();
    ranks.together([&](Communicator& rank, Stream stream) {
      rank.all_reduce(stream, x);        // 3, 3
      rank.reduce(stream, x, 1);         // 3, 6
      rank.all_gather(stream, x, sums);  // 3, 6 everywhere
      rank.send(stream, Elements(sums).part(1, 2), 1 - me);
      rank.receive(stream, Elements(x).part(0, 2), 1 - me);
      rank.barrier(stream);
    });
    const std::vector<float> found = x.to_host();
    if (found != std::vector<float>{3, 6}) fail<BadInput>("found {}", fmt::join(found, ", "));
    std::string names;
    const std::vector<Span> spans = ranks.streams[me].backend().timeline();
    for (size_t i = before; i < spans.size(); ++i) names += spans[i].op + std::string(" ");
    if (!names.starts_with("all_reduce reduce all_gather transfers barrier ")) {
      fail<BadInput>("ran {}", names);
    }
  };
  CHECK(testing::run_ranks(2, run) == std::vector<std::string>(2));
}

TEST_CASE("A process group whose ranks have a GPU each takes NCCL", "[cuda][comm][ncclprocess]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const int port = testing::free_port();
  CHECK(testing::run_ranks(2, [&](int me) {
          const std::unique_ptr<Device> device = open_device({kCuda, me}, {});
          const Stream stream = device->create_stream("rank");
          const Floats x = Floats::from_host(stream, {2}, std::vector<float>(2, float(me + 1)));
          ProcessGroup group(testing::contract_of(me, 2, port), {.timeout_seconds = kLong});
          group.connect(*device)->all_reduce(stream, x);
          const std::vector<float> sum = x.to_host();
          if (group.backend() != "nccl" || sum != std::vector<float>{3, 3}) {
            fail<BadInput>("{}: {}", group.backend(), fmt::join(sum, ", "));
          }
        }) == std::vector<std::string>(2));
}

TEST_CASE("Calls of NCCL are recorded by their events: made, begun, ended, and for how long",
          "[cuda][comm][ncclprocess][flight]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const int port = testing::free_port();
  const testing::TempDir folder;
  const std::string file = folder / "flight";
  CHECK(testing::run_ranks(2, [&](int me) {
          const std::unique_ptr<Device> device = open_device({kCuda, me}, {});
          const Stream stream = device->create_stream("rank");
          const Floats x = Floats::from_host(stream, {2}, {1, 2});
          ProcessGroup group(testing::contract_of(me, 2, port),
                             {.timeout_seconds = kLong, .flight_file = file});
          const auto comm = group.connect(*device);
          comm->all_reduce(stream, x);
          stream.synchronize();
          comm->barrier(stream);  // sees that the first has ended
          stream.synchronize();
          if (!(group.flight().seconds_in_collectives() > 0)) fail<BadInput>("no time was counted");
        }) == std::vector<std::string>(2));
  for (const FlightRank& rank : read_flight_files(file)) {
    REQUIRE(rank.log.entries.size() == 2);
    const FlightEntry& sum = rank.log.entries[0];
    CHECK(flight_text(sum.text) == "all_reduce of 2 f32, sum");
    CHECK((sum.number == 1 && sum.group == 0 && sum.members == 3 && sum.bytes == 8));
    CHECK((sum.created_ns > 0 && sum.started_ns > 0 && sum.completed_ns >= sum.started_ns));
  }
}

TEST_CASE("Ranks in two groups of NCCL at once, rows and columns", "[cuda][comm][ncclprocess]") {
  const ScopedEnvironment four("CUDA_MODEL_DEVICES", "4");  // the model has as many as it is told
  LOCKSTEP_NEEDS_NCCL(4);
  const int port = testing::free_port();
  CHECK(testing::run_ranks(4, [&](int me) {
          const std::unique_ptr<Device> device = open_device({kCuda, me}, {});
          const Stream stream = device->create_stream("rank");
          ProcessGroup group(testing::contract_of(me, 4, port), {.timeout_seconds = kLong});
          const auto all = group.connect(*device), row = group.new_group(*device, me / 2),
                     column = group.new_group(*device, me % 2);
          std::vector<float> sums;
          for (Communicator* ranks : {row.get(), all.get(), column.get()}) {
            const Floats x = Floats::from_host(stream, {1}, {float(me)});
            ranks->all_reduce(stream, x);
            sums.push_back(x.to_host()[0]);
          }
          const std::vector<float> expected{float(me < 2 ? 1 : 5), 6, float(me % 2 == 0 ? 2 : 4)};
          if (sums != expected) fail<BadInput>("{}", fmt::join(sums, ", "));
        }) == std::vector<std::string>(4));
}

TEST_CASE("NCCL over processes: what is no id of a group is refused", "[cuda][comm][ncclprocess]") {
  LOCKSTEP_NEEDS_NCCL(1);
  const std::string text = message_of<BadInput>([] { nccl_communicator(0, 1, "id"); });
  CHECK_THAT(text, ContainsSubstring("has 128 bytes, found 2: all ranks take what"));
}

TEST_CASE("NCCL over processes: a rank that never comes is missed at the deadline, by name",
          "[cuda][comm][ncclprocess][row61]") {
  LOCKSTEP_NEEDS_NCCL(1);
  const auto begin = Clock::now();
  const auto rank_0_of = [](int world_size) {
    return message_of<PeerLost>([&] { nccl_communicator(0, world_size, nccl_unique_id(), 0.3); });
  };
  const std::string of_two = rank_0_of(2);
  INFO(of_two);
  CHECK(seconds_since(begin) < testing::kSoon);
  CHECK_THAT(of_two, ContainsSubstring("rank 0 (cuda:0) not ready within 0.3 s: rank 1 did not "
                                       "come, or the ranks do not reach each other; "));
  CHECK_THAT(rank_0_of(4), ContainsSubstring(": one of the other 3 ranks did not come, or"));
}

TEST_CASE("NCCL over processes: a rank that is found gone ends the others at once, silence later",
          "[cuda][comm][ncclprocess][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL(nccl_ranks(2));
  const std::string id = nccl_unique_id();
  // NCCL tells one of the two that its peer is gone; from then on that one is gone for the other.
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclAllReduce:6:3:async");
  const auto begin = Clock::now();
  std::vector<std::string> errors = testing::run_ranks(2, [&](int me) {
    const Ranks ranks = nccl_communicator(me, 2, id, 1);
    const Floats x = numbered<float>(ranks, 5, 1)[me];
    const std::string first = message_of<PeerLost>([&] {
      ranks.processes[me]->all_reduce(ranks.streams[me], x);
      ranks.streams[me].synchronize();  // both have made it: the third call is a second one
      ranks.processes[me]->all_reduce(ranks.streams[me], x);
      const Stream behind = ranks.devices[me]->create_stream("behind");  // as an optimizer's
      behind.wait(ranks.streams[me].record());
      behind.synchronize();
    });
    const std::string next =
        message_of<PeerLost>([&] { ranks.processes[me]->barrier(ranks.streams[me]); });
    if (next != first) fail<BadInput>("first {}, then {}", first, next);
    throw PeerLost(first);
  });
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

TEST_CASE("NCCL over processes: a host is freed even where the GPU stays stuck",
          "[cuda][comm][ncclprocess][row125]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL(nccl_ranks(2));
  const std::string id = nccl_unique_id();
  testing::Gate gate;  // rank 1's stream comes to it, and rank 0's when NCCL has let it go
  const auto pass = [&] { gate.pass(); };
  const std::vector<std::string> errors = testing::run_ranks(2, [&](int me) {
    const Ranks ranks = nccl_communicator(me, 2, id, 0.3);
    const Stream stream = ranks.streams[me];
    const Floats x = numbered<float>(ranks, 5, 1)[me];
    if (me == 1) stream.backend().host_task("gate", pass);
    ranks.processes[me]->all_reduce(stream, x);
    if (me == 0) stream.backend().host_task("gate", pass);
    const auto begin = Clock::now();
    const std::string text = message_of<PeerLost>([&] { stream.synchronize(); });
    const double seconds = seconds_since(begin);
    if (me == 0) gate.open();
    if (me == 0 && (seconds < 2 || seconds > 10)) fail<BadInput>("{} s: {}", seconds, text);
    throw PeerLost(text);
  });
  INFO(errors[0] << "\n" << errors[1]);
  CHECK_THAT(errors[0],
             StartsWith("rank 0: collective 1 (all_reduce of 5 f32, sum): no answer from "
                        "rank 1 within 0.3 s"));
  CHECK_THAT(errors[1], StartsWith("rank 1: collective 1 (all_reduce of 5 f32, sum): "));
}

}  // namespace
}  // namespace lockstep
