// Collectives between processes: what they compute, over TCP, shared memory
// and Gloo. All ranks of a group are in this process.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>

#include "common/comm/host_communicator.h"
#include "common/kernels/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/local_store.h"
#include "tests/support/rank_threads.h"
#include "tests/support/shm_ranks.h"
#include "tests/support/tasks.h"
#include "tests/support/tcp_stores.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::kLong;
using testing::kShort;
using testing::kSoon;
using testing::message_of;
using testing::Ranks;
using testing::seconds_since;
using testing::tcp_ranks;
using testing::Trial;
using MakeRanks = std::function<Ranks(int world_size)>;

/// How the ranks of a group can be connected in this build, and how many to try: connections
/// between more ranks than cores take long.
struct Way {
  MakeRanks make_ranks{};
  int64_t most_ranks = 5;
};

std::vector<Way> transports() {
  std::vector<Way> all{{[](int world_size) { return tcp_ranks(world_size); }},
                       {[](int world_size) { return testing::shm_ranks(world_size); }, 8}};
  if (gloo_availability().empty()) {
    all.push_back({[](int world_size) { return testing::gloo_ranks(world_size); }});
  }
  return all;
}

template <class T>
void check_collectives(Ranks& ranks, const std::vector<int64_t>& counts, double tolerance) {
  for (const int64_t n : counts) {
    const auto& comm = dynamic_cast<const HostCommunicator&>(*ranks.comms[0]);
    INFO(comm.transport().description() << ", " << ranks.size() << " ranks, shares of " << n
                                        << " elements of " << sizeof(T) << " bytes");
    Trial<T> trial(ranks, n);
    trial.enqueue_all(/*every_root=*/n == 1);
    CHECK(trial.first_fault(tolerance) == "");
  }
}

/// Rings add in another order than a serial program: sums of W numbers below 1 differ by less than
/// W^2 roundings of 1.
void check_table(const MakeRanks& make_ranks, int64_t most_ranks) {
  for (int64_t world_size = 1; world_size <= most_ranks; ++world_size) {
    if (world_size > 3 && world_size < most_ranks && !testing::full_campaign()) continue;
    Ranks ranks = make_ranks(static_cast<int>(world_size));
    std::vector<int64_t> counts{0, 1, world_size - 1, world_size, world_size + 1};
    const double roundings = double(world_size * world_size);
    const bool all = world_size <= 3 || testing::full_campaign();
    if (all) counts.insert(counts.end(), {2, 1000});
    check_collectives<float>(ranks, counts, roundings * 0x1p-24);
    if (!all) counts = {world_size + 1};
    check_collectives<double>(ranks, counts, roundings * 0x1p-53);
    check_collectives<int64_t>(ranks, counts, 0);
    if (!all) continue;
    counts = {world_size + 1, 1000};
    check_collectives<Bf16>(ranks, counts, roundings * 0x1p-8);
    check_collectives<Fp16>(ranks, counts, roundings * 0x1p-11);
  }
}

TEST_CASE("Between processes every collective is what a serial program computes",
          "[comm][gloo][tcp][row70]") {
  for (const Way& way : transports()) {
    check_table(way.make_ranks, way.most_ranks);
    Ranks ranks = way.make_ranks(3);
    Trial<float> large(ranks, testing::full_campaign() ? 1000001 : 200003);
    for (const Call::Op op : {Call::Op::all_reduce, Call::Op::reduce_scatter, Call::Op::broadcast,
                              Call::Op::all_gather, Call::Op::send}) {
      large.enqueue({op}, /*root=*/1);
      CHECK(large.first_fault(1e-6) == "");
    }
  }
}

// --- What they send ------------------------------------------------------------------------------

