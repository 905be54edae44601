// Collectives between GPUs by NCCL: against a serial reference, in order with what the ranks'
// streams do before and behind them, and with every way in which a rank can fail. What
// comm_test.cpp shows for the in-process world, as far as NCCL can do it.

#include <fmt/ranges.h>

#include <chrono>
#include <filesystem>

#include "common/core/stream_backend.h"
#include "common/group/process_group.h"
#include "tests/gpu/gpu_test_support.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/free_port.h"
#include "tests/support/rank_threads.h"
#include "tests/support/stage.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using testing::Clock;
using testing::device_ids;
using testing::is_model;
using testing::kLong;
using testing::message_of;
using testing::numbered;
using testing::occupy;
using testing::Ranks;
using testing::ScopedEnvironment;
using testing::seconds_since;
using testing::Trial;
using Floats = BasicTensor<float>;

constexpr auto kCuda = DeviceId::Kind::cuda;

/// Faults can be planted in the CUDA model only.
#define LOCKSTEP_NEEDS_THE_MODEL(ranks) \
  if (!is_model(*(ranks).devices[0])) LOCKSTEP_SKIP("no GPU that fails when it is told to")

Ranks nccl_ranks(int world_size) {
  return Ranks(device_ids(world_size, kCuda), LocalBackend::nccl);
}

void all_reduce(const Ranks& ranks, const std::vector<Floats>& x) {
  ranks.together([&](Communicator& rank, Stream s) { rank.all_reduce(s, x[rank.rank()]); });
}

// --- Results -------------------------------------------------------------------------------------

template <class T>
void check_everything(Ranks& ranks) {
  const int64_t world_size = ranks.size();
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{2}, world_size - 1, world_size,
                          world_size + 1, int64_t{100001}}) {
    INFO(world_size << " ranks, shares of " << n << " elements of " << sizeof(T) << " bytes");
    Trial<T> trial(ranks, n);
    trial.enqueue_all();
    CHECK(trial.first_fault() == "");  // two numbers have one sum, in whatever order
  }
}

void check_everything(int world_size) {
  Ranks ranks = nccl_ranks(world_size);
  CHECK_THAT(ranks.world->description(), StartsWith("NCCL 2."));
  check_everything<float>(ranks);
  check_everything<double>(ranks);
  check_everything<int64_t>(ranks);
  ranks.world->wait(kLong);
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

TEST_CASE("With NCCL every collective of a world of one rank is a copy", "[cuda][comm][row122]") {
  LOCKSTEP_NEEDS_NCCL(1);
  const Ranks ranks = nccl_ranks(1);
  const std::vector<float> values{3, 1, 4, 1, 5};
  const Floats x = Floats::from_host(ranks.streams[0], {5}, values);
  std::vector<Floats> to;
  for (int i = 0; i < 4; ++i) to.push_back(numbered<float>(ranks, 5, -1)[0]);
  ranks.together([&](Communicator& rank, Stream stream) {
    rank.all_gather(stream, x, to[0]);
    rank.reduce_scatter(stream, x, to[1], Reduction::average);
    rank.gather(stream, x, to[2], 0);
    rank.scatter(stream, x, to[3], 0);
    rank.all_reduce(stream, x, Reduction::average);
    rank.broadcast(stream, x, 0);
    rank.reduce(stream, x, 0);
    rank.barrier(stream);
  });
  for (const Floats& copy : to) CHECK(copy.to_host() == values);
  CHECK(x.to_host() == values);
}

TEST_CASE("Different GPUs meet by NCCL, one GPU alone in-process", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  CHECK_THAT(Ranks(device_ids(2, kCuda)).world->description(), StartsWith("NCCL 2."));
  CHECK(Ranks(device_ids(1, kCuda)).world->description() == "in-process");
  CHECK(Ranks({{kCuda, 0}, {kCuda, 0}}).world->description() == "in-process");
}

// --- Order ---------------------------------------------------------------------------------------

TEST_CASE("NCCL's collectives wait for slow producers, and what follows waits for slow ranks",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  for (int slow = 0; slow < 2; ++slow) {
    Ranks ranks = nccl_ranks(2);
    Trial<float> trial(ranks, 1003);
    for (const auto& collective : testing::collectives(ElementType::f32, 2)) {
      occupy(ranks.streams[slow], 0.005);
      trial.enqueue(collective, slow);
    }
    CHECK(trial.first_fault() == "");
  }
}

TEST_CASE("NCCL runs the dependent calls of one group in the order in which they were made",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  testing::check_dependent_calls(nccl_ranks(2));
}

TEST_CASE("With NCCL transfers that need each other go together, the n-th meets the n-th",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  const auto from = numbered<float>(ranks, 100000, 1), to = numbered<float>(ranks, 100000, -9);
  ranks.together([&](Communicator& rank, Stream stream) {
    const int me = rank.rank(), other = 1 - me;
    const Elements mine = from[me], its = to[me];
    rank.send(stream, mine.part(0, 99999), other);
    rank.send(stream, mine.part(0, 1), other);
    rank.receive(stream, its.part(0, 99999), other);
    rank.receive(stream, its.part(99999, 1), other);
  });
  CHECK(to[0].to_host() == std::vector<float>(100000, 2));
  CHECK(to[1].to_host() == std::vector<float>(100000, 1));
}

TEST_CASE("NCCL's collectives may lie on several streams of a rank", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  std::vector<Stream> second;
  for (Device* device : ranks.devices) second.push_back(device->create_stream("second"));
  const auto x = numbered<float>(ranks, 5, 1), y = numbered<float>(ranks, 5, 10);
  occupy(ranks.streams[0], 0.02);
  ranks.together([&](Communicator& rank, Stream stream) {
    rank.all_reduce(stream, x[rank.rank()]);
    rank.all_reduce(second[rank.rank()], y[rank.rank()]);
  });
  ranks.world->wait(kLong);
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(x[rank].to_host() == std::vector<float>(5, 3));
    CHECK(y[rank].to_host() == std::vector<float>(5, 21));
  }
}

