// DataParallel: who gets what, the same numbers as one device, what stays inside a replica.

#include "02-dataparallel/data_parallel.h"

#include <algorithm>
#include <set>

#include "common/core/error.h"
#include "common/data/batch_parts.h"
#include "common/kernels/devices.h"
#include "common/nn/layers.h"
#include "common/nn/models.h"
#include "common/nn/state_dict.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/unit/02/data_parallel_runs.h"

namespace lockstep {
namespace {

using namespace testing::data_parallel;
using Catch::Matchers::ContainsSubstring;
using testing::cpus;
using testing::kTolerance;
using testing::message_of;
using testing::relative_error;
using Values = std::vector<Real>;
using Names = std::vector<std::string>;
using MakeModule = std::function<std::unique_ptr<Module>()>;

// --- Who gets what -------------------------------------------------------------------------------

/// Passes everything on, and notes "device: rows from first" of what it sees.
class Probe final : public Module {
 public:
  explicit Probe(Names& seen) : seen_(seen) {}
  AnyTensor forward(const AnyTensor& x, Context& context) override { return note(x, context); }
  AnyTensor backward(const AnyTensor& dy, Context& context) override { return note(dy, context); }

 private:
  Tensor note(const Tensor& x, const Context& context) {
    REQUIRE(x.home().device().name() == context.stream().device().name());
    seen_.push_back(fmt::format("{}: {} from {}", context.stream().device().name(), x.shape()[0],
                                context.facts.first_sample));
    return x;
  }
  Names& seen_;
};

TEST_CASE("Devices get torch.chunk's parts of the batch, and some get none",
          "[dataparallel][row31]") {
  struct Case {
    int64_t batch;
    int devices;
    std::vector<int64_t> chunks;
  };
  for (const auto& [batch_size, count, chunks] :
       {Case{8, 4, {2, 2, 2, 2}}, Case{7, 4, {2, 2, 2, 1}}, Case{6, 4, {2, 2, 2}},
        Case{5, 4, {2, 2, 1}}, Case{9, 4, {3, 3, 3}}, Case{10, 4, {3, 3, 3, 1}},
        Case{17, 8, {3, 3, 3, 3, 3, 2}}, Case{3, 4, {1, 1, 1}}, Case{1, 4, {1}}}) {
    INFO("batch " << batch_size << " on " << count << " devices");
    Names expected;
    for (size_t device = 0; device < chunks.size(); ++device) {
      expected.push_back(
          fmt::format("cpu:{}: {} from {}", device, chunks[device], chunks[0] * int64_t(device)));
    }
    Names seen;
    Network network([&] { return std::make_unique<Probe>(seen); }, cpus(count), kWrapped);
    const Batch batch(batch_size, 3, {2, 1, 5});
    const Tensor y = network.network->forward(network.put(batch), network.context);
    CHECK(seen == expected);
    // Put together again on device 0, in order.
    CHECK(y.shape() == batch.shape);
    CHECK(y.home() == network.stream());
    CHECK(y.to_host() == batch.samples);
    seen.clear();
    network.network->backward(y, network.context);
    CHECK(seen == expected);
  }
}

TEST_CASE("A batch of no samples is refused", "[dataparallel][row35]") {
  Network network(model(ModelKind::seed), cpus(2), kWrapped);
  const Tensor none = Tensor::empty(network.stream(), {0, 28, 28, 1});
  const std::string text =
      message_of<BadInput>([&] { network.network->forward(none, network.context); });
  CHECK_THAT(text, ContainsSubstring("DataParallel"));
  CHECK_THAT(text, ContainsSubstring("batch of 0 samples"));
  CHECK(text.find('\n') == text.npos);
}

// --- The same as one device ----------------------------------------------------------------------

TEST_CASE("Ragged parts on four devices give the gradients of one device",
          "[dataparallel][tsan][row32]") {
  for (const bool dropout : {false, true}) {
    Network single(model(ModelKind::seed, dropout), cpus(1));
    const Values expected = single.gradients(Batch(7));
    single.accumulate(Batch(5, 8), Real(0.2));  // added to what is there
    const Values sums = single.parameters.gradients().to_host();
    INFO("dropout " << dropout);
    Network network(model(ModelKind::seed, dropout), cpus(4), kWrapped);
    CHECK(relative_error(network.gradients(Batch(7)), expected) <= kTolerance);
    network.accumulate(Batch(5, 8), Real(0.2));
    CHECK(relative_error(network.parameters.gradients().to_host(), sums) <= kTolerance);
    CHECK(relative_error(network.evaluate(Batch(7)), single.evaluate(Batch(7))) <= kTolerance);
  }
}

TEST_CASE("Steps on several devices lead where those of one device lead", "[dataparallel]") {
  for (const int64_t batch_size : {12, 5}) {
    const Values expected = Network(model(ModelKind::seed, true), cpus(1)).three_steps(batch_size);
    for (const int devices : {2, 3, 8}) {
      INFO("batch " << batch_size << ", " << devices << " devices");
      Network network(model(ModelKind::seed, true), cpus(devices), kWrapped);
      CHECK(relative_error(network.three_steps(batch_size), expected) <= kTolerance);
    }
  }
}

TEST_CASE("On one device DataParallel changes no bit", "[dataparallel][row33]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn}) {
    Network single(model(kind, true), cpus(1));
    const Values expected = single.three_steps(12);
    Network network(model(kind, true), cpus(1), kWrapped);
    CHECK((network.three_steps(12) == expected));
    CHECK((network.evaluate(Batch(12)) == single.evaluate(Batch(12))));
    CHECK(network.parallel->bytes_moved() == 0);
  }
}

TEST_CASE("A single sample runs on device 0, as without DataParallel", "[dataparallel][row34]") {
  const Values expected = Network(model(ModelKind::seed), cpus(1)).three_steps(1);
  Network network(model(ModelKind::seed), cpus(4), kWrapped, {.trace = true});
  CHECK((network.three_steps(1) == expected));
  for (const Stream& stream : network.machine.streams) stream.synchronize();
  CHECK(network.machine.spans(0, kConvolution).size() == 6);  // three steps, two layers
  for (const size_t idle : {1, 2, 3}) {
    CHECK(network.machine.spans(idle, kConvolution).empty());
  }
}

TEST_CASE("A device that is named twice serves two replicas", "[dataparallel][row40]") {
  Network twice(model(ModelKind::seed, true), "cpu:0,cpu:0", kWrapped, {.trace = true});
  Network different(model(ModelKind::seed, true), cpus(2), kWrapped);
  CHECK((twice.three_steps(7) == different.three_steps(7)));
  for (const Stream& stream : twice.machine.streams) stream.synchronize();
  CHECK(twice.machine.spans(1, kConvolution).size() == 6);
}

TEST_CASE("Dropout masks on several devices are those of the whole batch", "[dataparallel]") {
  const MakeModule dropout = [] {
    auto network = std::make_unique<Sequential>();
    network->add("drop", std::make_unique<Dropout>(Real(0.5), 1));
    network->set_name("");
    return network;
  };
  Batch ones(7, 1, {40});
  std::fill(ones.samples.begin(), ones.samples.end(), Real(1));
  const auto masks = [&](Network& network) {
    // A batch that is itself the second of three that were dealt out.
    network.set({.step = 3, .first_position = 1, .position_stride = 3});
    return network.network->forward(network.put(ones), network.context).to_host();
  };
  Network single(dropout, cpus(1));
  const Values expected = masks(single);
  CHECK(std::count(expected.begin(), expected.end(), Real(0)) > 100);
  Network network(dropout, cpus(4), kWrapped);
  CHECK((masks(network) == expected));
}

TEST_CASE("A rank with fewer samples than micro-batches makes as many passes as the others",
          "[dataparallel][ddp]") {
  for (const int64_t samples : {0, 1, 2, 7}) {
    const auto parts = BatchSplit{BatchSplit::Kind::micro, 3, true}.divide(samples);
    REQUIRE(parts.size() == 3);
    int64_t next = 0;
    for (const BatchPart& part : parts) {
      CHECK((part.count == 0 || part.first == next));
      next += part.count;
    }
    CHECK(next == samples);
  }
}

/// The samples that all ranks have in each of their micro-batches, without empty ones.
std::vector<std::set<int64_t>> micro_batches_of_ranks(int64_t samples, int64_t ranks,
                                                      int64_t parts) {
  std::vector<std::set<int64_t>> all(static_cast<size_t>(parts));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t mine = (samples - rank + ranks - 1) / ranks;
    const auto cut = BatchSplit{BatchSplit::Kind::micro, parts, true}.divide(mine);
    for (size_t m = 0; m < cut.size(); ++m) {
      for (int64_t i = 0; i < cut[m].count; ++i) all[m].insert((cut[m].first + i) * ranks + rank);
    }
  }
  std::erase(all, std::set<int64_t>());
  return all;
}

