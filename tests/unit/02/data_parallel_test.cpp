// DataParallel: what goes to which device, that the result is that of one device, what is lost, and
// what a failure looks like.

#include "02-dataparallel/data_parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "common/core/cpu_stream.h"
#include "common/core/error.h"
#include "common/data/batch_parts.h"
#include "common/kernels/devices.h"
#include "common/nn/batch_norm.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/sgd.h"
#include "common/nn/state.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;
using testing::Clock;
using testing::cpus;
using testing::enqueue;
using testing::kDouble;
using testing::kTolerance;
using testing::Machine;
using testing::message_of;
using testing::random_values;
using testing::relative_error;
using testing::ScopedEnvironment;
using Values = std::vector<Real>;
using Names = std::vector<std::string>;
using MakeModule = std::function<std::unique_ptr<Module>()>;

constexpr int64_t kReal = sizeof(Real);
constexpr const char* kConvolution = "conv2d";  // what its forward is called in a trace
constexpr ReduceMode kManual = ReduceMode::manual, kLibrary = ReduceMode::library;

// --- A network on one device or on several -------------------------------------------------------

MakeModule model(ModelKind kind, bool dropout = false) {
  return [=] { return make_model({.kind = kind, .dropout = dropout}).network; };
}

/// Samples and labels on the host.
struct Batch {
  explicit Batch(int64_t count, uint32_t seed = 7, Shape image = {28, 28, 1}) {
    std::vector<int64_t> extents{count};
    extents.insert(extents.end(), image.extents().begin(), image.extents().end());
    shape = Shape(extents);
    samples = random_values(shape, seed);
    for (int64_t i = 0; i < count; ++i) labels.push_back(static_cast<int32_t>((i * 7 + seed) % 10));
  }
  /// Samples [first, first + count).
  Batch rows(int64_t first, int64_t count) const {
    Batch part = *this;
    const int64_t row = shape.row_elements();
    part.shape[0] = count;
    part.samples.assign(samples.begin() + first * row, samples.begin() + (first + count) * row);
    part.labels.assign(labels.begin() + first, labels.begin() + first + count);
    return part;
  }

  Shape shape;
  Values samples;
  std::vector<int32_t> labels;
};

/// A network with seed 1 and what it takes to train it: without a mode on the first device alone,
/// as stage 01 does, else wrapped, as stage 02 does.
class Network {
 public:
  Network(const MakeModule& make, const std::string& devices, std::optional<ReduceMode> mode = {},
          DeviceOptions options = {})
      : machine(devices, options),
        network(make()),
        parameters(*network, stream()),
        optimizer(parameters, {.momentum = Real(0.9)}),
        context(stream()),
        loss_(Tensor::empty(stream(), {1})) {
    initialize(parameters, Initializer::kaiming_uniform, 1);
    if (!mode) return;
    auto wrapped = std::make_unique<DataParallel>(std::move(network), parameters, make,
                                                  machine.streams, *machine.world, *mode);
    parallel = wrapped.get();
    network = std::move(wrapped);
  }

  Stream stream() const { return machine.streams[0]; }
  Tensor put(const Batch& batch) const {
    return Tensor::from_host(stream(), batch.shape, batch.samples);
  }
  void set(const StepState& state) const { context.state().copy_from_host({state}); }

