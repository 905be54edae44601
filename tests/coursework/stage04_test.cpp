// Grades stage 04.

#include <array>
#include <cmath>
#include <deque>
#include <numeric>

#include "04-ddp/all_reduce.h"
#include "04-ddp/buckets.h"
#include "04-ddp/ddp.h"
#include "04-ddp/shard_loader.h"
#include "tests/coursework/hint.h"
#include "tests/coursework/other_rank.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tcp_stores.h"

namespace lockstep {
namespace {

using testing::Ranks;
using Values = std::vector<Real>;

constexpr double kPatience = 3;  // seconds until a rank gives up waiting for another

/// A rank that sends and receives: all that the ring needs.
class Neighbour final : public Communicator {
 public:
  explicit Neighbour(Communicator& rank)
      : Communicator(rank.rank(), rank.world_size()), rank_(rank) {}
  void open_group() override { rank_.open_group(); }
  void close_group() override { rank_.close_group(); }

 private:
  void issue(Stream stream, const Call& call) override {
    if (call.op == Call::Op::send) return rank_.send(stream, call.mine, call.peer);
    require(call.op == Call::Op::receive, "{}: expected send and receive only", call.text());
    rank_.receive(stream, call.mine, call.peer);
  }
  Communicator& rank_;
};

/// What all ranks have after the ring, where rank r's number i was 10^r (i + 1), and the bytes that
/// each of them sent.
struct RingResult {
  RingResult(int world_size, int64_t count) : ranks(testing::tcp_ranks(world_size, kPatience)) {
    std::vector<Tensor> x;
    std::deque<Neighbour> neighbours;
    std::deque<AllReduce> reduce;
    Real factor = 1;
    expected.assign(static_cast<size_t>(count), 0);
    for (size_t rank = 0; rank < ranks.streams.size(); ++rank, factor *= 10) {
      Values values;
      for (int64_t i = 0; i < count; ++i) values.push_back(factor * Real(i + 1));
      for (size_t i = 0; i < values.size(); ++i) expected[i] += values[i];
      x.push_back(Tensor::from_host(ranks.streams[rank], {count}, values));
      neighbours.emplace_back(*ranks.processes[rank]);
      reduce.emplace_back(neighbours.back(), AllReduceKind::ring, ranks.streams[rank]);
      reduce.back()(x.back());
    }
    for (const Tensor& sum : x) found.push_back(sum.to_host());
    for (const AllReduce& rank : reduce) bytes_sent.push_back(rank.bytes_sent());
  }
  Ranks ranks;
  Values expected;
  std::vector<Values> found;
  std::vector<int64_t> bytes_sent;
};

TEST_CASE("Two ranks have the sum of both", "[task04.1]") {
  HINT(
      "one rank waits for another that sends nothing: do all ranks make the same number of steps, "
      "and send and receive in one group?");
  const RingResult ring(2, 2);
  {
    HINT(
        "a digit is the number of times that a rank's value was added: once each. If it is none, "
        "or "
        "nonsense: had the part come when it was added? A group's calls are enqueued when the "
        "group "
        "is closed");
    CHECK(ring.found[0] == ring.expected);
  }
  HINT(
      "rank 0 has the sum, rank 1 has not: which part does each begin with? Of which part does a "
      "rank hold the sum after the reduce-scatter, and is that the one it passes on first?");
  CHECK(ring.found[1] == ring.expected);
}

TEST_CASE("Four ranks with parts of different lengths", "[task04.1]") {
  HINT(
      "ranks do not agree on what they exchange: which part goes when, and does everything go the "
      "same way round the ring?");
  const RingResult ring(4, 7);
  for (const Values& found : ring.found) {
    HINT(
        "some part is not complete on some rank: of which part does a rank hold the sum after the "
        "reduce-scatter, and is that the one it passes on first?");
    CHECK(found == ring.expected);
  }
}

TEST_CASE("Parts that no buffer of a connection holds", "[task04.1]") {
  HINT(
      "all ranks wait until what they send is taken, and nobody takes it: what makes a send and a "
      "receive go on at the same time?");
  const RingResult ring(2, 4'000'000);
  const bool equal = ring.found[0] == ring.expected && ring.found[1] == ring.expected;
  HINT("the sum of a large tensor is another one");
  CHECK(equal);
}

TEST_CASE("A rank sends 2 (W-1)/W of the numbers", "[task04.1]") {
  HINT("a rank sends one part in each step: does it send more, or make more steps than needed?");
  const RingResult ring(3, 6);
  const int64_t expected = 2 * 2 * 2 * int64_t{sizeof(Real)};
  for (const int64_t sent : ring.bytes_sent) CHECK(sent == expected);
}

// --- Buckets -------------------------------------------------------------------------------------

using Sizes = std::vector<int64_t>;

Sizes bytes_of(const std::vector<Bucket>& buckets) {
  Sizes bytes;
  for (const Bucket& bucket : buckets) bytes.push_back(bucket.bytes);
  return bytes;
}

TEST_CASE("A bucket is closed when it has reached its cap", "[task04.2]") {
  HINT(
      "a bucket takes gradients until it has reached its cap: the one that reaches it is still in");
  CHECK(bytes_of(plan_buckets({4, 4, 4}, {.first_bytes = 6, .bytes = 6})) == Sizes{8, 4});
  {
    HINT("a bucket that has exactly its cap has reached it: nothing more comes in");
    CHECK(bytes_of(plan_buckets({3, 3, 3}, {.first_bytes = 6, .bytes = 6})) == Sizes{6, 3});
  }
  HINT("a gradient larger than the cap does not break a bucket up");
  CHECK(bytes_of(plan_buckets({2, 100, 2}, {.first_bytes = 6, .bytes = 6})) == Sizes{102, 2});
}

TEST_CASE("The first bucket has a cap of its own", "[task04.2]") {
  HINT("only the first bucket is small, so that the first all-reduce starts early");
  CHECK(bytes_of(plan_buckets({4, 4, 4, 4, 4}, {.first_bytes = 4, .bytes = 8})) == Sizes{4, 8, 8});
}

TEST_CASE("Gradients are in the order in which backward completes them", "[task04.2]") {
  const std::vector<Bucket> buckets = plan_buckets({4, 4, 4, 4}, {.first_bytes = 8, .bytes = 8});
  HINT("every gradient is in one bucket");
  REQUIRE(bytes_of(buckets) == Sizes{8, 8});
  HINT("backward completes gradient 0 first: the first bucket must not wait for later ones");
  CHECK(buckets[0].parameters == std::vector<size_t>{0, 1});
  CHECK(buckets[1].parameters == std::vector<size_t>{2, 3});
}

TEST_CASE("No gradients, no buckets; a cap of 0, a bucket each", "[task04.2]") {
  HINT("a bucket is opened for a gradient, never beforehand");
  CHECK(plan_buckets({}, {}).empty());
  HINT("with a cap of 0 every bucket is full as soon as it has one gradient");
  CHECK(bytes_of(plan_buckets({8, 0, 16}, BucketCaps::equal(0))) == Sizes{8, 0, 16});
}

// --- Overlap -------------------------------------------------------------------------------------

using testing::Gate;
using testing::OtherRank;

/// Layers a, b and c of one number each. Backward goes through them in `order` and has the device
/// write 2 into each gradient, after the layer's gate.
class ThreeLayers final : public Module {
 public:
  ThreeLayers(std::string order, std::array<Gate, 3>& gates, std::atomic<int>& computed)
      : order_(std::move(order)), gates_(gates), computed_(computed) {
    for (const char* name : {"a", "b", "c"}) add_parameter(name, ParameterKind::bias, {1}, 1);
  }
  Tensor forward(const Tensor& x, Context&) override { return x; }
  Tensor backward(const Tensor& dy, Context& context) override {
    for (const char layer : order_) {
      Parameter& parameter = *parameters()[size_t(layer - 'a')];
      Real* const gradient = parameter.grad.data();
      testing::enqueue(context.stream(), "backward", [this, layer, gradient] {
        gates_[size_t(layer - 'a')].pass();
        *gradient = 2;
        ++computed_;
      });
      gradient_written(parameter, context);
      behind_a_layer();
    }
    return dy;
  }
  std::function<void()> behind_a_layer;  // on the host