TEST_CASE("Micro-batches of ranks follow each other in the batch", "[dataparallel][ddp]") {
  for (const auto& [ranks, parts] : {std::pair<int64_t, int64_t>{1, 3}, {2, 2}, {2, 3}, {4, 3}}) {
    const BatchSplit split = BatchSplit::from(fmt::format("micro:{}x{}", parts, ranks));
    CHECK(BatchSplit::from(split.text()) == split);
    for (int64_t samples = 1; samples < 40; ++samples) {
      INFO(split.text() << " of " << samples);
      std::vector<std::set<int64_t>> found;
      for (const BatchPart& part : split.divide(samples)) {
        CHECK(part.stride == 1);
        found.emplace_back();
        for (int64_t i = 0; i < part.count; ++i) found.back().insert(part.first + i);
      }
      CHECK((found == micro_batches_of_ranks(samples, ranks, parts)));
    }
  }
  CHECK(BatchSplit::from("micro:3x1").text() == "micro:3");
  for (const char* text : {"micro:3x", "micro:x2", "micro:3x0", "micro:2x2x2", "stride:2x2"}) {
    CHECK_THROWS_AS(BatchSplit::from(text), BadInput);
  }
}

TEST_CASE("Means over ragged parts, averaged, are not the mean over the batch",
          "[dataparallel][row38]") {
  const Batch batch(7);
  const auto parts = BatchSplit{BatchSplit::Kind::chunk, 4}.divide(7);
  REQUIRE(parts.size() == 4);  // of 2, 2, 2, 1
  /// Gradients when each part's loss has a weight of its own, given its number of samples.
  const auto weighted = [&](const std::function<Real(int64_t)>& weight) {
    Network network(model(ModelKind::seed), cpus(1));
    network.optimizer.zero_gradients();
    for (const BatchPart& part : parts) {
      network.accumulate(batch.rows(part.first, part.count), weight(part.count));
    }
    return network.parameters.gradients().to_host();
  };
  Network network(model(ModelKind::seed), cpus(4), kWrapped);
  const Values gathered = network.gradients(batch);
  // The loss inside the replica, then the mean over replicas: every part counts the same.
  const Values averaged = weighted([](int64_t count) { return Real(1) / Real(4 * count); });
  CHECK(relative_error(averaged, gathered) > 0.05);
  // Weighted by their samples they are right again.
  const Values sums = weighted([](int64_t) { return Real(1) / 7; });
  CHECK(relative_error(sums, gathered) <= kTolerance);
}