  /// Gradients of `weight` times the sum of the samples' losses, added to those there are.
  void accumulate(const Batch& batch, Real weight) {
    const Tensor images = put(batch);
    const auto labels =
        LabelTensor::from_host(stream(), {static_cast<int64_t>(batch.labels.size())}, batch.labels);
    set({.step = steps_++, .learning_rate = Real(0.05), .loss_weight = weight});
    context.kernels().fill(stream(), 0, loss_);
    passes_begin_ = stream().record_time();
    const Tensor scores = network->forward(images, context);
    loss_function_->forward(scores, labels, loss_, context);
    const Tensor scores_gradient = loss_function_->backward(labels, context);
    network->backward(scores_gradient, context);
    passes_end_ = stream().record_time();
  }
  /// The gradients of the batch's mean loss.
  Values gradients(const Batch& batch) {
    optimizer.zero_gradients();
    accumulate(batch, Real(1) / Real(batch.shape[0]));
    return parameters.gradients().to_host();
  }
  /// An optimizer step; the mean loss.
  Real step(const Batch& batch) {
    optimizer.zero_gradients();
    accumulate(batch, Real(1) / Real(batch.shape[0]));
    optimizer.step(context.state(), loss_);
    return loss_.to_host()[0];
  }
  /// Everything that three steps over different batches, the last of them short, leave: losses,
  /// weights, momentum, running statistics.
  Values three_steps(int64_t batch_size) {
    Values all;
    all.push_back(step(Batch(batch_size, 7)));
    all.push_back(step(Batch(batch_size, 8)));
    all.push_back(step(Batch((batch_size + 2) / 3, 9)));
    for (const Tensor& part :
         {parameters.values(), optimizer.velocity(), parameters.buffer_values()}) {
      const Values values = part.to_host();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  /// Of the last step, from its first operation on.
  double passes_seconds() const { return passes_end_->seconds_since(*passes_begin_); }
  /// The scores of an evaluation.
  Values evaluate(const Batch& batch) {
    context.facts.training = false;
    const Tensor scores = network->forward(put(batch), context);
    context.facts.training = true;
    return scores.to_host();
  }

  Machine machine;
  std::unique_ptr<Module> network;
  FlatParameters parameters;
  Sgd optimizer;
  Context context;
  DataParallel* parallel = nullptr;  // the network, where it is wrapped

 private:
  std::unique_ptr<Loss> loss_function_ = make_nll_loss();
  Tensor loss_;
  int64_t steps_ = 0;
  std::optional<TimedEvent> passes_begin_, passes_end_;
};

// --- Who gets what -------------------------------------------------------------------------------

/// Passes everything on, and notes "device: rows from first" of what it sees.
class Probe final : public Module {
 public:
  explicit Probe(Names& seen) : seen_(seen) {}
  Tensor forward(const Tensor& x, Context& context) override { return note(x, context); }
  Tensor backward(const Tensor& dy, Context& context) override { return note(dy, context); }

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
    for (const ReduceMode mode : {kManual, kLibrary}) {
      Names seen;
      Network network([&] { return std::make_unique<Probe>(seen); }, cpus(count), mode);
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
}

TEST_CASE("A batch of no samples is refused", "[dataparallel][row35]") {
  for (const ReduceMode mode : {kManual, kLibrary}) {
    Network network(model(ModelKind::seed), cpus(2), mode);
    const Tensor none = Tensor::empty(network.stream(), {0, 28, 28, 1});
    const std::string text =
        message_of<BadInput>([&] { network.network->forward(none, network.context); });
    CHECK_THAT(text, ContainsSubstring("DataParallel"));
    CHECK_THAT(text, ContainsSubstring("batch of 0 samples"));
    CHECK(text.find('\n') == text.npos);
  }
}

// --- The same as one device ----------------------------------------------------------------------

TEST_CASE("Ragged parts on four devices give the gradients of one device",
          "[dataparallel][tsan][row32]") {
  for (const bool dropout : {false, true}) {
    Network single(model(ModelKind::seed, dropout), cpus(1));
    const Values expected = single.gradients(Batch(7));
    single.accumulate(Batch(5, 8), Real(0.2));  // added to what is there
    const Values sums = single.parameters.gradients().to_host();
    for (const ReduceMode mode : {kManual, kLibrary}) {
      INFO("dropout " << dropout << ", library " << (mode == kLibrary));
      Network network(model(ModelKind::seed, dropout), cpus(4), mode);
      CHECK(relative_error(network.gradients(Batch(7)), expected) <= kTolerance);
      network.accumulate(Batch(5, 8), Real(0.2));
      CHECK(relative_error(network.parameters.gradients().to_host(), sums) <= kTolerance);
      CHECK(relative_error(network.evaluate(Batch(7)), single.evaluate(Batch(7))) <= kTolerance);
    }
  }
}

TEST_CASE("Steps on several devices lead where those of one device lead", "[dataparallel]") {
  for (const int64_t batch_size : {12, 5}) {
    const Values expected = Network(model(ModelKind::seed, true), cpus(1)).three_steps(batch_size);
    for (const int devices : {2, 3, 8}) {
      for (const ReduceMode mode : {kManual, kLibrary}) {
        INFO("batch " << batch_size << ", " << devices << " devices, library "
                      << (mode == kLibrary));
        Network network(model(ModelKind::seed, true), cpus(devices), mode);
        CHECK(relative_error(network.three_steps(batch_size), expected) <= kTolerance);
      }
    }
  }
}

TEST_CASE("On one device DataParallel changes no bit", "[dataparallel][row33]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn}) {
    Network single(model(kind, true), cpus(1));
    const Values expected = single.three_steps(12);
    for (const ReduceMode mode : {kManual, kLibrary}) {
      Network network(model(kind, true), cpus(1), mode);
      CHECK((network.three_steps(12) == expected));
      CHECK((network.evaluate(Batch(12)) == single.evaluate(Batch(12))));
      CHECK(network.parallel->bytes_moved() == 0);
    }
  }
}

TEST_CASE("A single sample runs on device 0, as without DataParallel", "[dataparallel][row34]") {
  const Values expected = Network(model(ModelKind::seed), cpus(1)).three_steps(1);
  for (const ReduceMode mode : {kManual, kLibrary}) {
    Network network(model(ModelKind::seed), cpus(4), mode, {.trace = true});
    CHECK((network.three_steps(1) == expected));
    for (const Stream& stream : network.machine.streams) stream.synchronize();
    CHECK(network.machine.spans(0, kConvolution).size() == 6);  // three steps, two layers
    for (const size_t idle : {1, 2, 3}) {
      CHECK(network.machine.spans(idle, kConvolution).empty());
    }
  }
}

TEST_CASE("Both ways of reducing give the same bits on two devices", "[dataparallel]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn}) {
    Network manual(model(kind, true), cpus(2), kManual);
    Network library(model(kind, true), cpus(2), kLibrary);
    CHECK((manual.three_steps(7) == library.three_steps(7)));
  }
}

TEST_CASE("A device that is named twice serves two replicas", "[dataparallel][row40]") {
  for (const ReduceMode mode : {kManual, kLibrary}) {
    Network twice(model(ModelKind::seed, true), "cpu:0,cpu:0", mode, {.trace = true});
    Network different(model(ModelKind::seed, true), cpus(2), mode);
    CHECK((twice.three_steps(7) == different.three_steps(7)));
    for (const Stream& stream : twice.machine.streams) stream.synchronize();
    CHECK(twice.machine.spans(1, kConvolution).size() == 6);
  }
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
  for (const ReduceMode mode : {kManual, kLibrary}) {
    Network network(dropout, cpus(4), mode);
    CHECK((masks(network) == expected));
  }
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
  Network network(model(ModelKind::seed), cpus(4), kManual);
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
  for (const ReduceMode mode : {kManual, kLibrary}) {
    Network network(model(ModelKind::seed_bn), cpus(4), mode);
    CHECK((pass(network, {first, second}) == expected));
    const std::vector<StateTensor> state = state_dict(*network.network);
    const auto tracked = std::ranges::find(state, "bn1.num_batches_tracked", &StateTensor::name);
    REQUIRE(tracked != state.end());
    CHECK(tracked->integer == std::vector<int64_t>{2});
    // What the network does with them when it is evaluated is the same on every device.
    CHECK(relative_error(network.evaluate(first), chunk.evaluate(first)) <= kTolerance);
  }
}

/// Passes everything on and counts its forward passes, in steps of its own: 1 in the first replica
/// made, 101 in the next, and so on.
class Counter final : public Module {
 public:
  explicit Counter(int number)
      : step_(Real(1 + 100 * number)), count_(add_buffer("count", {1}, 0)) {}
  Tensor forward(const Tensor& x, Context& context) override {
    const Tensor step = context.empty({1});
    context.kernels().fill(context.stream(), step_, step);
    context.kernels().add(context.stream(), step, count_.value);
    return x;
  }
  Tensor backward(const Tensor& dy, Context&) override { return dy; }
  Real count() const { return count_.value.to_host()[0]; }

