// Collectives between the CPU devices of one process: against a serial reference, in order with
// what the ranks' streams do before and behind them, and with every mistake that ranks can make.

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/core/cpu_stream.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/kernels/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;
using testing::Clock;
using testing::collectives;
using testing::device_ids;
using testing::enqueue;
using testing::Gate;
using testing::kLong;
using testing::message_of;
using testing::numbered;
using testing::Ranks;
using testing::ScopedEnvironment;
using testing::seconds_since;
using testing::Trial;
using Floats = BasicTensor<float>;
using Doubles = BasicTensor<double>;
using Wholes = BasicTensor<int64_t>;

/// The error of a group in which rank r makes calls[r]; checks that it is one line.
using Calls = std::function<void(Communicator&, Stream)>;
template <class E>
std::string error_of_group(Ranks& ranks, const std::vector<Calls>& calls) {
  const std::string text = message_of<E>([&] {
    ranks.together([&](Communicator& rank, Stream stream) { calls[rank.rank()](rank, stream); });
  });
  CHECK(text.find('\n') == std::string::npos);
  return text;
}

/// A world that works: an all-reduce of ones counts its ranks.
bool counts_its_ranks(Ranks& ranks) {
  const auto ones = numbered<int64_t>(ranks, 3, 0);
  for (const Wholes& x : ones) x.copy_from_host({1, 1, 1});
  ranks.together(
      [&](Communicator& rank, Stream stream) { rank.all_reduce(stream, ones[rank.rank()]); });
  return std::all_of(ones.begin(), ones.end(), [&](const Wholes& x) {
    return x.to_host() == std::vector<int64_t>(3, ranks.size());
  });
}

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
constexpr bool kAllLarge = !kAddressSanitizer && sizeof(Real) == sizeof(float);

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
    for (int world_size = 1; world_size <= 8; ++world_size) {
      const std::vector<testing::Collective> sum{{Call::Op::all_reduce}};
      check_large<float>(world_size,
                         kThreadSanitizer ? sum : collectives(ElementType::f32, world_size));
      if (kThreadSanitizer) continue;
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
  const std::string text = message_of<BadInput>([&] { make_local_world(devices); });
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

// --- Ranks that disagree -------------------------------------------------------------------------

namespace {

struct Disagreement {
  std::string name;
  Calls zero, one;
  std::vector<std::string> said;  // of the error, beside both ranks
};

std::vector<Disagreement> disagreements(const Floats& x, const Doubles& d) {
  const Elements few(x.data(), 3, ElementType::f32), many(x.data(), 4, ElementType::f32);
  const auto all_reduce = [](Elements e, Reduction reduction = Reduction::sum) -> Calls {
    return [=](Communicator& rank, Stream s) { rank.all_reduce(s, e, reduction); };
  };
  const auto broadcast = [](Elements e, int root) -> Calls {
    return [=](Communicator& rank, Stream s) { rank.broadcast(s, e, root); };
  };
  const auto send = [](Elements e, int to) -> Calls {
    return [=](Communicator& rank, Stream s) { rank.send(s, e, to); };
  };
  const auto receive = [](Elements e, int from) -> Calls {
    return [=](Communicator& rank, Stream s) { rank.receive(s, e, from); };
  };
  const auto both = [](Calls first, Calls second) -> Calls {
    return [=](Communicator& rank, Stream s) { first(rank, s), second(rank, s); };
  };
  const Calls nothing = [](Communicator&, Stream) {};
  return {
      {"count", all_reduce(few), all_reduce(many), {"all_reduce of 3 f32", "all_reduce of 4 f32"}},
      {"type", all_reduce(many), all_reduce(d), {"4 f32", "4 f64"}},
      {"operation", all_reduce(few), broadcast(few, 0), {"all_reduce of 3", "broadcast of 3"}},
      {"reduction", all_reduce(few), all_reduce(few, Reduction::average), {"sum", "average"}},
      {"root", broadcast(few, 0), broadcast(few, 1), {"root 0", "root 1"}},
      {"order",
       both(all_reduce(few), broadcast(many, 0)),
       both(broadcast(many, 0), all_reduce(few)),
       {"collective 1 ", "all_reduce of 3", "broadcast of 4"}},
      {"the second call",
       both(all_reduce(few), broadcast(few, 0)),
       both(all_reduce(few), broadcast(many, 0)),
       {"collective 2 ", "broadcast of 3", "broadcast of 4"}},
      {"fewer calls",
       both(all_reduce(few), broadcast(many, 0)),
       all_reduce(few),
       {"collective 2 ", "broadcast of 4", "rank 1 (cpu:1) called nothing"}},
      {"no call", nothing, all_reduce(few), {"rank 0 (cpu:0) called nothing", "all_reduce of 3"}},
      {"a barrier alone",
       [](Communicator& rank, Stream s) { rank.barrier(s); },
       nothing,
       {"barrier", "rank 1 (cpu:1) called nothing"}},
      {"a send alone",
       send(few, 1),
       nothing,
       {"send of 3 f32 to rank 1", "rank 1 (cpu:1) called nothing"}},
      {"a receive alone",
       nothing,
       receive(few, 0),
       {"receive of 3 f32 from rank 0", "rank 0 (cpu:0) called nothing"}},
      {"two receives of one send",
       send(few, 1),
       both(receive(few, 0), receive(few, 0)),
       {"transfer 2 ", "receive of 3 f32", "rank 0 (cpu:0) called nothing"}},
      {"a transfer's count", send(few, 1), receive(many, 0), {"send of 3", "receive of 4"}},
      {"a transfer's type", send(many, 1), receive(d, 0), {"send of 4 f32", "receive of 4 f64"}},
  };
}

}  // namespace

TEST_CASE("A disagreement of ranks names both, what each called, and the group", "[comm][row71]") {
  const size_t cases = [] {
    Ranks ranks(device_ids(1));
    const Stream s = ranks.streams[0];
    return disagreements(Floats::empty(s, {4}), Doubles::empty(s, {4})).size();
  }();
  for (size_t i = 0; i < cases; ++i) {
    Ranks ranks(device_ids(2));
    const auto x = numbered<float>(ranks, 4, 1);
    const auto d = numbered<double>(ranks, 4, 1);
    CHECK(counts_its_ranks(ranks));  // group 1
    const Disagreement wrong = disagreements(x[0], d[0])[i];
    const std::string text = error_of_group<PeerLost>(ranks, {wrong.zero, wrong.one});
    INFO(wrong.name << ": " << text);
    CHECK_THAT(text, ContainsSubstring("group 2"));
    CHECK_THAT(text, ContainsSubstring("rank 0 (cpu:0)") && ContainsSubstring("rank 1 (cpu:1)"));
    for (const std::string& part : wrong.said) CHECK_THAT(text, ContainsSubstring(part));
    // Nothing of it was enqueued, and nothing can follow.
    ranks.synchronize();
    CHECK(x[0].to_host() == std::vector<float>(4, 1));
    CHECK(message_of<PeerLost>([&] { const CollectiveGroup next(*ranks.world); }) == text);
    CHECK(message_of<PeerLost>([&] { counts_its_ranks(ranks); }) == text);
  }
}

TEST_CASE("Of eight ranks the one that disagrees is named", "[comm][row71]") {
  for (const int wrong : {1, 4, 7}) {
    Ranks ranks(device_ids(8));
    const auto x = numbered<float>(ranks, 4, 1);
    const std::string text = message_of<PeerLost>([&] {
      ranks.together([&](Communicator& rank, Stream stream) {
        const int me = rank.rank();
        rank.all_reduce(stream, x[me]);
        if (me != wrong) rank.barrier(stream);
      });
    });
    INFO(text);
    CHECK_THAT(text, ContainsSubstring(fmt::format("rank {0} (cpu:{0}) called nothing", wrong)));
    for (int rank = 0; rank < 8; ++rank) {
      ranks.streams[rank].synchronize();
      CHECK(x[rank].to_host() == std::vector<float>(4, float(1 + rank)));
    }
  }
}

TEST_CASE("The same count in other parts is no disagreement: only numbers, types and roots count",
          "[comm]") {
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 8, 1);
  ranks.together([&](Communicator& rank, Stream stream) {
    const Elements mine = x[rank.rank()];
    rank.all_reduce(stream, rank.rank() == 0 ? mine.part(0, 3) : mine.part(5, 3));
  });
  CHECK(x[0].to_host() == std::vector<float>{3, 3, 3, 1, 1, 1, 1, 1});
  CHECK(x[1].to_host() == std::vector<float>{2, 2, 2, 2, 2, 3, 3, 3});
}