int64_t sum_of(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

/// Gloo is asked for what a call is called, but for a reduce-scatter, which it has not.
std::vector<int64_t> asked_of_gloo(testing::Collective collective, int64_t n, int root,
                                   const Ranks& ranks) {
  if (collective.op == Call::Op::reduce_scatter) {
    collective.op = Call::Op::all_reduce;
    n *= ranks.size();
  }
  return testing::ring_bytes_for(collective, n, root, int(ranks.size()));
}

/// Over TCP every rank sends what a ring does, but for barriers. In shared memory all ranks
/// together do, as what one shows is counted for each that takes it, but for small sums: there
/// everybody shows everything to all who want the sum.
void check_counted(const Ranks& ranks, const testing::Collective& collective, int64_t n) {
  const int64_t world_size = ranks.size(), root = world_size - 1, bytes = 4 * n;
  const auto expected = testing::ring_bytes_for(collective, n, int(root), int(world_size));
  const auto found = testing::bytes_sent_for(ranks, collective, n, int(root));
  const std::string& where = ranks.comms[0]->bytes_counted_in();
  INFO(where << ", " << world_size << " ranks: " << collective.name(int(root)) << " of " << n);
  const bool barrier = collective.op == Call::Op::barrier;
  if (collective.op == Call::Op::all_reduce) {
    int64_t said = 0;
    for (const auto& comm : ranks.comms) {
      said += comm->bytes_of_all_reduce({nullptr, n, ElementType::f32});
    }
    CHECK(said == sum_of(found));
  }
  if (where == "tcp" && !barrier) CHECK(found == expected);
  if (where == "its calls to Gloo") CHECK(found == asked_of_gloo(collective, n, int(root), ranks));
  if (where != "shm") return;
  int64_t sum = sum_of(expected);
  if (collective.op == Call::Op::all_reduce && bytes <= 16384) {
    sum = world_size * (world_size - 1) * bytes;
  }
  CHECK(sum_of(found) == sum);
}

TEST_CASE("What a rank sends is counted where it leaves", "[comm][tcp][shm][gloo]") {
  for (const int world_size : {1, 2, 3, 5}) {
    for (const Way& way : transports()) {
      const Ranks ranks = way.make_ranks(world_size);
      for (const testing::Collective& collective :
           testing::collectives(ElementType::f32, world_size)) {
        for (const int64_t n : {1, 1001, 30001, 200003}) {
          if (n > 1001 && world_size != 3 && !testing::full_campaign()) continue;
          check_counted(ranks, collective, n);
        }
      }
    }
  }
}

TEST_CASE("A message of 16 bits takes half of a float32's bytes",
          "[comm][tcp][shm][gloo][sixteen]") {
  for (const Way& way : transports()) {
    const Ranks ranks = way.make_ranks(3);
    for (const testing::Collective& collective : testing::collectives(ElementType::f32, 3)) {
      if (collective.op == Call::Op::barrier) continue;
      for (const int64_t n : {1001, 30001}) {  // shm: either at once, or in pieces
        INFO(ranks.comms[0]->bytes_counted_in() << ", " << collective.name(0) << " of " << n);
        const auto half = testing::bytes_sent_for<Bf16>(ranks, collective, n, 0);
        auto whole = testing::bytes_sent_for<float>(ranks, collective, n, 0);
        for (int64_t& bytes : whole) bytes /= 2;
        CHECK(half == whole);
        CHECK(testing::bytes_sent_for<Fp16>(ranks, collective, n, 0) == half);
      }
    }
  }
}

TEST_CASE("Bytes are counted for what the calls are for", "[comm][tcp][shm][gloo]") {
  for (const Way& way : transports()) {
    const Ranks ranks = way.make_ranks(2);
    const auto x = testing::numbered<float>(ranks, 10, 1);
    ranks.together([&](Communicator& comm, Stream stream) {
      const CallPurpose outer(comm, Purpose::parameters);
      {
        const CallPurpose inner(comm, Purpose::gradients);
        comm.all_reduce(stream, x[size_t(comm.rank())]);
        comm.all_reduce(stream, x[size_t(comm.rank())]);
      }
      comm.all_reduce(stream, x[size_t(comm.rank())]);
    });
    ranks.synchronize();
    for (const auto& comm : ranks.comms) {
      CHECK(comm->bytes_sent(Purpose::gradients) == 80);
      CHECK(comm->bytes_sent(Purpose::parameters) == 40);
      CHECK(comm->bytes_sent(Purpose::other) == 0);
      CHECK(comm->bytes_sent() == 120);
    }
  }
}

TEST_CASE("Over TCP and shared memory no collective races with what is enqueued around it",
          "[comm][tcp][shm][tsan][row70]") {
  check_table([](int world_size) { return tcp_ranks(world_size); }, 3);
  check_table([](int world_size) { return testing::shm_ranks(world_size); }, 3);
}

TEST_CASE("A collective waits for slow producers, and what follows it waits for slow ranks",
          "[comm][gloo][tcp][tsan][row70]") {
  for (const Way& way : transports()) {
    for (int slow = 0; slow < 3; ++slow) {
      Ranks ranks = way.make_ranks(3);
      Trial<float> trial(ranks, 5);
      for (const auto& collective : testing::collectives(ElementType::f32, 3)) {
        testing::enqueue(ranks.streams[size_t(slow)],
                         [] { std::this_thread::sleep_for(std::chrono::milliseconds(3)); });
        trial.enqueue(collective, slow);
      }
      CHECK(trial.first_fault(1e-6) == "");
    }
  }
}

TEST_CASE("Kernels and collectives keep their order without the host's help, also in chaos",
          "[comm][tcp][shm][tsan]") {
  const testing::ScopedEnvironment chaos("LOCKSTEP_CHAOS", "100");
  constexpr int kRanks = 4, kSteps = 25;
  for (const bool shm : {true, false}) {
    const Ranks ranks = shm ? testing::shm_ranks(kRanks) : tcp_ranks(kRanks);
    std::vector<Tensor> x;
    for (const Stream& stream : ranks.streams) x.push_back(Tensor::from_host(stream, {2}, {1, 2}));
    const auto scale = [&](int rank, Real factor) {
      ranks.streams[rank].kernels().scale(ranks.streams[rank], factor, x[rank]);
    };
    for (int step = 0; step < kSteps; ++step) {
      for (int rank = 0; rank < kRanks; ++rank) scale(rank, Real(rank + 1));
      ranks.together([&](Communicator& comm, Stream stream) {
        comm.all_reduce(stream, x[comm.rank()]);  // times 1 + 2 + 3 + 4
      });
      for (int rank = 0; rank < kRanks; ++rank) scale(rank, Real(0.125));
    }
    const Real grown = std::pow(Real(1.25), Real(kSteps));  // in every step
    for (const Tensor& tensor : x) {
      CHECK(double(tensor.to_host()[0]) == Approx(double(grown)).epsilon(1e-5));
      CHECK(double(tensor.to_host()[1]) == Approx(double(2 * grown)).epsilon(1e-5));
    }
  }
}

TEST_CASE("A call returns at once, and a communicator may go while its calls still run",
          "[comm][tcp][shm][tsan]") {
  for (const bool shm : {true, false}) {
    testing::Gate gate;
    Ranks ranks = shm ? testing::shm_ranks(2) : tcp_ranks(2);
    const auto x = testing::numbered<float>(ranks, 8, 1);
    testing::enqueue(ranks.streams[0], [&] { gate.pass(); });
    for (int call = 0; call < 3; ++call) {
      ranks.together(
          [&](Communicator& comm, Stream stream) { comm.all_reduce(stream, x[comm.rank()]); });
    }
    CHECK_FALSE(ranks.streams[1].record().done());  // the host did not wait for the gate
    for (auto& comm : ranks.comms) comm.reset();
    gate.open();
    for (const auto& sum : x) CHECK(sum.to_host() == std::vector<float>(8, 12));
  }
}

TEST_CASE("The n-th send to a rank meets its n-th receive, whatever lies between",
          "[comm][gloo][tcp][tsan]") {
  for (const Way& way : transports()) {
    const Ranks ranks = way.make_ranks(3);
    const auto from = testing::numbered<float>(ranks, 4, 1);
    const auto to = testing::numbered<float>(ranks, 4, -9);
    ranks.together([&](Communicator& comm, Stream stream) {
      const int me = comm.rank();
      const Elements mine = from[me], its = to[me];
      if (me == 0) {
        comm.send(stream, mine.part(0, 1), 2);
        comm.send(stream, mine.part(0, 3), 1);
        comm.receive(stream, its.part(1, 2), 2);
        comm.send(stream, mine.part(0, 2), 2);
      } else if (me == 1) {
        comm.receive(stream, its.part(0, 3), 0);
      } else {
        comm.send(stream, mine.part(0, 2), 0);
        comm.receive(stream, its.part(3, 1), 0);
        comm.receive(stream, its.part(0, 2), 0);
      }
    });
    CHECK(to[0].to_host() == std::vector<float>{-9, 3, 3, -9});
    CHECK(to[1].to_host() == std::vector<float>{1, 1, 1, -8});
    CHECK(to[2].to_host() == std::vector<float>{1, 1, -7, 1});
  }
}

TEST_CASE("Between processes the dependent calls of one group take effect in their order",
          "[comm][gloo][tcp][tsan]") {
  testing::check_dependent_calls(tcp_ranks(2));
  testing::check_dependent_calls(testing::shm_ranks(2));
  if (gloo_availability().empty()) testing::check_dependent_calls(testing::gloo_ranks(2));
}

/// The sums of all ranks.
std::vector<std::vector<float>> sums(const Ranks& ranks, int64_t count) {
  std::vector<BasicTensor<float>> x;
  ranks.together([&](Communicator& comm, Stream stream) {
    std::vector<float> values(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) values[i] = testing::number<float>(comm.rank(), i);
    x.push_back(BasicTensor<float>::from_host(stream, {count}, values));
    comm.all_reduce(stream, x.back());
  });
  std::vector<std::vector<float>> found;
  for (const BasicTensor<float>& sum : x) found.push_back(sum.to_host());
  return found;
}

TEST_CASE("Between processes sums have the same bits on all ranks, and in every run",
          "[comm][gloo][tcp][row70]") {
  for (const Way& way : transports()) {
    const auto first = sums(way.make_ranks(4), 1001), again = sums(way.make_ranks(4), 1001);
    CHECK(first == again);
    for (const auto& sum : first) CHECK(sum == first[0]);
  }
}

/// Rank `late` comes to a barrier when `gate` is opened: how many ranks pass it before that.
int pass_early(const Ranks& ranks, int late, testing::Gate& gate, std::atomic<int>& came,
               std::atomic<int>& early) {
  testing::enqueue(ranks.streams[size_t(late)], [&] { gate.pass(); });
  for (const Stream& stream : ranks.streams) testing::enqueue(stream, [&] { ++came; });
  ranks.together([](Communicator& comm, Stream stream) { comm.barrier(stream); });
  for (const Stream& stream : ranks.streams) {
    testing::enqueue(stream, [&came, &early, all = ranks.size()] { early += came != all; });
  }
  // A rank that does not wait for the late one has time to continue.
  for (int i = 0; i < 15 && early == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  gate.open();
  ranks.synchronize();
  return early;
}

TEST_CASE("Between processes nobody passes a barrier before all have come to it",
          "[comm][gloo][tcp]") {
  for (const Way& way : transports()) {
    for (const int world_size : {3, 5}) {
      std::array<testing::Gate, 2> gates;
      std::array<std::atomic<int>, 2> came{}, early{};
      const Ranks ranks = way.make_ranks(world_size);
      for (const size_t turn : {0, 1}) {
        const int late = turn == 0 ? 0 : world_size - 1;
        INFO(world_size << " ranks, rank " << late << " comes late");
        CHECK(pass_early(ranks, late, gates[turn], came[turn], early[turn]) == 0);
      }
    }
  }
}

TEST_CASE("Between processes all may send to all before anyone receives", "[comm][gloo][tcp]") {
  constexpr int64_t kCount = (1 << 18) + 1;  // more than connections hold
  constexpr int kRanks = 4;
  for (const Way& way : transports()) {
    const Ranks ranks = way.make_ranks(kRanks);
    const auto mine = testing::numbered<int64_t>(ranks, kCount, 10);
    const auto all = testing::numbered<int64_t>(ranks, kRanks * kCount, 0);
    ranks.together([&](Communicator& comm, Stream stream) {
      const int me = comm.rank();
      for (int other = 0; other < kRanks; ++other) {
        if (other != me) comm.send(stream, mine[me], other);
      }
      for (int other = 0; other < kRanks; ++other) {
        if (other == me) continue;
        comm.receive(stream, Elements(all[me]).part(other * kCount, kCount), other);
      }
    });
    for (int me = 0; me < kRanks; ++me) {
      const std::vector<int64_t> found = all[me].to_host();
      for (int other = 0; other < kRanks; ++other) {
        const int64_t expected = other == me ? me : 10 + other;
        CHECK(std::count(found.begin() + other * kCount, found.begin() + (other + 1) * kCount,
                         expected) == kCount);
      }
    }
  }
}

// --- Calls on several streams --------------------------------------------------------------------

/// Carries nothing: notes the calls in the order in which they run.
class NotingTransport final : public HostTransport {
 public:
  std::string description() const override { return "noting"; }
  int64_t bytes_sent() const override { return 0; }
  void run(const Call& collective, uint64_t number) override {
    note(fmt::format("{} {}", number, name_of(collective.op)));
  }
  void transfer(const std::vector<Call>& calls) override {
    std::string names;
    for (const Call& call : calls) names += (names.empty() ? "" : " and ") + call.text();
    note(names);
  }
  std::vector<std::string> calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }

 private:
  void note(std::string call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
  }

  mutable std::mutex mutex_;
  std::vector<std::string> calls_;
};

TEST_CASE("Calls on several streams run in the order in which they were issued",
          "[comm][tcp][tsan]") {
  testing::Gate gate;
  const auto transport = std::make_shared<NotingTransport>();
  const auto device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream busy = device->create_stream("busy"), idle = device->create_stream("idle");
  const auto x = BasicTensor<float>::from_host(busy, {1}, {1});
  HostCommunicator rank(0, 2, transport);
  testing::enqueue(busy, [&] { gate.pass(); });
  rank.all_reduce(busy, x);
  rank.send(idle, x, 1);
  rank.broadcast(idle, x, 0);
  rank.receive(busy, x, 1);
  // The idle stream has time to run its calls, if it does not wait for the busy one.
  for (int i = 0; i < 50 && transport->calls().empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(transport->calls().empty());
  gate.open();
  for (const Stream& stream : {busy, idle}) stream.synchronize();
  CHECK(transport->calls() == std::vector<std::string>{"1 all_reduce", "send of 1 f32 to rank 1",
                                                       "2 broadcast",
                                                       "receive of 1 f32 from rank 1"});
}

TEST_CASE("Of a group's transfers those that follow each other on a stream go on together",
          "[comm][tcp]") {
  const auto transport = std::make_shared<NotingTransport>();
  const auto device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream one = device->create_stream("one"), other = device->create_stream("other");
  const auto x = BasicTensor<float>::from_host(one, {1}, {1});
  HostCommunicator rank(0, 2, transport);
  rank.open_group();
  rank.send(one, x, 1);
  rank.receive(one, x, 1);
  rank.send(other, x, 1);
  rank.barrier(one);
  rank.receive(one, x, 1);
  rank.close_group();
  for (const Stream& stream : {one, other}) stream.synchronize();
  const std::string send = "send of 1 f32 to rank 1", receive = "receive of 1 f32 from rank 1";
  CHECK(transport->calls() ==
        std::vector<std::string>{send + " and " + receive, send, "1 barrier", receive});
}

TEST_CASE("Comparisons of the ranks' calls have numbers of their own", "[comm][tcp]") {
  const auto noting = std::make_shared<NotingTransport>();
  const testing::Stores stores(1);
  const auto device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream stream = device->create_stream("calls");
  const auto x = BasicTensor<float>::from_host(stream, {1}, {1});
  const auto numbers = [&](bool compares) {
    HostCommunicator rank(0, 1, noting, RollCall(stores.all[0], kLong, compares));
    for (int call = 0; call < 2; ++call) rank.all_reduce(stream, x);
    stream.synchronize();
    return noting->calls();
  };
  std::vector<std::string> expected{"1 all_reduce", "2 all_reduce"};
  CHECK(numbers(false) == expected);
  for (const char* call : {"1 all_gather", "2 all_reduce", "3 all_gather", "4 all_reduce"}) {
    expected.push_back(call);
  }
  CHECK(numbers(true) == expected);
}

// --- Ranks that do not come ----------------------------------------------------------------------

TEST_CASE("Over TCP a rank that does not come is missed in time, and its peers learn of it",
          "[comm][tcp][tsan][row72]") {
  const testing::Stores stores(3);
  std::vector<std::shared_ptr<HostTransport>> ranks(3);
  // Rank 0 has less patience than rank 1, which waits for rank 2, too.
  testing::run_ranks(
      3, [&](int rank) { ranks[rank] = connect_tcp(stores[rank], rank == 0 ? kShort : kLong); });
  const auto begin = testing::Clock::now();
  const auto errors = testing::run_ranks(2, [&](int rank) {
    std::vector<int64_t> x(3);
    ranks[rank]->run(
        {.op = Call::Op::all_reduce, .mine = {x.data(), 3, ElementType::i64}, .all = {}}, 1);
  });
  CHECK(errors[0] == "rank 2 did not answer within 0.3 s: 0 of 8 bytes came");
  CHECK(seconds_since(begin) >= kShort);
  CHECK(seconds_since(begin) < kSoon);
  CHECK(errors[1] == "rank 0 closed the connection");
  // From then on each says why it cannot go on.
  CHECK(message_of<PeerLost>([&] { ranks[0]->run({}, 2); }) == errors[0]);
  CHECK(message_of<PeerLost>([&] { ranks[0]->transfer({}); }) == errors[0]);
}

TEST_CASE("Over TCP a rank that has gone is noticed at once", "[comm][tcp][tsan][row67]") {
  Ranks ranks = tcp_ranks(2, kLong);
  ranks.comms[1].reset();
  const auto x = testing::numbered<int64_t>(ranks, 3, 1);
  const auto begin = testing::Clock::now();
  ranks.comms[0]->all_reduce(ranks.streams[0], x[0]);
  CHECK_THAT(message_of<PeerLost>([&] { ranks.streams[0].synchronize(); }),
             Catch::Matchers::StartsWith("rank 0: collective 1 (all_reduce of 3 i64, sum): rank 1 "
                                         "closed the connection"));
  CHECK(seconds_since(begin) < kSoon);
}

}  // namespace
}  // namespace lockstep