 private:
  Real step_;
  ModelBuffer& count_;
};

TEST_CASE("What a replica counts is lost, what device 0 counts is kept", "[dataparallel][row37]") {
  for (const ReduceMode mode : {kManual, kLibrary}) {
    std::vector<const Counter*> replicas;
    const MakeModule make = [&] {
      auto counter = std::make_unique<Counter>(static_cast<int>(replicas.size()));
      replicas.push_back(counter.get());
      return counter;
    };
    Network network(make, cpus(3), mode);
    for (int pass = 0; pass < 3; ++pass) {
      network.network->forward(network.put(Batch(6, 1, {4})), network.context);
    }
    REQUIRE(replicas.size() == 3);
    CHECK(replicas[0]->count() == 3);
    // Before the third pass they were overwritten with device 0's count, which was 2.
    CHECK(replicas[1]->count() == 2 + 101);
    CHECK(replicas[2]->count() == 2 + 201);
  }
}

// --- Order between the devices -------------------------------------------------------------------

/// Passes everything on, when all replicas have come to this point. Where they do not come at the
/// same time it goes on after a while: the trace tells.
class Meeting final : public Module {
 public:
  struct Place {
    std::atomic<int> forward{0}, backward{0};
    int replicas;
  };
  explicit Meeting(Place& place) : place_(place) {}
  Tensor forward(const Tensor& x, Context& context) override {
    meet(context.stream(), "meet forward", place_.forward);
    return x;
  }
  Tensor backward(const Tensor& dy, Context& context) override {
    meet(context.stream(), "meet backward", place_.backward);
    return dy;
  }

