// Collectives between the CPU devices of one process: against a serial reference, and in order with
// what the ranks' streams do before and after them.

#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "common/kernels/kernels.h"
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
using testing::collectives;
using testing::device_ids;
using testing::enqueue;
using testing::Gate;
using testing::kLong;
using testing::message_of;
using testing::numbered;
using testing::Ranks;
using testing::ScopedEnvironment;
using testing::Trial;
using Floats = BasicTensor<float>;
using Doubles = BasicTensor<double>;
using Wholes = BasicTensor<int64_t>;

// --- Results -------------------------------------------------------------------------------------

template <class T>
void check_everything(Ranks& ranks, const std::vector<int64_t>& counts) {
  for (const int64_t n : counts) {
    INFO(ranks.size() << " ranks, shares of " << n << " elements of " << sizeof(T) << " bytes");
    Trial<T> trial(ranks, n);
    trial.enqueue_all(/*every_root=*/n == 1 || n > ranks.size());
    CHECK(trial.first_fault() == "");
  }
}

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;  // which takes a second for each million elements
#else
constexpr bool kThreadSanitizer = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif
// All of it once is enough: the double build has the same collectives, which name their element.
constexpr bool kAllLarge = !kAddressSanitizer && !kThreadSanitizer && sizeof(Real) == sizeof(float);

template <class T>
void check_large(int world_size, const std::vector<testing::Collective>& cases) {
  Ranks ranks(device_ids(world_size));
  Trial<T> trial(ranks, 1000001);
  for (const auto& collective : cases) {  // one at a time: it is much memory
    trial.enqueue(collective, world_size - 1);
    CHECK(trial.first_fault() == "");
  }
}

}  // namespace

TEST_CASE("Every collective is what a serial program computes, for one to eight ranks",
          "[comm][tsan][row70]") {
  for (int64_t world_size = 1; world_size <= 8; ++world_size) {
    Ranks ranks(device_ids(static_cast<int>(world_size)));
    CHECK(ranks.world->description() == "in-process");
    const std::vector<int64_t> counts{0, 1, 2, world_size - 1, world_size, world_size + 1};
    check_everything<float>(ranks, counts);
    check_everything<int64_t>(ranks, counts);
    if (!kThreadSanitizer) check_everything<double>(ranks, counts);
  }
}

TEST_CASE("Every collective is what a serial program computes, for a million elements and one",
          "[comm][tsan][row70]") {
  if (testing::full_campaign() && kAllLarge) {
    for (int world_size = 1; world_size <= 5; ++world_size) {
      check_large<float>(world_size, collectives(ElementType::f32, world_size));
      check_large<double>(world_size, collectives(ElementType::f64, world_size));
      check_large<int64_t>(world_size, collectives(ElementType::i64, world_size));
    }
    return;
  }
  if (kThreadSanitizer) return check_large<float>(3, {{Call::Op::all_reduce}});
  for (const int world_size : {1, 5}) check_large<float>(world_size, {{Call::Op::all_reduce}});
  check_large<float>(3, collectives(ElementType::f32, 3));
  check_large<double>(2, {{Call::Op::all_reduce}, {Call::Op::all_gather}, {Call::Op::send}});
  check_large<int64_t>(2, {{Call::Op::all_reduce}, {Call::Op::reduce_scatter}});
}

TEST_CASE("The dependent calls of one group take effect in the order in which they were made",
          "[comm][tsan]") {
  testing::check_dependent_calls(Ranks(device_ids(2)));
}

TEST_CASE("Sums are made in rank order: bit by bit the same on all ranks, in every run",
          "[comm][row70]") {
  constexpr int64_t kCount = 1003;
  Ranks ranks(device_ids(8));
  std::vector<float> forward(kCount), backward(kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    for (int rank = 0; rank < 8; ++rank) {
      forward[i] += testing::number<float>(rank, i);
      backward[i] += testing::number<float>(7 - rank, i);
    }
  }
  REQUIRE(forward != backward);  // or the order would not show
  for (int run = 0; run < 3; ++run) {
    std::vector<Floats> x;
    for (int rank = 0; rank < 8; ++rank) {
      std::vector<float> values(kCount);
      for (int64_t i = 0; i < kCount; ++i) values[i] = testing::number<float>(rank, i);
      x.push_back(Floats::from_host(ranks.streams[rank], {kCount}, values));
    }
    ranks.together(
        [&](Communicator& rank, Stream stream) { rank.all_reduce(stream, x[rank.rank()]); });
    for (const Floats& sum : x) CHECK(sum.to_host() == forward);
  }
}