 private:
  std::string order_;
  std::array<Gate, 3>& gates_;
  std::atomic<int>& computed_;
};

/// A rank that goes backward once; 10 of every averaged gradient comes from the other rank.
struct BackwardPass {
  BackwardPass(const BucketCaps& caps, const std::string& order = "cba")
      : made(std::make_unique<ThreeLayers>(order, gates, computed)),
        layers(*made),
        parameters(layers, device.stream),
        ddp(std::move(made), parameters, other,
            [](const std::string& mine) { return std::vector<std::string>(2, mine); },
            communication, {.caps = caps}) {
    layers.behind_a_layer = [this] { seen.push_back(reduced()); };
  }
  ~BackwardPass() {
    for (Gate& gate : gates) gate.open();
    for (const Stream& stream : {device.stream, communication}) {
      try {
        stream.synchronize();
      } catch (const Error&) {  // the test reports it
      }
    }
  }

  /// Enqueues it; the layers named here are slow: they end when their gates are opened.
  void run(const std::string& slow = "") {
    for (size_t layer = 0; layer < 3; ++layer) {
      if (slow.find(char('a' + layer)) == slow.npos) gates[layer].open();
    }
    context.state().copy_from_host({StepState{}});
    const Tensor x = device.filled({1}, 0);
    ddp.backward(ddp.forward(x, context), context);
  }
  /// The layers in the reductions enqueued so far: "c ba".
  std::string reduced() {
    std::string text;
    for (const OtherRank::Sum& sum : other.sums) {
      const Real* const begin = static_cast<const Real*>(sum.x.data);
      if (!text.empty()) text += " ";
      for (const char layer : {'c', 'b', 'a'}) {
        const Real* const gradient = layers.parameters()[size_t(layer - 'a')]->grad.data();
        if (gradient >= begin && gradient < begin + sum.x.count) text += layer;
      }
    }
    return text;
  }
  Values gradients() {
    Values values;
    for (const Parameter* p : layers.parameters()) values.push_back(p->grad.to_host()[0]);
    return values;
  }