TEST_CASE("Nobody passes a barrier of NCCL's before all have come to it", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  occupy(ranks.streams[1], 0.1);
  const Event came = ranks.streams[1].record();
  ranks.together([](Communicator& rank, Stream stream) { rank.barrier(stream); });
  const Event passed = ranks.streams[0].record();
  CHECK_FALSE(came.done());  // the host did not wait either
  passed.synchronize();
  CHECK(came.done());
}

TEST_CASE("The trace names NCCL's collectives on every rank's stream", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  std::vector<std::unique_ptr<Device>> owned;
  std::vector<Device*> devices;
  std::vector<Stream> streams;
  for (const DeviceId& id : device_ids(2, kCuda)) {
    owned.push_back(open_device(id, {.trace = true}));
    devices.push_back(owned.back().get());
    streams.push_back(devices.back()->create_stream("traced"));
  }
  const auto world = make_nccl_world(devices);
  for (int step = 0; step < 2; ++step) {
    const CollectiveGroup group(*world);
    for (int rank = 0; rank < 2; ++rank) world->rank(rank).barrier(streams[rank]);
  }
  for (const Stream& stream : streams) {
    stream.synchronize();
    const std::vector<Span> spans = stream.backend().timeline();
    REQUIRE(spans.size() == 2);
    for (const Span& span : spans) {
      CHECK(std::string(span.op) == "barrier");
      CHECK(span.begin_ns <= span.end_ns);
    }
  }
}

// --- What is refused -----------------------------------------------------------------------------

TEST_CASE("Two ranks on one GPU are refused before NCCL sees them", "[cuda][comm][row123]") {
  LOCKSTEP_NEEDS_NCCL(1);
  const std::vector<DeviceId> one_gpu(2, {kCuda, 0});
  const std::string text = message_of<BadInput>([&] { Ranks(one_gpu, LocalBackend::nccl); });
  INFO(text);
  CHECK_THAT(text, StartsWith("rank 0 (cuda:0) and rank 1 (cuda:0) are on the same GPU, "));
  CHECK_THAT(text, ContainsSubstring(", GPU-") && ContainsSubstring("each GPU once"));
  CHECK(text.find('\n') == std::string::npos);
}

TEST_CASE("Ranks that disagree are told so before NCCL hangs, and no group follows",
          "[cuda][comm][row71]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  const auto x = numbered<float>(ranks, 5, 1);
  std::string said;
  const auto together = [&](auto of_rank_1) {
    return message_of<PeerLost>([&] {
      ranks.together([&](Communicator& rank, Stream stream) {
        if (rank.rank() == 0) rank.all_reduce(stream, x[0]);
        if (rank.rank() == 1) of_rank_1(rank, stream);
      });
    });
  };
  SECTION("in the count") {
    said = together([&](auto& rank, Stream s) { rank.all_reduce(s, Elements(x[1]).part(0, 4)); });
    CHECK_THAT(said, ContainsSubstring("all_reduce of 4 f32"));
  }
  SECTION("in the operation") {
    said = together([&](auto& rank, Stream s) { rank.broadcast(s, x[1], 0); });
    CHECK_THAT(said, ContainsSubstring("broadcast of 5 f32"));
  }
  SECTION("one calls nothing") {
    said = together([](auto&, Stream) {});
    CHECK_THAT(said, ContainsSubstring("called nothing"));
  }
  INFO(said);
  CHECK_THAT(said, ContainsSubstring("rank 0 (cuda:0) called all_reduce of 5 f32"));
  CHECK_THAT(said, ContainsSubstring("rank 1 (cuda:1)"));
  CHECK(message_of<PeerLost>([&] { all_reduce(ranks, x); }) == said);
  CHECK(message_of<PeerLost>([&] { ranks.world->wait(kLong); }) == said);
  CHECK(x[0].to_host() == std::vector<float>(5, 1));  // nothing was enqueued
}