// --- Arguments that cannot be right --------------------------------------------------------------

namespace {

struct Mistake {
  std::string name;
  Calls call;
  std::vector<std::string> said;
};

std::vector<Mistake> mistakes(const Floats& x, const Wholes& w, Stream elsewhere) {
  const Elements three(x.data(), 3, ElementType::f32), seven(x.data(), 7, ElementType::f32);
  const Elements six(w.data(), 6, ElementType::i64), whole(w.data(), 3, ElementType::i64);
  const auto average = Reduction::average;
  return {
      {"root too large",
       [=](Communicator& r, Stream s) { r.broadcast(s, three, 2); },
       {"broadcast of 3 f32, root 2", "ranks 0 to 1"}},
      {"root negative",
       [=](Communicator& r, Stream s) { r.reduce(s, three, -1); },
       {"root -1", "ranks 0 to 1"}},
      {"receiver unknown",
       [=](Communicator& r, Stream s) { r.send(s, three, 5); },
       {"to rank 5", "ranks 0 to 1"}},
      {"sender unknown",
       [=](Communicator& r, Stream s) { r.receive(s, three, -3); },
       {"from rank -3", "ranks 0 to 1"}},
      {"itself", [=](Communicator& r, Stream s) { r.send(s, three, 1); }, {"to rank 1", "itself"}},
      {"parts of all_gather",
       [=](Communicator& r, Stream s) { r.all_gather(s, three, seven); },
       {"all_gather", "must be 6 f32", "found 7 f32"}},
      {"parts of reduce_scatter",
       [=](Communicator& r, Stream s) { r.reduce_scatter(s, seven, three); },
       {"reduce_scatter", "must be 6 f32", "found 7 f32"}},
      {"parts of gather",
       [=](Communicator& r, Stream s) { r.gather(s, three, {}, 1); },
       {"gather", "must be 6 f32", "found 0 f32"}},
      {"type of the parts of scatter",
       [=](Communicator& r, Stream s) { r.scatter(s, six, three, 1); },
       {"scatter", "must be 6 f32", "found 6 i64"}},
      {"average of whole numbers",
       [=](Communicator& r, Stream s) { r.all_reduce(s, whole, average); },
       {"all_reduce of 3 i64", "whole numbers have no average"}},
      {"average of whole numbers at a root",
       [=](Communicator& r, Stream s) { r.reduce(s, whole, 0, average); },
       {"whole numbers have no average"}},
      {"average of parts of whole numbers",
       [=](Communicator& r, Stream s) { r.reduce_scatter(s, six, whole, average); },
       {"whole numbers have no average"}},
      {"a stream of another device",
       [=](Communicator& r, Stream) { r.all_reduce(elsewhere, three); },
       {"cpu:0", "cpu:1", "stream"}},
  };
}

}  // namespace