 private:
  void meet(Stream stream, const char* op, std::atomic<int>& arrived) const {
    enqueue(stream, op, [&arrived, all = place_.replicas] {
      const auto begin = Clock::now();
      arrived.fetch_add(1);
      while (arrived.load() < all && Clock::now() - begin < std::chrono::seconds(10)) {
        std::this_thread::sleep_for(milliseconds(1));
      }
      std::this_thread::sleep_for(milliseconds(2));  // seen by all before anyone goes
    });
  }
  Place& place_;
};

TEST_CASE("All devices are busy at the same time, forward and backward", "[dataparallel][tsan]") {
  for (const ReduceMode mode : {kManual, kLibrary}) {
    Meeting::Place place{.replicas = 3};
    Network network([&] { return std::make_unique<Meeting>(place); }, cpus(3), mode,
                    {.trace = true});
    const Tensor y = network.network->forward(network.put(Batch(6, 1, {4})), network.context);
    network.network->backward(y, network.context);
    for (const Stream& stream : network.machine.streams) stream.synchronize();
    for (const std::string op : {"meet forward", "meet backward"}) {
      INFO(op);
      int64_t last_begin = 0, first_end = std::numeric_limits<int64_t>::max();
      for (const size_t device : {0, 1, 2}) {
        const std::vector<Span> spans = network.machine.spans(device, op);
        REQUIRE(spans.size() == 1);
        last_begin = std::max(last_begin, spans[0].begin_ns);
        first_end = std::min(first_end, spans[0].end_ns);
      }
      CHECK(last_begin < first_end);
    }
  }
}

TEST_CASE("The result does not depend on which device is late", "[dataparallel][tsan]") {
  const std::vector<Batch> both{Batch(5, 1), Batch(5, 2)};
  for (const ReduceMode mode : {kManual, kLibrary}) {
    /// Scores and gradients of two passes, where one device (-1: none) sleeps before each half.
    const auto passes = [&](int late) {
      Network network(model(ModelKind::seed_bn, true), cpus(3), mode);
      const auto delay = [&] {
        if (late < 0) return;
        enqueue(network.machine.streams[late], "sleep",
                [] { std::this_thread::sleep_for(milliseconds(15)); });
      };
      const Tensor scores_gradient = network.put(Batch(5, 3, {10}));
      network.set({.loss_weight = 1});
      network.optimizer.zero_gradients();
      std::vector<Tensor> scores;
      for (const Batch& batch : both) {
        const Tensor images = network.put(batch);
        delay();
        scores.push_back(network.network->forward(images, network.context));
        delay();
        network.network->backward(scores_gradient, network.context);
      }
      Values all = network.parameters.gradients().to_host();
      for (const Tensor& y : scores) {
        const Values values = y.to_host();
        all.insert(all.end(), values.begin(), values.end());
      }
      return all;
    };
    const Values expected = passes(-1);
    for (const int late : {0, 1, 2}) {
      INFO("cpu:" << late << " is late, library " << (mode == kLibrary));
      CHECK((passes(late) == expected));
    }
    const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "200");
    CHECK((passes(-1) == expected));
  }
}

// --- Failures ------------------------------------------------------------------------------------

