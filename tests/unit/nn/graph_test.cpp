// Captured work, on CPU devices: recorded instead of run, replayed in the order of the stream, and
// a training step that is the same either way.

#include <optional>

#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/data/synthetic.h"
#include "common/nn/state_dict.h"
#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/training.h"

namespace lockstep {
namespace {

using testing::TestDevice;
using testing::Training;
using testing::TrainingOptions;
using Values = std::vector<Real>;

TEST_CASE("What is captured runs when it is launched, each time with what memory then holds",
          "[graph]") {
  const TestDevice d;
  const Tensor x = d.filled({100}, 1), y = d.filled({100}, 0);
  Values out(100, 0);
  d.kernels().add(d.stream, x, y);
  d.stream.begin_capture();
  d.kernels().add(d.stream, x, y);
  d.kernels().scale(d.stream, 2, y);
  d.stream.copy(out.data(), y.data(), y.bytes());
  const std::unique_ptr<Graph> graph = d.stream.end_capture();
  CHECK(y.to_host() == Values(100, 1));
  CHECK(out == Values(100, 0));
  for (int i = 0; i < 3; ++i) d.stream.launch(*graph);
  d.stream.synchronize();
  CHECK(out == Values(100, 22));  // ((1 + 1) 2 + 1) 2 ...
  x.copy_from_host(Values(100, -22));
  d.stream.launch(*graph);
  CHECK(y.to_host() == Values(100, 0));
}

TEST_CASE("A graph goes only when what was launched has run", "[graph]") {
  const TestDevice d;
  const Tensor y = d.filled({1 << 20}, 1);
  d.stream.begin_capture();
  for (int i = 0; i < 20; ++i) d.kernels().scale(d.stream, 2, y);
  std::unique_ptr<Graph> graph = d.stream.end_capture();
  d.stream.launch(*graph);
  graph.reset();
  CHECK(y.to_host() == Values(1 << 20, 1 << 20));
}

TEST_CASE("Host memory is freed during a capture when what came before the capture has read it",
          "[graph]") {
  const TestDevice d;
  const Tensor y = d.filled({1 << 20}, 0);
  std::shared_ptr<void> memory = d.device->allocate_host(y.bytes());
  std::fill_n(static_cast<Real*>(memory.get()), 1 << 20, Real(3));
  for (int i = 0; i < 20; ++i) d.kernels().scale(d.stream, 2, y);
  d.stream.copy(y.data(), memory.get(), y.bytes());
  d.stream.begin_capture();
  memory.reset();  // an exception here ends the process
  d.stream.end_capture();
  CHECK(y.to_host() == Values(1 << 20, 3));
}

TEST_CASE("What is released during a capture stays with the graph that may use it", "[graph]") {
  const TestDevice d;
  const Tensor y = d.filled({1 << 20}, 0);
  std::optional<Tensor> x = d.filled({1 << 20}, 1);
  d.stream.begin_capture();
  d.kernels().add(d.stream, *x, y);
  x.reset();  // an exception here ends the process
  std::unique_ptr<Graph> graph = d.stream.end_capture();
  for (int i = 0; i < 2; ++i) d.stream.launch(*graph);
  graph.reset();
  CHECK(y.to_host() == Values(1 << 20, 2));
}

TEST_CASE("An error during a capture ends the capture, and the next step is captured", "[graph]") {
  const TestDevice d;
  const Tensor y = d.filled({100}, 1);
  Context context(d.stream);
  StepGraph graph(context, /*enabled=*/true, /*full_size=*/1);
  bool fails = false;
  int calls = 0;
  const auto work = [&] {
    ++calls;
    const Tensor x = Tensor::empty(d.stream, {100});  // released during the capture
    d.kernels().fill(d.stream, 1, x);
    if (fails) fail<BadInput>("it fails");
    d.kernels().add(d.stream, x, y);
  };
  graph.run(1, work);  // as it is
  fails = true;
  CHECK_THROWS_WITH(graph.run(1, work), "it fails");
  CHECK(y.to_host() == Values(100, 2));  // nothing was run
  fails = false;
  for (int i = 0; i < 3; ++i) graph.run(1, work);
  CHECK(y.to_host() == Values(100, 5));
  CHECK(calls == 3);
}

TEST_CASE("What cannot be part of a graph is refused by name, and the stream goes on", "[graph]") {
  const TestDevice d, other;
  const Tensor y = d.filled({100}, 1);
  CHECK_THROWS_AS(d.stream.end_capture(), BadInput);
  const Event elsewhere = other.stream.record();
  d.stream.begin_capture();
  CHECK_THROWS_AS(d.stream.begin_capture(), BadInput);
  CHECK_THROWS_WITH(d.stream.record(),
                    "cpu:0: 'record' on stream test cannot be part of a graph; do it before or "
                    "after");
  CHECK_THROWS_WITH(d.stream.wait(elsewhere),
                    "cpu:0: 'wait' on stream test cannot be part of a graph; do it before or "
                    "after");
  d.kernels().scale(d.stream, 2, y);
  const std::unique_ptr<Graph> graph = d.stream.end_capture();
  CHECK_THROWS_AS(other.stream.launch(*graph), BadInput);
  d.stream.launch(*graph);
  CHECK(y.to_host() == Values(100, 2));
}

TEST_CASE("A traced graph shows its operations with their layers, each time", "[graph]") {
  const auto device = cpu::open_cpu_device(0, {.trace = true});
  const Stream stream = device->create_stream("test");
  const Tensor y = Tensor::empty(stream, {100});
  stream.begin_capture();
  {
    const ScopedRange layer(stream, "conv1");
    stream.kernels().fill(stream, 1, y);
  }
  const std::unique_ptr<Graph> graph = stream.end_capture();
  for (int i = 0; i < 2; ++i) stream.launch(*graph);
  stream.synchronize();
  const std::vector<Span> spans = stream.backend().timeline();
  REQUIRE(spans.size() == 2);
  for (const Span& span : spans) {
    CHECK(std::string(span.op) == "fill");
    REQUIRE(span.scope != nullptr);
    CHECK(*span.scope == "conv1");
  }
}

// --- A training step -----------------------------------------------------------------------------

constexpr int64_t kEpochs = 2;

struct Trained {
  std::vector<double> losses;
  std::vector<StateTensor> state;
  std::vector<Values> optimizer;
  double flops;
  int64_t enqueued;
};

/// Three epochs of three full batches and one of 5 samples.
Trained train(TrainingOptions options, bool graph) {
  const TestDevice d;
  const Dataset set = make_synthetic(SyntheticPart::train, 3 * 8 + 5);
  options.batch_size = 8;
  options.graph = graph;
  Training training(d.stream, set, options);
  Trained outcome;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    const std::vector<double> losses = training.epoch(epoch);
    outcome.losses.insert(outcome.losses.end(), losses.begin(), losses.end());
  }
  outcome.state = state_dict(*training.model.network);
  for (const OptimizerState& state : training.optimizer.state()) {
    outcome.optimizer.push_back(state.ranges.at(0).to_host());
  }
  outcome.flops = training.context.flops();
  outcome.enqueued = training.enqueued();
  return outcome;
}

/// Names of the tensors that are not the same, bit by bit.
std::vector<std::string> changed(const std::vector<StateTensor>& found,
                                 const std::vector<StateTensor>& expected) {
  REQUIRE(found.size() == expected.size());
  std::vector<std::string> names;
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool same = found[i].name == expected[i].name && found[i].real == expected[i].real &&
                      found[i].integer == expected[i].integer;
    if (!same) names.push_back(expected[i].name);
  }
  return names;
}