// --- What a replica keeps to itself --------------------------------------------------------------

TEST_CASE("Running statistics are those of device 0's part", "[dataparallel][row36]") {
  const Batch first(12, 1), second(12, 2);
  const auto pass = [](Network& network, const std::vector<Batch>& batches) {
    for (const Batch& batch : batches) network.gradients(batch);  // no update: the same weights
    return network.parameters.buffer_values().to_host();
  };
  Network chunk(model(ModelKind::seed_bn), cpus(1)), whole(model(ModelKind::seed_bn), cpus(1));
  const Values expected = pass(chunk, {first.rows(0, 3), second.rows(0, 3)});
  CHECK(relative_error(pass(whole, {first, second}), expected) > 1e-3);
  Network network(model(ModelKind::seed_bn), cpus(4), kWrapped);
  CHECK((pass(network, {first, second}) == expected));
  const std::vector<StateTensor> state = state_dict(*network.network);
  const auto tracked = std::ranges::find(state, "bn1.num_batches_tracked", &StateTensor::name);
  REQUIRE(tracked != state.end());
  CHECK(tracked->integer == std::vector<int64_t>{2});
  // What the network does with them when it is evaluated is the same on every device.
  CHECK(relative_error(network.evaluate(first), chunk.evaluate(first)) <= kTolerance);
}

/// Passes everything on and counts its forward passes, in steps of its own: 1 in the first replica
/// made, 101 in the next, and so on.
class Counter final : public Module {
 public:
  explicit Counter(int number)
      : step_(Real(1 + 100 * number)), count_(add_buffer("count", {1}, 0)) {}
  AnyTensor forward(const AnyTensor& x, Context& context) override {
    const Tensor step = context.empty({1});
    context.kernels().fill(context.stream(), step_, step);
    context.kernels().add(context.stream(), step, count_.value);
    return x;
  }
  AnyTensor backward(const AnyTensor& dy, Context&) override { return dy; }
  Real count() const { return count_.value.to_host()[0]; }

 private:
  Real step_;
  ModelBuffer& count_;
};

TEST_CASE("What a replica counts is lost, what device 0 counts is kept", "[dataparallel][row37]") {
  std::vector<const Counter*> replicas;
  const MakeModule make = [&] {
    auto counter = std::make_unique<Counter>(static_cast<int>(replicas.size()));
    replicas.push_back(counter.get());
    return counter;
  };
  Network network(make, cpus(3), kWrapped);
  for (int pass = 0; pass < 3; ++pass) {
    network.network->forward(network.put(Batch(6, 1, {4})), network.context);
  }
  REQUIRE(replicas.size() == 3);
  CHECK(replicas[0]->count() == 3);
  // Before the third pass they were overwritten with device 0's count, which was 2.
  CHECK(replicas[1]->count() == 2 + 101);
  CHECK(replicas[2]->count() == 2 + 201);
}

}  // namespace
}  // namespace lockstep
