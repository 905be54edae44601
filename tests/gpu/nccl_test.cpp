// Collectives between GPUs by NCCL: against a serial reference, and in order with what the ranks'
// streams do before and after them. The same as tests/unit/comm/transports_test.cpp, as far as
// NCCL can do it.

#include <fmt/ranges.h>

#include "common/comm/process_group.h"
#include "common/core/stream_backend.h"
#include "common/launch/flight_table.h"
#include "tests/gpu/nccl_test_support.h"
#include "tests/support/data_test_files.h"
#include "tests/support/free_port.h"

namespace lockstep {
namespace {

using namespace testing::nccl;
using testing::kGpu;
using testing::kLong;
using testing::message_of;
using testing::numbered;
using testing::occupy;
using testing::Ranks;
using testing::ScopedEnvironment;
using testing::Trial;
using Floats = BasicTensor<float>;
using Values = std::vector<float>;

// --- Results -------------------------------------------------------------------------------------

void check_everything(int world_size) {
  CHECK(run_nccl_ranks(world_size, [](Ranks& ranks, int) {
          std::string fault = testing::first_fault_of_all(ranks, {0, 1, 2, 3, 1000});
          Trial<float> large(ranks, 100001);
          large.enqueue_all(/*every_root=*/false);
          if (fault.empty()) fault = large.first_fault();
          require(fault.empty(), "{}", fault);
        }) == no_errors(world_size));
}

TEST_CASE("With NCCL every collective is what a serial program computes, for one rank",
          "[cuda][comm][row70][row122]") {
  LOCKSTEP_NEEDS_NCCL(1);
  check_everything(1);
}

TEST_CASE("With NCCL every collective is what a serial program computes, for two ranks",
          "[cuda][comm][row70]") {
  LOCKSTEP_NEEDS_NCCL(2);
  check_everything(2);
}

TEST_CASE("With NCCL the same is computed where its communicators do not block", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const ScopedEnvironment way("NCCL_COMM_BLOCKING", "0");
  CHECK(run_nccl_ranks(2, [](Ranks& ranks, int) {
          const std::string fault = testing::first_fault_of_all(ranks, {3, 1000});
          require(fault.empty(), "{}", fault);
        }) == no_errors(2));
}

// --- Order ---------------------------------------------------------------------------------------

TEST_CASE("With NCCL the calls of a group take effect in their order, traced by name",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const auto run = [](Ranks& ranks, int me) {
    const Floats x = numbered<float>(ranks, 2, 1)[me], all = numbered<float>(ranks, 4, 0)[me];
    ranks.streams[me].synchronize();
    const size_t before = ranks.streams[me].backend().timeline().size();
    ranks.together([&](Communicator& comm, Stream stream) {
      comm.all_gather(stream, x, all);  // 1, 2 everywhere
      comm.all_reduce(stream, all);     // 2, 4 everywhere
      comm.send(stream, Elements(all).part(1, 2), 1 - me);
      comm.receive(stream, Elements(x).part(0, 2), 1 - me);  // 2, 4 in each
      comm.reduce_scatter(stream, all, x);                   // 4, 8
      comm.broadcast(stream, Elements(x).part(1, 1), 1);     // of the second elements only
      comm.barrier(stream);
    });
    require_numbers(x, me == 0 ? Values{4, 8} : Values{8, 8});
    std::string names;
    const std::vector<Span> spans = ranks.streams[me].backend().timeline();
    for (size_t i = before; i < spans.size(); ++i) names += spans[i].op + std::string(" ");
    require(names.starts_with("all_gather all_reduce transfers reduce_scatter broadcast barrier "),
            "ran {}", names);
  };
  CHECK(run_nccl_ranks(2, run, kLong, {.trace = true}) == no_errors(2));
}

TEST_CASE("NCCL's collectives wait for slow producers, and what follows waits for slow ranks",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  for (const int slow : {0, 1}) {
    CHECK(run_nccl_ranks(2, [&](Ranks& ranks, int me) {
            Trial<float> trial(ranks, 1003);
            for (const auto& collective : testing::collectives(ElementType::f32, 2)) {
              if (me == slow) occupy(ranks.streams[me], 0.005);
              trial.enqueue(collective, slow);
            }
            const std::string fault = trial.first_fault();
            require(fault.empty(), "{}", fault);
          }) == no_errors(2));
  }
}

TEST_CASE("With NCCL transfers that need each other go together, the n-th meets the n-th",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  CHECK(run_nccl_ranks(2, [](Ranks& ranks, int me) {
          const Floats from = numbered<float>(ranks, 100000, 1)[me],
                       to = numbered<float>(ranks, 100000, -9)[me];
          ranks.together([&](Communicator& comm, Stream stream) {
            const Elements mine = from, its = to;
            comm.send(stream, mine.part(0, 99999), 1 - me);
            comm.send(stream, mine.part(0, 1), 1 - me);
            comm.receive(stream, its.part(0, 99999), 1 - me);
            comm.receive(stream, its.part(99999, 1), 1 - me);
          });
          require_numbers(to, Values(100000, float(2 - me)));
        }) == no_errors(2));
}

TEST_CASE("NCCL's collectives may lie on several streams of a rank", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  CHECK(run_nccl_ranks(2, [](Ranks& ranks, int me) {
          const Stream second = ranks.devices[me]->create_stream("second");
          const Floats x = numbered<float>(ranks, 5, 1)[me];
          const Floats y = Floats::from_host(second, {5}, Values(5, float(10 + me)));
          if (me == 0) occupy(ranks.streams[me], 0.02);
          ranks.together([&](Communicator& comm, Stream stream) {
            comm.all_reduce(stream, x);
            comm.all_reduce(second, y);
          });
          require_numbers(x, Values(5, 3));
          require_numbers(y, Values(5, 21));
        }) == no_errors(2));
}

TEST_CASE("Nobody passes a barrier of NCCL's before all have come to it", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  testing::Gate gate;
  std::atomic<bool> opened = false;
  CHECK(run_nccl_ranks(2, [&](Ranks& ranks, int me) {
          const Stream stream = ranks.streams[me];
          if (me == 1) stream.backend().host_task("gate", [&] { gate.pass(); });
          ranks.comms[me]->barrier(stream);
          const Event passed = stream.record();
          if (me == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(30));
            require(!passed.done(), "rank 0 has passed, and rank 1 has not come");
            opened = true;
            gate.open();
          }
          passed.synchronize();
          require(opened, "rank {} has passed a barrier that rank 1 has not come to", me);
        }) == no_errors(2));
}

TEST_CASE("A rank of NCCL's may go while its calls still run", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  CHECK(run_nccl_ranks(2, [](Ranks& ranks, int me) {
          const Floats x = numbered<float>(ranks, 5, 1)[me];
          if (me == 1) occupy(ranks.streams[me], 0.05);
          ranks.comms[me]->all_reduce(ranks.streams[me], x);
          ranks.comms[me].reset();
          require_numbers(x, Values(5, 3));
        }) == no_errors(2));
}

// --- As the backend of a process group -----------------------------------------------------------

TEST_CASE("A process group whose ranks have a GPU each takes NCCL", "[cuda][comm]") {
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

/// Whether `holds()`, within some seconds: the watcher looks fifty times in each.
template <class Holds>
bool soon(Holds holds) {
  const auto begin = testing::Clock::now();
  while (!holds() && testing::seconds_since(begin) < testing::kSoon) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return holds();
}

TEST_CASE("Calls of NCCL are recorded by their events: made, begun, ended, and for how long",
          "[cuda][comm][flight]") {
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
          comm->barrier(stream);
          stream.synchronize();
          const auto counted = [&] { return group.flight().seconds_in_collectives() > 0; };
          if (!soon(counted)) fail<BadInput>("no time was counted");
        }) == std::vector<std::string>(2));
  for (const FlightRank& rank : read_flight_files(file)) {
    REQUIRE(rank.log.entries.size() == 2);
    const FlightEntry& sum = rank.log.entries[0];
    CHECK(flight_text(sum.text) == "all_reduce of 2 f32, sum");
    CHECK((sum.number == 1 && sum.group == 0 && sum.members == 3 && sum.bytes == 8));
    CHECK((sum.created_ns > 0 && sum.started_ns > 0 && sum.completed_ns >= sum.started_ns));
  }
}