TEST_CASE("In a world of one rank every collective is a copy", "[comm][row122]") {
  Ranks ranks(device_ids(1));
  const Stream stream = ranks.streams[0];
  const std::vector<double> values{3, 1, 4, 1, 5}, nothing(5, -1);
  const auto put = [&](const std::vector<double>& v) { return Doubles::from_host(stream, {5}, v); };
  const Doubles x = put(values);
  std::vector<Doubles> to;
  for (int i = 0; i < 4; ++i) to.push_back(put(nothing));
  ranks.together([&](Communicator& rank, Stream) {
    rank.all_gather(stream, x, to[0]);
    rank.reduce_scatter(stream, x, to[1], Reduction::average);
    rank.gather(stream, x, to[2], 0);
    rank.scatter(stream, x, to[3], 0);
    rank.all_reduce(stream, x, Reduction::average);
    rank.broadcast(stream, x, 0);
    rank.reduce(stream, x, 0);
    rank.barrier(stream);
  });
  for (const Doubles& copy : to) CHECK(copy.to_host() == values);
  CHECK(x.to_host() == values);
}

TEST_CASE("Ranks that share a device work like ranks that do not", "[comm][tsan][row40]") {
  using Kind = DeviceId::Kind;
  Ranks shared({{Kind::cpu, 0}, {Kind::cpu, 0}, {Kind::cpu, 0}});
  CHECK(shared.owned.size() == 1);
  check_everything<float>(shared, {1, 5});
  Ranks mixed({{Kind::cpu, 3}, {Kind::cpu, 1}, {Kind::cpu, 3}, {Kind::cpu, 1}});
  check_everything<int64_t>(mixed, {1, 5});
}

TEST_CASE("Ranks of one device may even share a stream", "[comm]") {
  Ranks ranks({{DeviceId::Kind::cpu, 0}, {DeviceId::Kind::cpu, 0}});
  ranks.streams[1] = ranks.streams[0];
  check_everything<double>(ranks, {1, 5});
}

TEST_CASE("Sixteen ranks are served, seventeen are refused", "[comm]") {
  Ranks ranks(device_ids(16));
  CHECK(counts_its_ranks(ranks));
  std::vector<Device*> devices = ranks.devices;
  devices.push_back(devices[0]);
  const std::string text = message_of<BadInput>([&] { make_single_process_world(devices); });
  CHECK_THAT(text, ContainsSubstring("17 ranks") && ContainsSubstring("at most 16"));
}

// --- Order ---------------------------------------------------------------------------------------

TEST_CASE("A collective waits for slow producers, and what follows it waits for slow ranks",
          "[comm][tsan][row70]") {
  for (int slow = 0; slow < 3; ++slow) {
    Ranks ranks(device_ids(3));
    Trial<float> trial(ranks, 5);
    for (const auto& collective : collectives(ElementType::f32, 3)) {
      enqueue(ranks.streams[slow], [] { std::this_thread::sleep_for(milliseconds(3)); });
      trial.enqueue(collective, slow);
    }
    CHECK(trial.first_fault() == "");
  }
}

TEST_CASE("Under LOCKSTEP_CHAOS every collective still computes the same", "[comm][tsan][row70]") {
  const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "200");
  for (const int world_size : {2, 3, 4}) {
    Ranks ranks(device_ids(world_size));
    for (int round = 0; round < (testing::full_campaign() ? 20 : 1); ++round) {
      check_everything<float>(ranks, {world_size + 1});
    }
  }
}

TEST_CASE("Kernels and collectives of many groups keep their order without the host's help",
          "[comm][tsan]") {
  const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "100");
  constexpr int kRanks = 4, kSteps = 25;
  Ranks ranks(device_ids(kRanks));
  std::vector<Tensor> x;
  for (const Stream& stream : ranks.streams) x.push_back(Tensor::from_host(stream, {2}, {1, 2}));
  for (int step = 0; step < kSteps; ++step) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const Stream stream = ranks.streams[rank];
      stream.kernels().scale(stream, Real(rank + 1), x[rank]);
    }
    ranks.together([&](Communicator& rank, Stream stream) {
      rank.all_reduce(stream, x[rank.rank()]);  // times 1 + 2 + 3 + 4
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      const Stream stream = ranks.streams[rank];
      stream.kernels().scale(stream, Real(0.125), x[rank]);
    }
  }
  std::vector<Real> expected{1, 2};
  for (int step = 0; step < kSteps; ++step) {
    for (Real& value : expected) {
      const Real sum = ((value + value * 2) + value * 3) + value * 4;
      value = sum * Real(0.125);
    }
  }
  for (const Tensor& tensor : x) CHECK(tensor.to_host() == expected);
}