TEST_CASE("A call that cannot be right is refused by its rank, and the world stays usable",
          "[comm]") {
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 8, 1);
  const auto w = numbered<int64_t>(ranks, 8, 1);
  for (const Mistake& mistake : mistakes(x[1], w[1], ranks.streams[0])) {
    const Calls right = [&](Communicator& rank, Stream s) { rank.all_reduce(s, x[rank.rank()]); };
    const std::string text = error_of_group<BadInput>(ranks, {right, mistake.call});
    INFO(mistake.name << ": " << text);
    CHECK_THAT(text, ContainsSubstring("rank 1: "));
    for (const std::string& part : mistake.said) CHECK_THAT(text, ContainsSubstring(part));
    CHECK(counts_its_ranks(ranks));
  }
  ranks.synchronize();  // of the refused groups nothing was enqueued, not even the right calls
  CHECK(x[0].to_host() == std::vector<float>(8, 1));
}

TEST_CASE("A call outside a group is refused", "[comm]") {
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 4, 1);
  const auto call = [&] { ranks.world->rank(1).all_reduce(ranks.streams[1], x[1]); };
  CHECK_THAT(message_of<BadInput>(call),
             ContainsSubstring("rank 1: all_reduce of 4 f32, sum outside a CollectiveGroup"));
  CHECK(counts_its_ranks(ranks));
  CHECK_THAT(message_of<BadInput>(call), ContainsSubstring("outside"));  // behind a group, too
}