  std::array<Gate, 3> gates = {Gate(2), Gate(2), Gate(2)};
  std::atomic<int> computed = 0;  // gradients
  OtherRank other{10};
  testing::TestDevice device;
  Stream communication = device.device->create_stream("communication");
  std::unique_ptr<ThreeLayers> made;
  ThreeLayers& layers;
  FlatParameters parameters;
  DistributedDataParallel ddp;
  Context context{device.stream};
  std::vector<std::string> seen;  // reduced(), after each layer
};

using Seen = std::vector<std::string>;

TEST_CASE("A bucket is reduced while backward goes on with the layers in front", "[task04.3]") {
  BackwardPass pass(BucketCaps::equal(0));  // a bucket for each layer
  {
    HINT("called after each layer: what does it wait for, and which bucket does it look at?");
    pass.run();
  }
  {
    HINT("after the first layer one bucket is complete: are the gradients of the others ready?");
    CHECK(pass.seen.front() != "c b a");
  }
  HINT(
      "a reduction that begins when backward has ended is hidden behind nothing: is the hook's "
      "call used?");
  CHECK(pass.seen == Seen{"c", "c b", "c b a"});
  HINT("each bucket is reduced once");
  CHECK(pass.reduced() == "c b a");
}

TEST_CASE("A bucket is reduced when the last of its gradients is ready", "[task04.3]") {
  HINT("one gradient of a bucket is ready, or a bucket before it: what about the others in it?");
  for (const char* order : {"cba", "cab"}) {
    BackwardPass pass({.first_bytes = 1, .bytes = 1000}, order);  // c alone, b and a together
    pass.run();
    CHECK(pass.seen == Seen{"c", "c", "c ba"});
  }
}

TEST_CASE("Buckets are reduced in the plan's order, whichever is complete first", "[task04.3]") {
  BackwardPass pass(BucketCaps::equal(0), "abc");
  pass.run();
  HINT(
      "another rank may complete its gradients in another order: how do all ranks come to make the "
      "same calls?");
  CHECK(pass.seen == Seen{"", "", "c b a"});
}

TEST_CASE("A reduction waits for the kernels that make its gradients", "[task04.3]") {
  for (const char* slow : {"a", "b", "c"}) {
    BackwardPass pass(BucketCaps::equal(0));
    const int before = 'c' - slow[0];
    {
      HINT("does the host wait for the device? It has to go on, and enqueue the layers in front");
      pass.run(slow);
    }
    {
      HINT(
          "a bucket was reduced before the device had made its gradients: enqueued is not yet "
          "computed. Which event does the communication stream wait for?");
      CHECK(pass.other.done_after_a_while(before) <= before);
    }
    pass.gates[size_t(slow[0] - 'a')].open();
    HINT("what a kernel wrote after the reduction is not reduced: enqueued is not yet computed");
    CHECK(pass.gradients() == Values{11, 11, 11});
  }
}

TEST_CASE("Backward does not wait for reductions", "[task04.3]") {
  std::atomic<int> computed = 0;
  BackwardPass pass(BucketCaps::equal(0));
  pass.other.before_sum = [&] {
    if (pass.other.done > 0) return;
    const auto begin = testing::Clock::now();
    while (pass.computed < 3 && testing::seconds_since(begin) < 2) std::this_thread::yield();
    computed = pass.computed.load();
  };
  pass.run();
  pass.communication.synchronize();
  HINT(
      "the layers in front stand still until a bucket is reduced: who has to wait for that, and "
      "who need not?");
  CHECK(computed == 3);
}

// --- Samples -------------------------------------------------------------------------------------

using Samples = std::vector<int64_t>;

/// Of all ranks.
std::vector<Samples> dealt(int64_t n, int world_size, bool drop_last = false,
                           bool shuffle = false) {
  std::vector<Samples> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    DistributedSampler sampler(
        n, {.rank = rank, .world_size = world_size, .shuffle = shuffle, .drop_last = drop_last});
    sampler.set_epoch(1);
    ranks.push_back(sampler.order_of_epoch(0));
  }
  return ranks;
}

TEST_CASE("Samples are dealt like cards, one to each rank in turn", "[task04.4]") {
  HINT(
      "a rank's samples do not lie side by side: blocks would make other batches than one process");
  CHECK(dealt(6, 2) == std::vector<Samples>{{0, 2, 4}, {1, 3, 5}});
  CHECK(dealt(6, 3) == std::vector<Samples>{{0, 3}, {1, 4}, {2, 5}});
}

TEST_CASE("All ranks get equally many samples", "[task04.4]") {
  HINT("7 samples for 3 ranks: does a rank look past the end of the order?");
  const std::vector<Samples> ranks = dealt(7, 3);
  for (const Samples& mine : ranks) {
    HINT(
        "a rank with fewer samples makes fewer steps, and the others wait for it for ever: how "
        "does PyTorch lengthen the order?");
    CHECK(mine.size() == 3);
  }
  {
    HINT("the order is lengthened by its own beginning, not by its end or by sample 0");
    CHECK(ranks == std::vector<Samples>{{0, 3, 6}, {1, 4, 0}, {2, 5, 1}});
  }
  HINT("with drop_last the order is cut instead");
  CHECK(dealt(7, 3, true) == std::vector<Samples>{{0, 3}, {1, 4}, {2, 5}});
}

TEST_CASE("Fewer samples than ranks, and none", "[task04.4]") {
  HINT("an order that is lengthened by its beginning once may still be too short");
  CHECK(dealt(2, 5) == std::vector<Samples>{{0}, {1}, {0}, {1}, {0}});
  const std::vector<Samples> many = dealt(3, 64);  // what lies behind 3 samples is no such pattern
  for (size_t rank = 0; rank < many.size(); ++rank) {
    CHECK(many[rank] == Samples{int64_t(rank) % 3});
  }
  HINT("where there are no samples, no rank gets any");
  CHECK(dealt(0, 2) == std::vector<Samples>{{}, {}});
}

TEST_CASE("Positions are those of the epoch's order", "[task04.4]") {
  HINT("a rank gets the samples at its positions of the order, not the positions themselves");
  CHECK(dealt(10, 4, false, true) ==
        std::vector<Samples>{{5, 0, 7}, {6, 8, 4}, {1, 9, 5}, {2, 3, 6}});
}

// --- Uneven shards -------------------------------------------------------------------------------

/// How training combines the losses of a batch's samples, by rank: each rank adds up its weighted
/// samples, and the sums are averaged over the ranks.
double averaged_loss(const std::vector<std::vector<double>>& ranks) {
  HostBatch batch;
  for (const std::vector<double>& losses : ranks) batch.global_size += std::ssize(losses);
  double sum = 0;
  for (const std::vector<double>& losses : ranks) {
    batch.size = std::ssize(losses);
    const double weight = double(loss_weight(batch, static_cast<int>(ranks.size())));
    HINT("a rank without samples: its weight is of no use, but it must not be NaN or infinite");
    REQUIRE(std::abs(weight) < 1000);
    sum += weight * std::accumulate(losses.begin(), losses.end(), 0.0);
  }
  return sum / double(ranks.size());
}

TEST_CASE("Equal parts: the mean over the batch", "[task04.5]") {
  {
    HINT("one rank has the whole batch: a plain mean, made of samples that are added up");
    CHECK(averaged_loss({{1, 3, 5}}) == Approx(3));
  }
  HINT(
      "is it off by the number of ranks, or by that of a rank's samples? A rank adds up its "
      "samples, and averaging over the ranks divides once more");
  CHECK(averaged_loss({{1, 3}, {5, 7}}) == Approx(4));
}

TEST_CASE("Unequal parts: every sample counts the same", "[task04.5]") {
  HINT(
      "the average of the ranks' averages is another number: there a sample of a small part counts "
      "more than one of a large part");
  CHECK(averaged_loss({{1, 1, 1, 1, 1, 1, 1}, {9}}) == Approx(2));
  CHECK(averaged_loss({{1, 2}, {3}, {6}}) == Approx(3));
}

TEST_CASE("A rank without samples changes nothing", "[task04.5]") {
  HINT("the batch's samples are those of all ranks, and so is its mean");
  CHECK(averaged_loss({{2, 4}, {}}) == Approx(3));
}

}  // namespace
}  // namespace lockstep