TEST_CASE("A call of NCCL that ends while the watcher looks is recorded all the same",
          "[cuda][comm][flight]") {
  LOCKSTEP_NEEDS_NCCL(1);
  LOCKSTEP_NEEDS_THE_MODEL();
  const std::unique_ptr<Device> device = open_device(kGpu, {});
  const Stream stream = device->create_stream("rank");
  const Floats x = Floats::from_host(stream, {2}, {1, 2});
  for (const int late : {1, 2, 3, 4}) {  // the question that is answered with "not yet"
    const testing::TempDir folder;
    ProcessGroup group(testing::contract_of(0, 1, testing::free_port()),
                       {.backend = "nccl", .flight_file = folder / "flight"});
    const auto comm = group.connect(*device);
    const ScopedEnvironment fault("CUDA_MODEL_FAULT", fmt::format("cudaEventQuery:600:{}", late));
    comm->all_reduce(stream, x);
    INFO("question " << late);
    CHECK(soon([&] {  // an entry that is being written is not read
      const auto entries = read_flight_files(folder / "flight").at(0).log.entries;
      return !entries.empty() && entries[0].completed_ns > 0;
    }));
  }
}

TEST_CASE("Ranks in two groups of NCCL at once, rows and columns", "[cuda][comm]") {
  const ScopedEnvironment four("CUDA_MODEL_DEVICES", "4");  // the model has as many as it is told
  LOCKSTEP_NEEDS_NCCL(4);
  const int port = testing::free_port();
  CHECK(testing::run_ranks(4, [&](int me) {
          const std::unique_ptr<Device> device = open_device({kCuda, me}, {});
          const Stream stream = device->create_stream("rank");
          ProcessGroup group(testing::contract_of(me, 4, port), {.timeout_seconds = kLong});
          const auto all = group.connect(*device),
                     row = group.new_group(*device, [](int rank) { return rank / 2; }),
                     column = group.new_group(*device, [](int rank) { return rank % 2; });
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

/// The errors of four ranks, in rows and columns of a model whose GPUs have room for so many of
/// NCCL's kernels. If rows and columns have streams of their own, ranks 0 and 3 come late to their
/// rows, 1 and 2 to their columns, though all hosts make both calls in one order.
std::vector<std::string> rows_and_columns(bool one_stream, int kernels, double timeout_seconds) {
  const ScopedEnvironment room("CUDA_MODEL_NCCL_ROOM", std::to_string(kernels));
  const int port = testing::free_port();
  testing::Gate gate;  // of the streams that are late
  return testing::run_ranks(4, [&](int me) {
    const std::unique_ptr<Device> device = open_device({kCuda, me}, {});
    const Stream rows = device->create_stream("rows");
    const Stream columns = one_stream ? rows : device->create_stream("columns");
    ProcessGroup group(testing::contract_of(me, 4, port), {.timeout_seconds = timeout_seconds});
    const auto all = group.connect(*device),
               row = group.new_group(*device, [](int rank) { return rank / 2; }),
               column = group.new_group(*device, [](int rank) { return rank % 2; });
    const Floats x = Floats::from_host(rows, {1}, {float(me)}),
                 y = Floats::from_host(columns, {1}, {float(me)});
    const Stream late = me == 0 || me == 3 ? rows : columns;
    if (!one_stream) late.backend().host_task("gate", [&] { gate.pass(); });
    row->all_reduce(rows, x);
    column->all_reduce(columns, y);
    group.barrier();
    if (me == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      gate.open();
    }
    const std::vector<float> sums{x.to_host()[0], y.to_host()[0]};
    if (sums != std::vector<float>{float(me < 2 ? 1 : 5), float(me % 2 == 0 ? 2 : 4)}) {
      fail<BadInput>("{}", fmt::join(sums, ", "));
    }
  });
}

TEST_CASE("Ranks in two groups that wait in a circle", "[.circle]") {
  report_uncaught_errors();
  rows_and_columns(/*one_stream=*/false, 1, 4);
}

TEST_CASE("Ranks in two groups of NCCL wait in a circle where each group has a stream",
          "[cuda][comm]") {
  const ScopedEnvironment four("CUDA_MODEL_DEVICES", "4");
  LOCKSTEP_NEEDS_NCCL(4);
  LOCKSTEP_NEEDS_THE_MODEL();
  const std::vector<std::string> none(4);
  CHECK(rows_and_columns(/*one_stream=*/true, 1, kLong) == none);
  CHECK(rows_and_columns(/*one_stream=*/false, 2, kLong) == none);
  check_lost(run_hidden("[.circle]"), "no answer from");
}

}  // namespace
}  // namespace lockstep
