// Simulated devices: when work would happen, and that nothing is computed.

#include <array>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "common/comm/sim_communicator.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/kernels/devices.h"
#include "common/kernels/kernels.h"
#include "common/rendezvous/agreement.h"
#include "common/rendezvous/simulated_ranks.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/rank_threads.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::message_of;
using testing::TempDir;

/// Simple rates: a byte takes a nanosecond, a multiplication two, a message of a link 100 and more.
struct SimpleProfile {
  explicit SimpleProfile(int64_t launch_ns = 0, const std::string& crowded = "[1]",
                         const std::string& lanes = "1", int64_t wake_ns = 0) {
    std::ofstream(path()) << fmt::format(R"({{"device": "simple", "source": "made up",
      "memory_bytes": 1e9, "launch_seconds": {}e-9, "batch_seconds": 50e-9, "sample_seconds": 3e-9,
      "crowded": {}, "lanes": {}, "wake_seconds": {}e-9,
      "operations": {{"default": {{"seconds": 0, "flops": 5e8, "bytes": 1e9}},
                      "conv2d 5x5": {{"seconds": 0, "flops": 1e8, "bytes": 1e9}}}},
      "links": {{"host": {{"seconds": 10e-9, "bytes": 1e9}},
                 "device": {{"seconds": 100e-9, "bytes": 1e9}},
                 "network": {{"seconds": 1000e-9, "bytes": 1e8}}}}}})",
                                         launch_ns, crowded, lanes, wake_ns);
  }
  std::string path() const { return folder / "simple.json"; }
  Devices open(int count, bool trace = false) const {
    return open_devices(parse_devices(fmt::format("sim:{}x{}", path(), count)), {.trace = trace});
  }
  TempDir folder;
};

/// What a stream has done, as "op begin-end".
std::vector<std::string> timeline(Stream stream) {
  std::vector<std::string> texts;
  for (const Span& span : stream.backend().timeline()) {
    texts.push_back(fmt::format("{} {}-{}", span.op, span.begin_ns, span.end_ns));
  }
  return texts;
}
using Texts = std::vector<std::string>;