TEST_CASE("A group inside a group is refused", "[comm]") {
  Ranks ranks(device_ids(2));
  const std::string text = message_of<BadInput>([&] {
    const CollectiveGroup outer(*ranks.world);
    const CollectiveGroup inner(*ranks.world);
  });
  CHECK_THAT(text, ContainsSubstring("still open"));
  CHECK(counts_its_ranks(ranks));
}

TEST_CASE("An exception within a group leaves as it is, and the calls are forgotten", "[comm]") {
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 4, 1);
  const std::string text = message_of<NonFinite>([&] {
    const CollectiveGroup group(*ranks.world);
    ranks.world->rank(0).all_reduce(ranks.streams[0], x[0]);
    throw NonFinite("the loss is NaN");
  });
  CHECK(text == "the loss is NaN");
  CHECK(counts_its_ranks(ranks));
  ranks.synchronize();
  CHECK(x[0].to_host() == std::vector<float>(4, 1));
}

TEST_CASE("A group that closes while an older exception is handled still runs and reports",
          "[comm]") {
  Ranks ranks(device_ids(2));
  bool works = false;
  std::string text;
  struct AtTheEnd {  // runs while an exception is on its way
    std::function<void()> action;
    ~AtTheEnd() { action(); }
  };
  const auto clean_up = [&] {
    works = counts_its_ranks(ranks);
    text = message_of<PeerLost>([&] {
      const CollectiveGroup group(*ranks.world);
      ranks.world->rank(0).barrier(ranks.streams[0]);
    });
  };
  CHECK_THROWS_AS(
      [&] {
        const AtTheEnd last{clean_up};
        throw BadInput("on its way");
      }(),
      BadInput);
  CHECK(works);
  CHECK_THAT(text, ContainsSubstring("rank 1 (cpu:1) called nothing"));
}

// --- Ranks that fail, and ranks that do not come -------------------------------------------------

TEST_CASE("A rank that failed is reported by every rank's stream, by name", "[comm][tsan]") {
  for (int wrong = 0; wrong < 3; ++wrong) {
    Ranks ranks(device_ids(3));
    const auto x = numbered<float>(ranks, 4, 1);
    enqueue(ranks.streams[wrong], [] { throw DeviceError("a planted fault"); });
    ranks.together(
        [&](Communicator& rank, Stream stream) { rank.all_reduce(stream, x[rank.rank()]); });
    const std::string named = fmt::format("cpu:{} failed: a planted fault", wrong);
    for (int rank = 0; rank < 3; ++rank) {
      const auto synchronize = [&] { ranks.streams[rank].synchronize(); };
      INFO("rank " << wrong << " failed, asked rank " << rank);
      if (rank == wrong) CHECK(message_of<DeviceError>(synchronize) == "a planted fault");
      if (rank != wrong) CHECK(message_of<PeerLost>(synchronize) == named);
    }
  }
}