TEST_CASE("An error of one replica names it and its device, and the others finish",
          "[dataparallel][row39]") {
  const MakeModule norm = [] {
    auto network = std::make_unique<Sequential>();
    network->add("bn", std::make_unique<BatchNorm2d>(4));
    network->set_name("");
    return network;
  };
  for (const ReduceMode mode : {kManual, kLibrary}) {
    Network network(norm, cpus(4), mode);
    const Tensor x = network.put(Batch(5, 1, {1, 1, 4}));  // 2, 2, 1 samples of one value
    const std::string text =
        message_of<BadInput>([&] { network.network->forward(x, network.context); });
    CHECK_THAT(text, ContainsSubstring("replica 2 on cpu:2: bn: one value per channel"));
    CHECK(text.find('\n') == text.npos);
    for (const Stream& stream : network.machine.streams) CHECK_NOTHROW(stream.synchronize());
    // They can go on.
    const Batch good(8, 1, {1, 1, 4});
    CHECK(network.network->forward(network.put(good), network.context).to_host().size() == 32);
  }
}

TEST_CASE("An error keeps its kind when the replica is named", "[dataparallel][row39]") {
  const auto text_within = [](const auto& kind) {
    using Kind = std::decay_t<decltype(kind)>;
    return message_of<Kind>([&] { within("replica 1 on cpu:1", [&] { throw kind; }); });
  };
  CHECK(text_within(BadInput("a")) == "replica 1 on cpu:1: a");
  CHECK(text_within(EnvironmentError("a")) == "replica 1 on cpu:1: a");
  CHECK(text_within(NonFinite("a")) == "replica 1 on cpu:1: a");
  CHECK(text_within(DeviceError("a")) == "replica 1 on cpu:1: a");
  CHECK(text_within(PeerLost("a")) == "replica 1 on cpu:1: a");
}

/// Passes everything on; on cpu:2 a task fails on the way, long after the host has gone on.
class Faulty final : public Module {
 public:
  explicit Faulty(bool forward) : forward_(forward) {}
  Tensor forward(const Tensor& x, Context& context) override {
    if (forward_) fault(context.stream());
    return x;
  }
  Tensor backward(const Tensor& dy, Context& context) override {
    if (!forward_) fault(context.stream());
    return dy;
  }

 private:
  static void fault(Stream stream) {
    if (stream.device().id().index != 2) return;
    enqueue(stream, "fault", [] {
      std::this_thread::sleep_for(milliseconds(20));
      throw std::runtime_error("planted fault");
    });
  }
  bool forward_;
};

TEST_CASE("A failure on one device reaches device 0, and nobody hangs",
          "[dataparallel][tsan][row39]") {
  for (const ReduceMode mode : {kManual, kLibrary}) {
    for (const bool in_forward : {true, false}) {
      INFO("library " << (mode == kLibrary) << ", in forward " << in_forward);
      const auto begin = Clock::now();
      {
        Network network([&] { return std::make_unique<Faulty>(in_forward); }, cpus(4), mode);
        const std::string text = message_of<PeerLost>([&] {
          for (int step = 0; step < 2; ++step) {
            const Tensor x = network.put(Batch(8, 1, {4}));
            network.network->backward(network.network->forward(x, network.context),
                                      network.context);
          }
          network.stream().synchronize();
        });
        CHECK_THAT(text, ContainsSubstring("cpu:2"));
        CHECK_THAT(text, ContainsSubstring("planted fault"));
        CHECK(text.find('\n') == text.npos);
        CHECK_THROWS_WITH(network.machine.streams[2].synchronize(), "planted fault");
        for (const size_t other : {1, 3}) network.machine.streams[other].record();
      }  // all streams are drained here
      CHECK(Clock::now() - begin < std::chrono::seconds(20));
    }
  }
}

TEST_CASE("Parameters that lie on another device than the first are refused",
          "[dataparallel][row41]") {
  const Machine machine(cpus(2));
  std::unique_ptr<Module> network = model(ModelKind::seed)();
  const FlatParameters parameters(*network, machine.streams[1]);
  const std::string text = message_of<BadInput>([&] {
    DataParallel(std::move(network), parameters, model(ModelKind::seed), machine.streams,
                 *machine.world, kManual);
  });
  CHECK_THAT(text, ContainsSubstring("cpu:1"));
  CHECK_THAT(text, ContainsSubstring("cpu:0"));
  CHECK(text.find('\n') == text.npos);
}

TEST_CASE("The way of reducing is manual or library", "[dataparallel]") {
  CHECK(parse_reduce_mode("manual") == kManual);
  CHECK(parse_reduce_mode("library") == kLibrary);
  const std::string text = message_of<BadInput>([] { parse_reduce_mode("Manual"); });
  CHECK_THAT(text, ContainsSubstring("'Manual', expected manual or library"));
}