TEST_CASE("An NCCL world refuses calls outside a group, and forgets those of a broken off one",
          "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  const auto x = numbered<float>(ranks, 5, 1);
  CHECK_THAT(message_of<BadInput>([&] { ranks.world->rank(0).barrier(ranks.streams[0]); }),
             ContainsSubstring("rank 0: barrier outside a CollectiveGroup"));
  CHECK(message_of<NonFinite>([&] {
          const CollectiveGroup group(*ranks.world);
          ranks.world->rank(0).all_reduce(ranks.streams[0], x[0]);
          throw NonFinite("the loss is NaN");
        }) == "the loss is NaN");
  all_reduce(ranks, x);
  CHECK(x[1].to_host() == std::vector<float>(5, 3));
}

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
  // A process cannot use a GPU any more whose kernel has failed.
  const testing::ProcessResult child =
      testing::run_process({std::filesystem::read_symlink("/proc/self/exe"), "[.gpu-is-lost]"}, 60,
                           {{"LOCKSTEP_TEST_LOG", "/dev/null"}});
  INFO(testing::story(child));
  CHECK_FALSE(child.timed_out);
  CHECK(child.status == 0);
}

// --- One rank per process, as threads here ------------------------------------------------------

/// Rank `rank`, on the GPU of that number.
Ranks nccl_process(int rank, int world_size, const std::string& id, double timeout_seconds = kLong,
                   const DeviceOptions& options = {}) {
  return Ranks({kCuda, rank}, rank, world_size, options, [&](Device& device) {
    return make_nccl_rank(device, rank, world_size, id, timeout_seconds);
  });
}

void check_processes(int world_size) {
  const std::string id = nccl_unique_id();
  const std::vector<std::string> errors = testing::run_ranks(world_size, [&](int rank) {
    Ranks ranks = nccl_process(rank, world_size, id);
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
    const Ranks ranks = nccl_process(me, 2, id, kLong, {.trace = true});
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

TEST_CASE("NCCL over processes: what is no id of a group is refused", "[cuda][comm][ncclprocess]") {
  LOCKSTEP_NEEDS_NCCL(1);
  const std::string text = message_of<BadInput>([] { nccl_process(0, 1, "id"); });
  CHECK_THAT(text, ContainsSubstring("has 128 bytes, found 2: all ranks take what"));
}

TEST_CASE("NCCL over processes: a rank that never comes is missed at the deadline, by name",
          "[cuda][comm][ncclprocess][row61]") {
  LOCKSTEP_NEEDS_NCCL(1);
  const auto begin = Clock::now();
  const auto rank_0_of = [](int world_size) {
    return message_of<PeerLost>([&] { nccl_process(0, world_size, nccl_unique_id(), 0.3); });
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
  // NCCL tells one of the two that its peer is gone; from there on that one is gone for the other.
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclAllReduce:6:3:async");
  const auto begin = Clock::now();
  std::vector<std::string> errors = testing::run_ranks(2, [&](int me) {
    const Ranks ranks = nccl_process(me, 2, id, 1);
    const Floats x = numbered<float>(ranks, 5, 1)[me];
    const std::string first = message_of<PeerLost>([&] {
      for (int i = 0; i < 2; ++i) ranks.processes[me]->all_reduce(ranks.streams[me], x);
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
    const Ranks ranks = nccl_process(me, 2, id, 0.3);
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

TEST_CASE("wait() of an NCCL world waits for the groups and for nothing else", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  ranks.world->wait(0);  // no group yet
  const auto x = numbered<float>(ranks, 1 << 22, 1);
  occupy(ranks.streams[0], 0.02);
  all_reduce(ranks, x);
  const Event group = ranks.streams[1].record();
  occupy(ranks.streams[1], 0.3);  // behind the group: none of wait()'s business
  const Event end = ranks.streams[1].record();
  ranks.world->wait(kLong);
  CHECK(group.done());
  CHECK_FALSE(end.done());
}

TEST_CASE("An NCCL world may go while its groups still run", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  Ranks ranks = nccl_ranks(2);
  const auto x = numbered<float>(ranks, 5, 1);
  occupy(ranks.streams[1], 0.05);
  all_reduce(ranks, x);
  ranks.world.reset();
  for (const Floats& sum : x) CHECK(sum.to_host() == std::vector<float>(5, 3));
}

TEST_CASE("An NCCL world goes even where NCCL does not get to an end", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  Ranks ranks = nccl_ranks(2);
  LOCKSTEP_NEEDS_THE_MODEL(ranks);
  const auto x = numbered<float>(ranks, 5, 1);
  ranks.world = make_nccl_world(ranks.devices, 0.2);
  all_reduce(ranks, x);
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclCommFinalize:7:2:async");
  const auto begin = Clock::now();
  ranks.world.reset();
  CHECK(seconds_since(begin) >= 0.2);
  CHECK(seconds_since(begin) < 5);
  const ScopedEnvironment refused("CUDA_MODEL_FAULT", "ncclCommFinalize:3:2");
  ranks.world = make_nccl_world(ranks.devices);
  ranks.world.reset();
  CHECK(x[0].to_host() == std::vector<float>(5, 3));
}

}  // namespace
}  // namespace lockstep