TEST_CASE("wait() throws what a rank failed of, or the next group does, and no group follows",
          "[comm][tsan]") {
  for (int wrong = 0; wrong < 6; ++wrong) {
    Ranks ranks(device_ids(3));
    const auto barrier = [&] {
      ranks.together([](Communicator& rank, Stream stream) { rank.barrier(stream); });
    };
    enqueue(ranks.streams[wrong % 3], [] { throw DeviceError("a planted fault"); });
    barrier();
    const bool waits = wrong < 3;
    for (const Stream& s : ranks.streams) {
      if (!waits) s.backend().block(s.backend().record());
    }
    const std::string text =
        message_of<Error>([&] { waits ? ranks.world->wait(kLong) : barrier(); });
    INFO("rank " << wrong % 3 << " failed: " << text);
    CHECK_THAT(text, ContainsSubstring("a planted fault"));
    CHECK_THAT(text, ContainsSubstring(fmt::format("cpu:{}", wrong % 3)));
    CHECK(message_of<Error>([&] { const CollectiveGroup next(*ranks.world); }) == text);
  }
}

TEST_CASE("wait() names the rank that did not come, and no group follows", "[comm][tsan][row72]") {
  Gate gate;
  Ranks ranks(device_ids(3));
  const auto x = numbered<float>(ranks, 4, 1);
  CHECK(counts_its_ranks(ranks));
  enqueue(ranks.streams[1], [&] { gate.pass(); });
  const auto all_reduce = [&](Communicator& rank, Stream s) { rank.all_reduce(s, x[rank.rank()]); };
  SECTION("to one collective") { ranks.together(all_reduce); }
  SECTION("to the first of several in a group") {
    ranks.together([&](Communicator& rank, Stream stream) {
      for (int i = 0; i < 3; ++i) all_reduce(rank, stream);
    });
  }
  SECTION("to the first of several groups") {
    for (int i = 0; i < 3; ++i) ranks.together(all_reduce);
  }
  SECTION("to a transfer") {
    ranks.together([&](Communicator& rank, Stream stream) {
      if (rank.rank() == 1) rank.send(stream, x[1], 2);
      if (rank.rank() == 2) rank.receive(stream, x[2], 1);
    });
  }
  const auto begin = Clock::now();
  const std::string text = message_of<PeerLost>([&] { ranks.world->wait(0.2); });
  const double took = seconds_since(begin);
  INFO(text);
  CHECK(took >= 0.2);
  CHECK(took < 10);
  CHECK(text.find('\n') == std::string::npos);
  CHECK_THAT(text, ContainsSubstring("group 2 ") && ContainsSubstring("rank 1 (cpu:1)"));
  CHECK_THAT(text, ContainsSubstring("0.2 s"));
  CHECK_THAT(text, !ContainsSubstring("rank 0 (") && !ContainsSubstring("rank 2 ("));
  CHECK(message_of<PeerLost>([&] { const CollectiveGroup next(*ranks.world); }) == text);
  gate.open();  // the ranks' memory may only go when nobody works on it
  for (const Stream& stream : ranks.streams) stream.backend().block(stream.backend().record());
}

TEST_CASE("wait() names all ranks that did not come", "[comm]") {
  Gate gate;
  Ranks ranks(device_ids(4));
  for (const int rank : {0, 3}) enqueue(ranks.streams[rank], [&] { gate.pass(); });
  ranks.together([](Communicator& rank, Stream stream) { rank.barrier(stream); });
  const std::string text = message_of<PeerLost>([&] { ranks.world->wait(0.1); });
  gate.open();
  CHECK_THAT(text, ContainsSubstring("rank 0 (cpu:0), rank 3 (cpu:3)"));
  CHECK_THAT(text, !ContainsSubstring("rank 1") && !ContainsSubstring("rank 2"));
}