// In one process. NCCL promises it from group to group only.
TEST_CASE("The collectives of one group run in the order in which they were called",
          "[comm][tsan]") {
  Ranks ranks(device_ids(3));
  const auto x = numbered<int64_t>(ranks, 2, 1);  // 1, 2, 3
  const auto all = numbered<int64_t>(ranks, 6, -10);
  ranks.together([&](Communicator& rank, Stream stream) {
    const int me = rank.rank();
    rank.all_reduce(stream, x[me]);                         // 6, 6, 6
    rank.reduce(stream, x[me], 1);                          // 6, 18, 6
    rank.all_gather(stream, x[me], all[me]);                // 6, 18, 6 everywhere
    rank.broadcast(stream, x[me], 1);                       // 18, 18, 18
    rank.reduce_scatter(stream, all[me], x[me]);            // 18, 54, 18
    rank.broadcast(stream, Elements(x[me]).part(1, 1), 1);  // of the second elements only
  });
  const std::vector<int64_t> gathered{6, 6, 18, 18, 6, 6};
  for (const Wholes& values : all) CHECK(values.to_host() == gathered);
  CHECK(x[0].to_host() == std::vector<int64_t>{18, 54});
  CHECK(x[1].to_host() == std::vector<int64_t>{54, 54});
  CHECK(x[2].to_host() == std::vector<int64_t>{18, 54});
}

TEST_CASE("The n-th send to a rank meets its n-th receive, whatever lies between", "[comm][tsan]") {
  Ranks ranks(device_ids(3));
  const auto from = numbered<float>(ranks, 4, 1), to = numbered<float>(ranks, 4, -9);
  ranks.together([&](Communicator& rank, Stream stream) {
    const int me = rank.rank();
    const Elements mine = from[me], its = to[me];
    if (me == 0) {
      rank.send(stream, mine.part(0, 1), 2);
      rank.send(stream, mine.part(0, 3), 1);
      rank.receive(stream, its.part(1, 2), 2);
      rank.send(stream, mine.part(0, 2), 2);
    } else if (me == 1) {
      rank.receive(stream, its.part(0, 3), 0);
    } else {
      rank.send(stream, mine.part(0, 2), 0);
      rank.receive(stream, its.part(3, 1), 0);
      rank.receive(stream, its.part(0, 2), 0);
    }
  });
  CHECK(to[0].to_host() == std::vector<float>{-9, 3, 3, -9});
  CHECK(to[1].to_host() == std::vector<float>{1, 1, 1, -8});
  CHECK(to[2].to_host() == std::vector<float>{1, 1, -7, 1});
}

TEST_CASE("Nobody passes a barrier before all have come to it", "[comm][tsan]") {
  Gate gate;
  std::array<int, 3> came{}, seen{};  // plain: ThreadSanitizer watches
  std::atomic<int> passed{0};
  Ranks ranks(device_ids(3));
  enqueue(ranks.streams[1], [&] { gate.pass(); });
  for (int rank = 0; rank < 3; ++rank) enqueue(ranks.streams[rank], [&, rank] { came[rank] = 1; });
  ranks.together([](Communicator& rank, Stream stream) { rank.barrier(stream); });
  for (int rank = 0; rank < 3; ++rank) {
    enqueue(ranks.streams[rank], [&, rank] {
      passed.fetch_add(1, std::memory_order_relaxed);
      seen[rank] = came[0] + came[1] + came[2];
    });
  }
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(passed.load(std::memory_order_relaxed) == 0);
  gate.open();
  ranks.synchronize();
  CHECK(seen == std::array<int, 3>{3, 3, 3});
}

TEST_CASE("Closing a group returns at once, however busy the ranks are", "[comm]") {
  Gate gate;
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 8, 1);
  enqueue(ranks.streams[0], [&] { gate.pass(); });
  for (int group = 0; group < 3; ++group) {
    ranks.together(
        [&](Communicator& rank, Stream stream) { rank.all_reduce(stream, x[rank.rank()]); });
  }
  const Event behind = ranks.streams[1].record();
  CHECK_FALSE(behind.done());  // with the gate closed: the host did not wait for it
  gate.open();
  ranks.world->wait(kLong);
  CHECK(x[1].to_host() == std::vector<float>(8, 12));
}

}  // namespace lockstep
