// Collectives between GPUs by NCCL: against a serial reference, in order with what the ranks'
// streams do before and after them, and calls that are refused. The same as the tests of
// tests/unit/comm for the in-process world, as far as NCCL can do it.

#include "common/core/stream_backend.h"
#include "common/group/process_group.h"
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
using testing::device_ids;
using testing::kLong;
using testing::message_of;
using testing::numbered;
using testing::occupy;
using testing::Ranks;
using testing::ScopedEnvironment;
using testing::seconds_since;
using testing::Trial;
using Floats = BasicTensor<float>;

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
    for (int rank = 0; rank < 2; ++rank) world->communicator(rank).barrier(streams[rank]);
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
  CHECK_THAT(message_of<BadInput>([&] { ranks.world->communicator(0).barrier(ranks.streams[0]); }),
             ContainsSubstring("rank 0: barrier outside a CollectiveGroup"));
  CHECK(message_of<NonFinite>([&] {
          const CollectiveGroup group(*ranks.world);
          ranks.world->communicator(0).all_reduce(ranks.streams[0], x[0]);
          throw NonFinite("the loss is NaN");
        }) == "the loss is NaN");
  all_reduce(ranks, x);
  CHECK(x[1].to_host() == std::vector<float>(5, 3));
}

TEST_CASE("wait() of an NCCL world waits for the groups and for nothing else", "[cuda][comm]") {
  LOCKSTEP_NEEDS_NCCL(2);
  const Ranks ranks = nccl_ranks(2);
  ranks.world->wait(0);  // no group yet
  const auto x = numbered<float>(ranks, 1 << 22, 1);
  occupy(ranks.streams[0], 0.02);
  all_reduce(ranks, x);
  const Event group = ranks.streams[1].record();
  occupy(ranks.streams[1], 0.3);  // after the group: wait() does not wait for it
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
