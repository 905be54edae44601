// Grades stage 04: all but the ring (04.1), which stage04_ring_test.cpp grades.

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "04-ddp/buckets.h"
#include "04-ddp/ddp.h"
#include "04-ddp/shard_loader.h"
#include "tests/coursework/hint.h"
#include "tests/coursework/other_rank.h"
#include "tests/support/nn_test_support.h"

namespace lockstep {
namespace {

using Values = std::vector<Real>;

// --- Buckets -------------------------------------------------------------------------------------

using Sizes = std::vector<int64_t>;

Sizes bytes_of(const std::vector<Bucket>& buckets) {
  Sizes bytes;
  for (const Bucket& bucket : buckets) bytes.push_back(bucket.bytes);
  return bytes;
}

/// The numbers in all buckets, in rising order.
std::vector<size_t> numbers_in(const std::vector<Bucket>& buckets) {
  std::vector<size_t> numbers;
  for (const Bucket& bucket : buckets) {
    numbers.insert(numbers.end(), bucket.parameters.begin(), bucket.parameters.end());
  }
  std::ranges::sort(numbers);
  return numbers;
}

TEST_CASE("A bucket is closed when it has reached its cap", "[task04.2]") {
  const std::vector<Bucket> buckets = make_buckets({4, 4, 4}, {.first_bytes = 6, .bytes = 6});
  {
    HINT(
        "every gradient is in one bucket, under its number in the list: what of those that are "
        "left when the list ends?");
    CHECK(numbers_in(buckets) == std::vector<size_t>{0, 1, 2});
  }
  {
    HINT("a bucket says how many bytes are in it");
    CHECK(bytes_of(buckets).front() != 0);
  }
  {
    HINT(
        "a bucket takes gradients until it has reached its cap: the one that reaches it is still "
        "in, and nothing after that");
    CHECK(bytes_of(buckets) == Sizes{8, 4});
  }
  {
    HINT("a bucket that has exactly its cap has reached it: nothing more comes in");
    CHECK(bytes_of(make_buckets({3, 3, 3}, {.first_bytes = 6, .bytes = 6})) == Sizes{6, 3});
  }
  {
    HINT("a new bucket begins with no bytes, and no bucket is opened before there is a gradient");
    CHECK(bytes_of(make_buckets({4, 4, 4, 4}, {.first_bytes = 8, .bytes = 8})) == Sizes{8, 8});
  }
  HINT("a gradient larger than the cap does not break a bucket up");
  CHECK(bytes_of(make_buckets({2, 100, 2}, {.first_bytes = 6, .bytes = 6})) == Sizes{102, 2});
}

TEST_CASE("The first bucket has a cap of its own", "[task04.2]") {
  HINT("only the first bucket is small, so that the first all-reduce starts early");
  CHECK(bytes_of(make_buckets({4, 4, 4, 4, 4}, {.first_bytes = 4, .bytes = 8})) == Sizes{4, 8, 8});
}

TEST_CASE("Gradients are in the order in which backward completes them", "[task04.2]") {
  const std::vector<Bucket> buckets = make_buckets({4, 4, 4, 4}, {.first_bytes = 8, .bytes = 8});
  HINT("every gradient is in one bucket");
  REQUIRE(bytes_of(buckets) == Sizes{8, 8});
  HINT("backward completes gradient 0 first: the first bucket must not wait for later ones");
  CHECK(buckets[0].parameters == std::vector<size_t>{0, 1});
  CHECK(buckets[1].parameters == std::vector<size_t>{2, 3});
}

TEST_CASE("Sizes of all kinds", "[task04.2]") {
  {
    HINT("a gradient of 0 bytes is one, too: what decides whether a bucket is left out?");
    CHECK(bytes_of(make_buckets({8, 0}, {.first_bytes = 8, .bytes = 8})) == Sizes{8, 0});
  }
  constexpr int64_t kGiB = int64_t{1} << 30;
  HINT("3 GiB in one bucket: of which type is the sum?");
  CHECK(bytes_of(make_buckets({kGiB, kGiB, kGiB}, {.first_bytes = 3 * kGiB, .bytes = 1})) ==
        Sizes{3 * kGiB});
}

TEST_CASE("No gradients, no buckets; a cap of 0, a bucket each", "[task04.2]") {
  HINT("a bucket is opened for a gradient, never beforehand");
  CHECK(make_buckets({}, {}).empty());
  HINT("with a cap of 0 every bucket is full as soon as it has one gradient");
  CHECK(bytes_of(make_buckets({8, 0, 16}, BucketCaps::equal(0))) == Sizes{8, 0, 16});
}

// --- Overlap -------------------------------------------------------------------------------------

using testing::Gate;
using testing::OtherRank;

/// Layers a and b of one number each, and c of three. Backward goes through them in `order` and has
/// the device write 2 into each gradient's first number, after the layer's gate.
class ThreeLayers final : public Module {
 public:
  ThreeLayers(std::string order, std::array<Gate, 3>& gates, std::atomic<int>& computed)
      : order_(std::move(order)), gates_(gates), computed_(computed) {
    for (const char* name : {"a", "b"}) add_parameter(name, ParameterKind::bias, {1}, 1);
    add_parameter("c", ParameterKind::bias, {3}, 1);
  }
  AnyTensor forward(const AnyTensor& x, Context&) override { return x; }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
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
  explicit BackwardPass(double bucket_mb, const std::string& order = "cba",
                        ReplicaOptions options = {})
      : made(std::make_unique<ThreeLayers>(order, gates, computed)),
        layers(*made),
        parameters(layers, device.stream),
        ddp(
            std::move(made), parameters, other,
            [](const std::string& mine) { return std::vector<std::string>(2, mine); },
            communication, with(options, bucket_mb)) {
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

  static ReplicaOptions with(ReplicaOptions options, double bucket_mb) {
    options.buckets = {bucket_mb};
    return options;
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
  BackwardPass pass(0);  // a bucket for each layer
  {
    HINT(
        "called after each layer: what does it wait for, which bucket does it look at, and does it "
        "change what backward still needs?");
    pass.run();
  }
  {
    HINT("after the first layer one bucket is complete: are the gradients of the others ready?");
    CHECK(pass.seen.front() != "c b a");
  }
  {
    HINT("each bucket is reduced once: with which one does the next call begin?");
    CHECK(std::ranges::count(pass.seen[1], 'c') <= 1);
  }
  {
    HINT(
        "a bucket was not complete yet, and is never looked at again: where does the next call go "
        "on?");
    CHECK(pass.seen != Seen(3, "c"));
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
    BackwardPass pass(3.0 * sizeof(Real) / (1 << 20), order);  // c alone, b and a together
    pass.run();
    CHECK(pass.seen == Seen{"c", "c", "c ba"});
  }
}

TEST_CASE("Buckets are reduced in the plan's order, whichever is complete first", "[task04.3]") {
  BackwardPass pass(0, "abc");
  pass.run();
  {
    HINT("three buckets are complete now, and this call has reduced one: are there more?");
    CHECK(pass.seen != Seen{"", "", "c"});
  }
  {
    HINT("three buckets are complete now: is the last one of them left out?");
    CHECK(pass.seen != Seen{"", "", "c b"});
  }
  HINT(
      "another rank may complete its gradients in another order: how do all ranks come to make the "
      "same calls?");
  CHECK(pass.seen == Seen{"", "", "c b a"});
}

TEST_CASE("What is left is reduced when backward has ended", "[task04.3]") {
  {
    BackwardPass pass(0, "ca", {.find_unused_parameters = true});
    pass.run();
    HINT("layer b was not used: the last call comes after backward, for it and what waited for it");
    CHECK(pass.seen == Seen{"c", "c"});
    CHECK(pass.reduced() == "c b a");
  }
  BackwardPass pass(0, "cba", {.no_overlap = true});
  pass.run();
  HINT("without overlap the only call comes after backward: is anything left out then?");
  CHECK(pass.reduced() == "c b a");
}

TEST_CASE("A reduction waits for the kernels that make its gradients", "[task04.3]") {
  for (const char* slow : {"a", "b", "c"}) {
    BackwardPass pass(0);
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

TEST_CASE("What is reduced after backward waits for the kernels, too", "[task04.3]") {
  BackwardPass without_overlap(0, "cba", {.no_overlap = true});
  without_overlap.run("c");
  HINT(
      "backward is enqueued, and not yet computed: does the last call wait for that, as all do? "
      "Before each of its buckets?");
  CHECK(without_overlap.other.done_after_a_while(0) <= 0);
  BackwardPass without_b(0, "ca", {.find_unused_parameters = true});
  without_b.run("a");
  CHECK(without_b.other.done_after_a_while(1) <= 1);
}

TEST_CASE("Backward does not wait for reductions", "[task04.3]") {
  std::atomic<int> computed = 0;
  BackwardPass pass(0);
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
  {
    Samples all;
    for (const Samples& mine : dealt(6, 2)) all.insert(all.end(), mine.begin(), mine.end());
    std::ranges::sort(all);
    {
      HINT("6 samples for 2 ranks, 3 for each: nothing is missing, and nothing to be added");
      CHECK(all.size() <= 6);
    }
    HINT("some sample comes twice: a position is one of the whole order, not of a rank's own part");
    CHECK(all == Samples{0, 1, 2, 3, 4, 5});
  }
  HINT(
      "a rank's samples do not lie side by side: blocks would make other batches than one process");
  CHECK(dealt(6, 2) == std::vector<Samples>{{0, 2, 4}, {1, 3, 5}});
  CHECK(dealt(6, 3) == std::vector<Samples>{{0, 3}, {1, 4}, {2, 5}});
}

TEST_CASE("All ranks get equally many samples", "[task04.4]") {
  HINT("7 samples for 3 ranks: does a rank look past the end of the order?");
  const std::vector<Samples> ranks = dealt(7, 3);
  {
    HINT("what lengthens the order goes to a rank by its position, not by the sample's number");
    CHECK(ranks[0].size() <= 3);
  }
  {
    HINT("samples 6 and more are lost: without drop_last the order is lengthened, not cut");
    CHECK(ranks[0].size() + ranks[1].size() + ranks[2].size() >= 7);
  }
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
  HINT("with drop_last the order is cut instead, at its end");
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
    const double loss = averaged_loss({{1, 3, 5}});
    {
      HINT("a whole number divided by a larger one is 0");
      CHECK(loss != 0);
    }
    CHECK(loss == Approx(3));
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
  HINT("4 samples on 3 ranks: is one whole number divided by another?");
  CHECK(averaged_loss({{1, 2}, {3}, {6}}) == Approx(3));
}

TEST_CASE("A rank without samples changes nothing", "[task04.5]") {
  HINT("the batch's samples are those of all ranks, and so is its mean");
  CHECK(averaged_loss({{2, 4}, {}}) == Approx(3));
}

}  // namespace
}  // namespace lockstep