// --- What it costs -------------------------------------------------------------------------------

TEST_CASE("As many bytes move as the sizes say", "[dataparallel]") {
  // The seed network on 28x28 pixels and 10 classes: a sample goes out, its scores come back, their
  // gradients go out.
  constexpr int64_t kSample = (28 * 28 + 10 + 10) * kReal;
  struct Case {
    int64_t batch, used, away;  // devices that get samples, samples that are not device 0's
  };
  for (const auto& [batch_size, used, away] :
       {Case{8, 4, 6}, Case{7, 4, 5}, Case{6, 3, 4}, Case{2, 2, 1}, Case{1, 1, 0}}) {
    for (const ReduceMode mode : {kManual, kLibrary}) {
      INFO("batch " << batch_size << ", library " << (mode == kLibrary));
      Network network(model(ModelKind::seed_bn), cpus(4), mode);
      const FlatParameters& p = network.parameters;
      const int64_t model_bytes =
          kReal * (2 * p.values().elements() + p.buffer_values().elements());
      CHECK(model_bytes > kReal * 2 * 21'900);
      // Collectives are of all ranks, copies go to those in use.
      const int64_t copies = mode == kLibrary ? 3 : used - 1;
      const int64_t expected =
          copies * model_bytes + (used - 1) * int64_t{sizeof(StepState)} + away * kSample;
      CHECK(network.parallel->predicted_bytes(batch_size, kSample) == expected);
      network.step(Batch(batch_size));
      CHECK(network.parallel->bytes_moved() == expected);
      network.evaluate(Batch(batch_size));  // not training
      network.step(Batch(batch_size));
      CHECK(network.parallel->bytes_moved() == 2 * expected);
      CHECK(network.parallel->bytes_expected() == 2 * expected);
    }
  }
}

TEST_CASE("Every phase of the passes is timed, and nothing while evaluating", "[dataparallel]") {
  for (const ReduceMode mode : {kManual, kLibrary}) {
    Network network(model(ModelKind::seed), cpus(2), mode);
    const auto names = [&] {
      Names found;
      for (const auto& [phase, seconds] : network.parallel->phases().totals()) {
        CHECK(seconds > 0);
        found.push_back(phase);
      }
      return found;
    };
    network.evaluate(Batch(4));
    CHECK(names().empty());
    network.step(Batch(4));
    CHECK(names() ==
          Names{"scatter", "replicate", "forward", "gather", "loss", "backward", "reduce"});
    const auto totals = network.parallel->phases().totals();
    network.evaluate(Batch(4));
    CHECK(network.parallel->phases().totals() == totals);
  }
}

TEST_CASE("A long evaluation does not lose the times of the steps before it", "[dataparallel]") {
  Network network(model(ModelKind::seed), cpus(2), kManual);
  network.step(Batch(4));
  network.evaluate(Batch(4));
  for (int i = 0; i < 1100; ++i) network.machine.streams[0].record();
  for (const auto& phase : network.parallel->phases().totals()) CHECK(phase.second > 0);
}

TEST_CASE("The phases' times add up to the time of both passes", "[dataparallel]") {
  for (const ReduceMode mode : {kManual, kLibrary}) {
    double best = 0;  // a busy machine may take the device's thread away between two steps' marks
    for (int attempt = 0; attempt < 5 && best < 0.97; ++attempt) {
      Network network(model(ModelKind::seed), cpus(2), mode);
      network.step(Batch(64));
      double sum = 0;
      for (const auto& phase : network.parallel->phases().totals()) sum += phase.second;
      best = std::max(best, sum / network.passes_seconds());
      CHECK(best <= 1);
    }
    CHECK(best >= 0.97);
  }
}

TEST_CASE("Device 0 needs more memory than the others", "[dataparallel]") {
  for (const ReduceMode mode : {kManual, kLibrary}) {
    Network network(model(ModelKind::seed), cpus(3), mode);
    network.step(Batch(12));
    const auto peak = [&](size_t device) {
      return network.machine.devices[device]->memory().peak();
    };
    // The whole batch, all scores, the momentum, and the gradients that it receives.
    CHECK(double(peak(0)) > 1.1 * double(peak(1)));
    CHECK(peak(1) == peak(2));
    CHECK(peak(1) > 2 * 21'840 * kReal);  // weights and gradients
  }
}

}  // namespace
}  // namespace lockstep