TEST_CASE("wait() waits for the groups and for nothing else", "[comm][tsan]") {
  Gate gate;
  std::vector<int> done(2, 0);  // plain: ThreadSanitizer watches
  Ranks ranks(device_ids(2));
  ranks.world->wait(0);  // no group yet
  const auto x = numbered<float>(ranks, 4, 1);
  std::vector<Stream> second;
  for (Device* device : ranks.devices) second.push_back(device->create_stream("second"));
  const auto slow = [&](Stream stream, int rank) {
    enqueue(stream, [&done, rank] {
      std::this_thread::sleep_for(milliseconds(30));
      ++done[rank];
    });
  };
  SECTION("a collective") {
    slow(ranks.streams[0], 0), slow(ranks.streams[1], 1);
    ranks.together([](Communicator& rank, Stream stream) { rank.barrier(stream); });
  }
  SECTION("collectives on several streams of a rank, the last one not the slowest") {
    slow(ranks.streams[0], 0), slow(ranks.streams[1], 1);
    ranks.together([&](Communicator& rank, Stream stream) {
      rank.all_reduce(stream, x[rank.rank()]);
      rank.barrier(second[rank.rank()]);
    });
  }
  SECTION("a transfer") {
    slow(ranks.streams[0], 0), slow(ranks.streams[1], 1);
    ranks.together([&](Communicator& rank, Stream stream) {
      if (rank.rank() == 0) rank.send(stream, x[0], 1);
      if (rank.rank() == 1) rank.receive(stream, x[1], 0);
    });
  }
  SECTION("a slow group before one on other streams") {
    slow(ranks.streams[0], 0), slow(ranks.streams[1], 1);
    ranks.together([](Communicator& rank, Stream stream) { rank.barrier(stream); });
    ranks.together([&](Communicator& rank, Stream) { rank.barrier(second[rank.rank()]); });
  }
  enqueue(ranks.streams[0], [&] { gate.pass(); });  // behind the groups: none of wait()'s business
  ranks.world->wait(kLong);
  CHECK(done == std::vector<int>{1, 1});
  gate.open();
  ranks.synchronize();
}

TEST_CASE("A world may go while its groups still run", "[comm][tsan]") {
  Gate gate;
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 4, 1);
  enqueue(ranks.streams[1], [&] { gate.pass(); });
  ranks.together(
      [&](Communicator& rank, Stream stream) { rank.all_reduce(stream, x[rank.rank()]); });
  ranks.world.reset();
  gate.open();
  for (const Floats& sum : x) CHECK(sum.to_host() == std::vector<float>(4, 3));
}

// --- Which world ---------------------------------------------------------------------------------

namespace {

/// A device that only has a name: what make_local_world() looks at before it uses one.
class NamedDevice final : public Device {
 public:
  explicit NamedDevice(DeviceId id) : Device(id, {}) {}
  std::string description() const override { return "none"; }
  Kernels& kernels() override { fail<EnvironmentError>("a named device has no kernels"); }
  std::shared_ptr<void> allocate_host(size_t) override { return nullptr; }

 protected:
  std::unique_ptr<StreamBackend> make_stream(std::string) override { return nullptr; }
};

std::string refusal(const std::string& list, LocalBackend backend = LocalBackend::automatic) {
  std::vector<std::unique_ptr<NamedDevice>> devices;
  std::vector<Device*> pointers;
  for (size_t at = 0; at < list.size(); at = std::min(list.find(',', at), list.size()) + 1) {
    const DeviceId id = parse_devices(list.substr(at, list.find(',', at) - at))[0];
    devices.push_back(std::make_unique<NamedDevice>(id));
    pointers.push_back(devices.back().get());
  }
  const std::string text = message_of<BadInput>([&] { make_local_world(pointers, backend); });
  CHECK(text.find('\n') == std::string::npos);
  return text;
}

}  // namespace