TEST_CASE("A step that is replayed from a graph is bitwise the step that is enqueued",
          "[graph][row126]") {
  for (const ModelOptions& model : {ModelOptions{.kind = ModelKind::seed, .dropout = true},
                                    ModelOptions{.kind = ModelKind::seed_bn},
                                    ModelOptions{.kind = ModelKind::resnet18, .width = 2}}) {
    INFO("model " << static_cast<int>(model.kind));
    const bool adam = model.kind == ModelKind::seed;  // it counts its steps
    const TrainingOptions options{
        .model = model,
        .rule = adam ? OptimizerRule{.kind = OptimizerKind::adamw, .weight_decay = 0.1}
                     : OptimizerRule{.momentum = 0.9}};
    const Trained eager = train(options, false), graph = train(options, true);
    CHECK(eager.enqueued == kEpochs * 4);
    CHECK(graph.enqueued == 2 + kEpochs);  // as it is, captured, and the short batches
    CHECK(graph.losses == eager.losses);
    CHECK(graph.optimizer.size() == (adam ? 2 : 1));
    CHECK((graph.optimizer == eager.optimizer));
    CHECK(graph.flops == eager.flops);
    CHECK(changed(graph.state, eager.state) == std::vector<std::string>{});
  }
}

TEST_CASE("A step that is replayed leaves alone what others took from the pool since", "[graph]") {
  const TestDevice d;
  const Dataset set = make_synthetic(SyntheticPart::train, 3 * 8);
  Training training(d.stream, set, {.batch_size = 8, .graph = true});
  training.epoch();
  std::vector<Tensor> held;
  for (int i = 0; i < 20; ++i) {  // as large as the activations of conv1
    held.push_back(training.context.empty({8, 24, 24, 10}));
    d.kernels().fill(d.stream, Real(i), held.back());
  }
  training.epoch();
  for (int i = 0; i < 20; ++i) CHECK((held[i].to_host() == Values(8 * 24 * 24 * 10, Real(i))));
}

}  // namespace
}  // namespace lockstep