/// 0, 1, ..., count - 1
std::vector<int> ranks_to(int count) {
  std::vector<int> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

TEST_CASE("Simulated work begins when its stream, its events and the host have come", "[sim]") {
  const SimpleProfile profile;
  const Devices devices = profile.open(1, /*trace=*/true);
  const Stream a = devices[0]->create_stream("a"), b = devices[0]->create_stream("b");
  const Tensor x = Tensor::empty(a, {100}), y = Tensor::empty(b, {25});
  const auto bytes = int64_t(sizeof(Real));
  a.kernels().fill(a, 0, x);  // 100 numbers
  b.kernels().fill(b, 0, y);  // 25 numbers, at the same time
  b.wait(a.record());         // until the 100 are done
  b.kernels().fill(b, 0, y);
  CHECK(devices[0]->now_ns() == 0);  // the host has waited for nothing
  b.synchronize();
  CHECK(devices[0]->now_ns() == 125 * bytes);
  a.kernels().fill(a, 0, x);  // not before the host comes to it
  CHECK(timeline(a) == Texts{fmt::format("fill 0-{}", 100 * bytes),
                             fmt::format("fill {}-{}", 125 * bytes, 225 * bytes)});
  CHECK(timeline(b) == Texts{fmt::format("fill 0-{}", 25 * bytes),
                             fmt::format("fill {}-{}", 100 * bytes, 125 * bytes)});
}

TEST_CASE("A simulated operation tells what it waited for, and what it sends", "[sim]") {
  const SimpleProfile profile;
  const Devices devices = profile.open(2, /*trace=*/true);
  const Stream a = devices[0]->create_stream("a"), b = devices[1]->create_stream("b");
  const Tensor x = Tensor::empty(a, {100}), y = Tensor::empty(b, {100}),
               z = Tensor::empty(b, {100});
  b.wait(a.record());  // nothing is enqueued there yet
  a.kernels().fill(a, 0, x);
  a.kernels().fill(a, 0, x);
  b.wait(a.record());
  b.wait(b.record());  // what is before it on its own stream, is before it anyway
  b.copy(y.data(), x.data(), x.bytes());
  b.copy(z.data(), y.data(), y.bytes());
  const std::vector<Span> spans = b.backend().timeline();
  REQUIRE(spans.size() == 2);
  REQUIRE(spans[0].after.size() == 1);
  CHECK(spans[0].after[0].stream == &a.backend());
  CHECK(spans[0].after[0].number == 1);
  CHECK(spans[0].sent_bytes == int64_t(x.bytes()));
  CHECK(spans[1].after.empty());
  CHECK(spans[1].sent_bytes == 0);  // it stays on its device
}

TEST_CASE("A simulated host pays for every operation, and for a graph once", "[sim]") {
  const SimpleProfile profile(1000);
  const Devices devices = profile.open(1);
  const Stream stream = devices[0]->create_stream("compute");
  const Tensor x = Tensor::empty(stream, {1});
  const auto fill = [&] { stream.kernels().fill(stream, 0, x); };
  const auto bytes = int64_t(sizeof(Real));
  for (int i = 0; i < 3; ++i) fill();
  stream.synchronize();
  CHECK(devices[0]->now_ns() == 3000 + bytes);  // launch-bound: the device waits for the host
  stream.begin_capture();
  for (int i = 0; i < 3; ++i) fill();
  const std::unique_ptr<Graph> graph = stream.end_capture();
  CHECK(devices[0]->now_ns() == 3000 + bytes);  // recorded, not run
  stream.launch(*graph);
  stream.synchronize();
  CHECK(devices[0]->now_ns() == 4000 + 4 * bytes);
}

TEST_CASE("A simulated host pays for a batch, and for each sample of it", "[sim]") {
  const Devices devices = SimpleProfile().open(1);
  devices[0]->made_batch(10);
  CHECK(devices[0]->now_ns() == 50 + 10 * 3);
}

TEST_CASE("Simulated devices of one host slow each other down as the profile says", "[sim]") {
  const SimpleProfile profile(0, "[1, 1.5, 4]");
  const auto time_beside = [&](int count) {
    const Devices devices = profile.open(count);
    const Stream stream = devices[0]->create_stream("compute");
    const Tensor x = Tensor::empty(stream, {100});
    stream.kernels().fill(stream, 0, x);
    stream.synchronize();
    return devices[0]->now_ns();
  };
  const auto alone = int64_t(100 * sizeof(Real));
  CHECK(time_beside(1) == alone);
  CHECK(time_beside(2) == alone * 3 / 2);
  CHECK(time_beside(3) == alone * 4);
  CHECK(time_beside(8) == alone * 4);  // what is not known is as the last that is
  CHECK_THROWS_WITH(SimpleProfile(0, "2").open(1),
                    ContainsSubstring("crowded: found 2, expected a list of numbers"));
}

TEST_CASE("A simulated stream that waited for an event pays for waking", "[sim]") {
  const Devices devices = SimpleProfile(0, "[1]", "1", 20).open(1, /*trace=*/true);
  const Stream a = devices[0]->create_stream("a"), b = devices[0]->create_stream("b");
  const Tensor x = Tensor::empty(a, {100}), y = Tensor::empty(b, {200});
  const auto bytes = int64_t(sizeof(Real));
  const auto fill = [](Stream stream, const Tensor& all) { stream.kernels().fill(stream, 0, all); };
  fill(a, x);
  b.wait(a.record());  // b sleeps until the 100 are done
  fill(b, y);
  a.wait(b.record());  // and a until the 200 are
  fill(a, x);
  b.wait(a.record());
  fill(a, x);
  const Event last = a.record();
  a.synchronize();
  b.wait(last);  // it has come already
  fill(b, y);
  const int64_t begin = 100 * bytes + 20, then = begin + 200 * bytes + 20;
  CHECK(timeline(a) == Texts{fmt::format("fill 0-{}", 100 * bytes),
                             fmt::format("fill {}-{}", then, then + 100 * bytes),
                             fmt::format("fill {}-{}", then + 100 * bytes, then + 200 * bytes)});
  CHECK(timeline(b) == Texts{fmt::format("fill {}-{}", begin, begin + 200 * bytes),
                             fmt::format("fill {}-{}", then + 200 * bytes, then + 400 * bytes)});
}

TEST_CASE("A simulated convolution costs what its window does", "[sim]") {
  const Devices devices = SimpleProfile().open(1);
  const Stream stream = devices[0]->create_stream("compute");
  const auto ns_of = [&](int64_t window) {
    const Window2d g = make_window("a", {1, 8, 8, 4}, 4, 4, window, 1, window / 2);
    const Tensor x = Tensor::empty(stream, g.input()), weight = Tensor::empty(stream, g.weight()),
                 y = Tensor::empty(stream, g.output());
    stream.synchronize();
    const int64_t begin = devices[0]->now_ns();
    stream.kernels().conv2d(stream, g, x, weight, Tensor(), y);
    stream.synchronize();
    return double(devices[0]->now_ns() - begin) / g.flops();
  };
  CHECK(ns_of(3) == Approx(2));  // as by default
  CHECK(ns_of(5) == Approx(10));
}

TEST_CASE("A simulated convolution fills whole vectors with the channels of its result", "[sim]") {
  const auto seconds_of = [](const std::string& lanes, int64_t in, int64_t out, bool backward) {
    const Devices devices = SimpleProfile(0, "[1]", lanes).open(1);
    const Stream stream = devices[0]->create_stream("compute");
    const Window2d window = make_window("a", {1, 8, 8, in}, in, out, 3, 1, 1);
    const Tensor x = Tensor::empty(stream, window.input()),
                 weight = Tensor::empty(stream, window.weight()),
                 y = Tensor::empty(stream, window.output());
    if (backward) {
      stream.kernels().conv2d_backward_input(stream, window, y, weight, x);
    } else {
      stream.kernels().conv2d(stream, window, x, weight, Tensor(), y);
    }
    stream.synchronize();
    return double(devices[0]->now_ns()) / window.flops() / 2;  // a multiplication takes two
  };
  CHECK(seconds_of("1", 12, 12, false) == Approx(1));
  CHECK(seconds_of("16", 12, 12, false) == Approx(16.0 / 12));
  CHECK(seconds_of("16", 12, 16, false) == Approx(1));
  CHECK(seconds_of("16", 12, 20, false) == Approx(32.0 / 20));
  CHECK(seconds_of("16", 12, 16, true) == Approx(16.0 / 12));  // the result is the input's gradient
  CHECK_THROWS_WITH(SimpleProfile(0, "[1]", "1.5").open(1),
                    ContainsSubstring("lanes: found 1.5, expected a whole number from 1 to 1024"));
  CHECK_THROWS_WITH(SimpleProfile(0, "[1]", "0").open(1),
                    ContainsSubstring("lanes: found 0, expected a whole number from 1 to 1024"));
}

TEST_CASE("An operation takes its products or its bytes, whichever takes longer", "[sim]") {
  const SimpleProfile profile;
  const Devices devices = profile.open(1);
  const Stream stream = devices[0]->create_stream("compute");
  const auto ns = [&](const MatMul& shape) {
    const Tensor a = Tensor::empty(stream, {shape.m, shape.k}),
                 b = Tensor::empty(stream, {shape.k, shape.n}),
                 c = Tensor::empty(stream, {shape.m, shape.n});
    stream.synchronize();
    const int64_t begin = devices[0]->now_ns();
    stream.kernels().matmul(stream, shape, a, b, c);
    stream.synchronize();
    return devices[0]->now_ns() - begin;
  };
  const auto shape = [](int64_t m, int64_t n, int64_t k) {
    return MatMul{
        .m = m, .n = n, .k = k, .transpose_a = false, .transpose_b = false, .accumulate = false};
  };
  CHECK(ns(shape(100, 100, 100)) == 2 * 2 * 100 * 100 * 100);
  CHECK(ns(shape(100, 1, 1)) == int64_t(sizeof(Real)) * (100 + 1 + 100));
}

TEST_CASE("Memory that no machine has is counted, and is nowhere", "[sim]") {
  const SimpleProfile profile;
  const Devices devices = profile.open(2);
  const std::vector<Stream> streams = create_streams(devices, "compute");
  const int64_t terabyte = int64_t{1} << 40;
  {
    const ByteTensor huge = ByteTensor::empty(streams[0], {terabyte});
    const ByteTensor another = ByteTensor::empty(streams[1], {terabyte});
    CHECK(devices[0]->memory().current() == terabyte);
    streams[1].copy(another.data(), huge.data(), size_t(terabyte));
    streams[1].synchronize();
    CHECK(devices[0]->now_ns() == 100 + terabyte);  // between devices: 100 ns, and the bytes
  }
  CHECK(devices[0]->memory().current() == 0);
  CHECK(devices[0]->memory().peak() == terabyte);
}

TEST_CASE("The host reads counts of a simulated device, and no results", "[sim]") {
  const SimpleProfile profile;
  const Devices devices = profile.open(1);
  const Stream stream = devices[0]->create_stream("compute");
  const auto states = HealthTensor::from_host(stream, {}, {Health{.failed_step = 7}});
  CHECK(states.to_host()[0].failed_step == 7);
  const CountTensor counts = CountTensor::empty(stream, {2});
  stream.kernels().fill_count(stream, 5, counts);
  CHECK(counts.to_host() == std::vector<int64_t>{5, 5});
  const Tensor x = Tensor::empty(stream, {3, 4, 4, 2}), statistics = Tensor::empty(stream, {5});
  stream.kernels().batch_norm_statistics(stream, x, statistics);
  CHECK(statistics.range(4, {1}).to_host() == std::vector<Real>{3 * 4 * 4});  // rows
  for (const Tensor& without_values : {x, statistics, statistics.range(0, {1})}) {
    CHECK_THAT(message_of<BadInput>([&] { without_values.to_host(); }),
               ContainsSubstring("a tensor " + without_values.shape().text() + " has no values"));
  }
}

// --- Ranks ---------------------------------------------------------------------------------------

TEST_CASE("Simulated ranks send a ring's messages one by one", "[sim]") {
  const SimpleProfile profile;
  for (const int ranks : {1, 2, 3, 8, 1024}) {
    const Devices devices = profile.open(1);
    const Stream stream = devices[0]->create_stream("communication");
    const auto comm = make_sim_communicator(ranks_to(ranks), ranks);
    const int64_t others = ranks - 1, part = 10, n = part * ranks, size = sizeof(Real);
    const auto ns = [&](const auto& call) {
      const int64_t begin = devices[0]->now_ns(), sent = comm->bytes_sent();
      call();
      stream.synchronize();
      return std::pair(devices[0]->now_ns() - begin, comm->bytes_sent() - sent);
    };
    const Tensor all = Tensor::empty(stream, {n}), mine = Tensor::empty(stream, {part});
    const int64_t round = 100 + part * size;
    using Cost = std::pair<int64_t, int64_t>;
    CHECK(ns([&] { comm->all_reduce(stream, all); }) ==
          Cost(2 * others * round, 2 * others * part * size));
    CHECK(ns([&] { comm->all_gather(stream, mine, all); }) ==
          Cost(others * round, others * part * size));
    CHECK(ns([&] { comm->reduce_scatter(stream, all, mine); }) ==
          Cost(others * round, others * part * size));
  }
}

TEST_CASE("A message on its way round a ring passes fast links and slow ones", "[sim]") {
  const SimpleProfile profile;
  const Devices devices = profile.open(1);
  const Stream stream = devices[0]->create_stream("communication");
  const auto comm = make_sim_communicator(ranks_to(4), 2);
  const Tensor x = Tensor::empty(stream, {4});
  comm->all_reduce(stream, x);
  stream.synchronize();
  const int64_t bytes = sizeof(Real);  // of a part: six messages, every second one between hosts
  CHECK(devices[0]->now_ns() == 3 * (100 + bytes) + 3 * (1000 + 10 * bytes));
  const int64_t begin = devices[0]->now_ns();
  for (int step = 0; step < 6; ++step) {  // the same by hand
    comm->open_group();
    comm->send(stream, x.range(0, {1}), 1);
    comm->receive(stream, x.range(1, {1}), 3);
    comm->close_group();
  }
  stream.synchronize();
  CHECK(devices[0]->now_ns() - begin == 3 * (100 + bytes) + 3 * (1000 + 10 * bytes));
}

TEST_CASE("Counts are those of all simulated ranks", "[sim]") {
  const SimpleProfile profile;
  const Devices devices = profile.open(1);
  const Stream stream = devices[0]->create_stream("communication");
  const auto comm = make_sim_communicator(ranks_to(3), 3);
  const auto counts = CountTensor::from_host(stream, {2}, {12, 1});
  comm->all_reduce(stream, counts);
  CHECK(counts.to_host() == std::vector<int64_t>{36, 3});
  const Tensor x = Tensor::empty(stream, {10, 2}), statistics = Tensor::empty(stream, {5}),
               gathered = Tensor::empty(stream, {3, 5});
  stream.kernels().batch_norm_statistics(stream, x, statistics);
  comm->all_gather(stream, statistics, gathered);
  stream.kernels().batch_norm_merge(stream, gathered, statistics);
  CHECK(statistics.range(4, {1}).to_host() == std::vector<Real>{30});
}

// --- Ranks that differ ---------------------------------------------------------------------------

namespace {

/// What ranks of different kinds threw, each a thread that makes its own calls.
Texts run_kinds(int kinds, const std::function<void(Communicator& comm, Stream stream)>& body,
                double timeout_seconds = 20) {
  const SimpleProfile profile;
  const SimulatedRanks ranks{.world_size = kinds, .per_host = kinds, .kinds = kinds};
  return testing::run_ranks(kinds, [&](int rank) {
    const auto store = std::make_shared<LikeRanksStore>(ranks, rank);
    const auto device = open_device(parse_devices(fmt::format("sim:{}x2", profile.path()))[0], {});
    const auto comm = make_sim_communicator(ranks_to(kinds), kinds, store, timeout_seconds);
    body(*comm, device->create_stream("communication"));
  });
}

}  // namespace

TEST_CASE("A call of simulated ranks that differ begins when the last of them has come",
          "[sim][tsan]") {
  const int64_t bytes = 100 * sizeof(Real), message = 100 + bytes;
  for (const int late : {0, 1}) {
    std::array<std::vector<int64_t>, 2> ends;
    const Texts errors = run_kinds(2, [&](Communicator& comm, Stream stream) {
      const Tensor x = Tensor::empty(stream, {100});
      const auto take_time = [&] {
        stream.synchronize();
        ends.at(size_t(comm.rank())).push_back(stream.device().now_ns());
      };
      if (comm.rank() == late) stream.kernels().fill(stream, 0, x);
      comm.rank() == 0 ? comm.send(stream, x, 1) : comm.receive(stream, x, 0);
      take_time();
      if (comm.rank() == late) stream.kernels().fill(stream, 0, x);
      comm.all_reduce(stream, x);  // two messages of half of it
      take_time();
    });
    CHECK(errors == Texts{"", ""});
    CHECK(ends[0] == std::vector{bytes + message, 2 * bytes + message + 2 * (100 + bytes / 2)});
    CHECK(ends[1] == ends[0]);
  }
}

TEST_CASE("Whole numbers of simulated ranks that differ are true on all of them", "[sim][tsan]") {
  std::array<std::vector<int64_t>, 2> sent, sums, broadcast;
  const Texts errors = run_kinds(2, [&](Communicator& comm, Stream stream) {
    const auto me = size_t(comm.rank());
    const auto counts = CountTensor::from_host(stream, {2}, {comm.rank() == 0 ? 3 : 40, 1});
    comm.all_reduce(stream, counts);
    sums.at(me) = counts.to_host();
    counts.copy_from_host({comm.rank() == 0 ? 7 : 0, 8});
    comm.rank() == 0 ? comm.send(stream, counts, 1) : comm.receive(stream, counts, 0);
    sent.at(me) = counts.to_host();
    counts.copy_from_host({0, comm.rank()});
    comm.broadcast(stream, counts, 1);
    broadcast.at(me) = counts.to_host();
  });
  CHECK(errors == Texts{"", ""});
  CHECK(sums[0] == std::vector<int64_t>{43, 2});
  CHECK(sums[1] == sums[0]);
  CHECK(sent[1] == std::vector<int64_t>{7, 8});
  CHECK(broadcast[0] == std::vector<int64_t>{0, 1});
}

TEST_CASE("Each of the simulated ranks that differ sends its own parts", "[sim][tsan]") {
  const Call call{.op = Call::Op::all_reduce, .mine = {nullptr, 101, ElementType::i64}};
  std::array<int64_t, 3> sent{}, around{};
  const Texts errors = run_kinds(3, [&](Communicator& comm, Stream stream) {
    const auto me = size_t(comm.rank());
    const auto counts = CountTensor::from_host(stream, {101}, std::vector<int64_t>(101, 1));
    comm.all_reduce(stream, counts);
    sent.at(me) = comm.bytes_sent();
    comm.broadcast(stream, counts, 1);  // it goes from 1 to 2 to 0
    around.at(me) = comm.bytes_sent() - sent.at(me);
  });
  CHECK(errors == Texts(3));
  for (int rank = 0; rank < 3; ++rank) CHECK(sent.at(size_t(rank)) == call.ring_bytes(rank, 3));
  CHECK(sent[0] != sent[1]);
  CHECK(around == std::array<int64_t, 3>{0, 808, 808});
}

TEST_CASE("Simulated ranks that differ and do not match are told so", "[sim][tsan]") {
  const Texts other_size = run_kinds(2, [&](Communicator& comm, Stream stream) {
    const auto counts = CountTensor::empty(stream, {comm.rank() == 0 ? 2 : 3});
    comm.rank() == 0 ? comm.send(stream, counts, 1) : comm.receive(stream, counts, 0);
  });
  CHECK(other_size[0] ==
        "rank 0: send of 2 i64 to rank 1: found 24 bytes on the other side, "
        "expected 16");
  CHECK(other_size[1] ==
        "rank 1: receive of 3 i64 from rank 0: found 16 bytes on the other side, "
        "expected 24");
  const Texts alone = run_kinds(
      2,
      [&](Communicator& comm, Stream stream) {
        if (comm.rank() == 0) comm.send(stream, CountTensor::empty(stream, {2}), 1);
      },
      0.1);
  CHECK_THAT(alone[0], ContainsSubstring("send of 2 i64 to rank 1") &&
                           ContainsSubstring("rank 1 did not come within 0.1 s"));
  const Texts together = run_kinds(2, [&](Communicator& comm, Stream stream) {
    const auto counts = CountTensor::empty(stream, {2});
    comm.open_group();
    comm.send(stream, counts, 1 - comm.rank());
    comm.receive(stream, counts, 1 - comm.rank());
    comm.close_group();
  });
  CHECK_THAT(together[1],
             ContainsSubstring("and 1 more") && ContainsSubstring("one call at a time"));
}

TEST_CASE("A rank that stands for its kind hears the first rank of every kind", "[sim][tsan]") {
  const SimulatedRanks ranks{.world_size = 8, .per_host = 4, .kinds = 2, .apart = 2};
  CHECK(ranks.alike() == 4);
  CHECK(ranks.are_alike({0, 1, 4, 5}));
  CHECK_FALSE(ranks.are_alike({0, 2}));
  std::array<Texts, 2> heard;
  testing::run_ranks(2, [&](int kind) {
    LikeRanksStore store(ranks, ranks.first_of(kind));
    for (const std::string round : {"first", "second"}) {
      heard.at(size_t(kind)) = exchange(store, round, fmt::format("{} of {}", round, kind), 20);
    }
  });
  const std::string a = "second of 0", b = "second of 1";
  CHECK(heard[0] == Texts{a, a, b, b, a, a, b, b});
  CHECK(heard[1] == heard[0]);
}

}  // namespace lockstep