TEST_CASE("A world without devices, or of two kinds of them, is refused", "[comm][row40]") {
  CHECK_THAT(refusal(""), ContainsSubstring("without devices"));
  for (const LocalBackend backend :
       {LocalBackend::automatic, LocalBackend::in_process, LocalBackend::nccl}) {
    CHECK_THAT(refusal("cpu:0,cuda:0", backend),
               ContainsSubstring("cpu:0") && ContainsSubstring("cuda:0"));
    CHECK_THAT(refusal("cuda:1,cuda:0,cpu:2", backend),
               ContainsSubstring("cuda:1") && ContainsSubstring("cpu:2"));
  }
}

TEST_CASE("NCCL is refused for CPU devices, the in-process world for several GPUs", "[comm]") {
  CHECK_THAT(refusal("cpu:0,cpu:1", LocalBackend::nccl),
             ContainsSubstring("NCCL") && ContainsSubstring("cpu:0"));
  CHECK_THAT(refusal("cuda:0,cuda:1", LocalBackend::in_process),
             ContainsSubstring("rank 0 is on cuda:0") && ContainsSubstring("rank 1 on cuda:1"));
}

TEST_CASE("A world knows its ranks and its kind", "[comm][row40]") {
  for (const LocalBackend backend : {LocalBackend::automatic, LocalBackend::in_process}) {
    Ranks ranks(testing::device_ids(3), backend);
    CHECK(ranks.world->description() == "in-process");
    CHECK(ranks.size() == 3);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(ranks.world->rank(rank).rank() == rank);
      CHECK(ranks.world->rank(rank).world_size() == 3);
    }
  }
}

TEST_CASE("Elements are parts of memory by number, and a call says what it is", "[comm]") {
  std::array<double, 10> memory{};
  const Elements all(memory.data(), 10, ElementType::f64);
  CHECK(all.part(3, 4).data == &memory[3]);
  CHECK(all.part(3, 4).count == 4);
  CHECK(size_of(ElementType::f32) == 4);
  CHECK(size_of(ElementType::f64) == 8);
  CHECK(size_of(ElementType::i64) == 8);
  const auto text = [&](Call::Op op) { return Call{.op = op, .mine = all, .all = {}}.text(); };
  CHECK(text(Call::Op::all_reduce) == "all_reduce of 10 f64, sum");
  CHECK(text(Call::Op::broadcast) == "broadcast of 10 f64, root 0");
  CHECK(text(Call::Op::receive) == "receive of 10 f64 from rank 0");
  CHECK(text(Call::Op::barrier) == "barrier");
}

TEST_CASE("A call says for whom it is, and errors pass that on", "[comm]") {
  Gate gate;
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 4, 1);
  const auto call_for = [&](const char* of_rank_0, const char* of_rank_1) {
    ranks.together([&](Communicator& rank, Stream stream) {
      const CallLabel outer(rank, rank.rank() == 0 ? of_rank_0 : of_rank_1);
      {  // gone when the call comes
        const CallLabel inner(rank, "nothing yet");
      }
      rank.all_reduce(stream, x[rank.rank()]);
    });
  };
  SECTION("the one that a rank does not come to") {
    enqueue(ranks.streams[1], [&] { gate.pass(); });
    call_for("bn1", "bn1");
    CHECK(message_of<PeerLost>([&] { ranks.world->wait(0.1); }) ==
          "group 1 of collectives (all_reduce of 4 f32, sum for bn1): rank 1 (cpu:1) did not come "
          "within 0.1 s");
    gate.open();
    for (const Stream& stream : ranks.streams) stream.backend().block(stream.backend().record());
  }
  SECTION("two that do not belong together") {
    CHECK_THAT(message_of<PeerLost>([&] { call_for("bn1", "bn2"); }),
               ContainsSubstring("rank 0 (cpu:0) called all_reduce of 4 f32, sum for bn1, rank 1 "
                                 "(cpu:1) called all_reduce of 4 f32, sum for bn2"));
  }
}

}  // namespace lockstep
