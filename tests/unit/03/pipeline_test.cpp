// The layer split and its pipelines: where to cut, that the result is that of one device, what is
// kept in memory, and what a failure looks like.

#include "03-model-split/pipeline/pipeline.h"

#include <chrono>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "common/core/cpu_stream.h"
#include "common/core/error.h"
#include "common/kernels/devices.h"
#include "common/nn/batch_norm.h"
#include "common/nn/state.h"
#include "common/step/weights_file.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/safetensors_support.h"
#include "tests/support/tasks.h"
#include "tests/support/training.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using std::chrono::milliseconds;
using testing::Clock;
using testing::cpus;
using testing::enqueue;
using testing::kTolerance;
using testing::Machine;
using testing::message_of;
using testing::random_values;
using testing::relative_error;
using testing::ScopedEnvironment;
using Names = std::vector<std::string>;
using Values = std::vector<Real>;

constexpr ScheduleKind kNaive = ScheduleKind::naive, kGpipe = ScheduleKind::gpipe,
                       kOneF1b = ScheduleKind::one_f1b;

// --- Networks in pieces --------------------------------------------------------------------------

Layers layers_of(const ModelOptions& options) {
  return static_cast<Sequential&>(*make_model(options).network).release_layers();
}

/// A network for images of 16x16: a tenth of the work.
ModelOptions small(bool dropout = false, ModelKind kind = ModelKind::seed) {
  return {.kind = kind, .dropout = dropout, .height = 16, .width_pixels = 16};
}

Names names_of(const Layers& layers) {
  Names names;
  for (const auto& layer : layers) names.push_back(layer->name());
  return names;
}

/// About as many layers in each of `stages`.
Cuts even_cuts(size_t layers, size_t stages) {
  Cuts cuts;
  for (size_t s = 1; s < stages; ++s) cuts.push_back(s * layers / stages);
  return cuts;
}

/// A stage on each stream, with seed 1.
std::unique_ptr<StagedNetwork> split_of(Layers layers, const std::vector<Stream>& streams) {
  const Cuts cuts = even_cuts(layers.size(), streams.size());
  auto split = std::make_unique<StagedNetwork>(std::move(layers), cuts, streams);
  for (const StagedNetwork::Stage& stage : split->stages()) {
    initialize(*stage.parameters, Initializer::kaiming_uniform, 1);
  }
  return split;
}

/// The values, or gradients, of all parameters in order of registration.
template <class Member>
Values all_of(Module& network, Member which) {
  Values all;
  for (const Parameter* p : network.parameters()) {
    const Values values = (p->*which).to_host();
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

/// Running statistics, and how many batches they are of.
Values statistics_of(Module& network) {
  Values all;
  for (const StateTensor& tensor : state_dict(network)) {
    if (tensor.name.find("running") != std::string::npos) {
      all.insert(all.end(), tensor.real.begin(), tensor.real.end());
    }
    for (const int64_t number : tensor.integer) all.push_back(Real(number));
  }
  return all;
}

/// Passes everything on and acts on the way.
class Hook final : public Module {
 public:
  using Action = std::function<void(Stream)>;
  explicit Hook(Action forward, Action backward = {})
      : forward_(std::move(forward)), backward_(std::move(backward)) {}
  Tensor forward(const Tensor& x, Context& context) override {
    if (forward_) forward_(context.stream());
    return x;
  }
  Tensor backward(const Tensor& dy, Context& context) override {
    if (backward_) backward_(context.stream());
    return dy;
  }

 private:
  Action forward_, backward_;
};

Hook::Action sleep(int ms) {
  return [ms](Stream stream) {
    enqueue(stream, "sleep", [ms] { std::this_thread::sleep_for(milliseconds(ms)); });
  };
}

/// Puts a hook before layer `place`.
void insert(Layers& layers, size_t place, Hook::Action forward, Hook::Action backward) {
  auto hook = std::make_unique<Hook>(std::move(forward), std::move(backward));
  hook->set_name("hook");
  layers.insert(layers.begin() + static_cast<std::ptrdiff_t>(place), std::move(hook));
}

// --- Training ------------------------------------------------------------------------------------

constexpr int64_t kBatch = 12;

/// Three batches of noise.
const Dataset& images() {
  static const Dataset set = [] {
    Dataset noise;
    noise.height = noise.width = 16;
    noise.channels = 1;
    noise.classes = 10;
    noise.mean = noise.stddev = 0.5;
    std::mt19937 random(1);
    for (int i = 0; i < 3 * kBatch; ++i) noise.labels.push_back(random() % 10);
    for (int i = 0; i < 3 * kBatch * 16 * 16; ++i) noise.images.push_back(random() % 256);
    return noise;
  }();
  return set;
}

/// A loss that is infinite in step 1, while its gradient is what it should be.
class Infinite final : public Loss {
 public:
  explicit Infinite(const int64_t& steps) : steps_(steps) {}
  void forward(const Tensor& scores, const LabelTensor& labels, const Tensor& loss,
               Context& context) override {
    inner_->forward(scores, labels, loss, context);
    if (steps_ != 2) return;
    context.kernels().fill(context.stream(), std::numeric_limits<Real>::infinity(), loss);
  }
  Tensor backward(const LabelTensor& labels, Context& context) override {
    return inner_->backward(labels, context);
  }

 private:
  const int64_t& steps_;  // begun
  std::unique_ptr<Loss> inner_ = make_nll_loss();
};

/// What three steps leave.
struct Outcome {
  Values losses, weights, gradients, statistics;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

double error(const Outcome& found, const Outcome& expected) {
  return std::max({relative_error(found.losses, expected.losses),
                   relative_error(found.weights, expected.weights),
                   relative_error(found.gradients, expected.gradients)});
}

Outcome outcome(Module& network, Values losses) {
  return {std::move(losses), all_of(network, &Parameter::value), all_of(network, &Parameter::grad),
          statistics_of(network)};
}

/// Stage 01.
Outcome single_device(const ModelOptions& model, const SgdRule& rule) {
  const Machine machine(cpus(1));
  testing::Training training(machine.streams[0], images(),
                             {.model = model, .rule = rule, .batch_size = kBatch});
  const std::vector<double> losses = training.epoch();
  return outcome(*training.model.network, Values(losses.begin(), losses.end()));
}

struct Setup {
  int stages = 3;
  PipelineOptions pipeline{};
  ModelOptions model = small();
  SgdRule rule{};
  std::vector<int64_t> sizes{};           // of the micro-batches; empty: the pipeline's own
  std::function<void(Layers&)> change{};  // of the layers, before they are cut
  bool infinite_loss = false;
};

/// A pipeline with seed 1 and its batches. The loader goes last: where a step ends in an exception,
/// copies from its memory are still queued.
struct Run {
  explicit Run(const Setup& options) : setup(options), machine(cpus(options.stages)) {
    Layers layers = layers_of(setup.model);
    if (setup.change) setup.change(layers);
    auto pieces = split_of(std::move(layers), machine.streams);
    split = pieces.get();
    loss = make_model(setup.model).loss;
    if (setup.infinite_loss) loss = std::make_unique<Infinite>(steps);
    pipeline =
        std::make_unique<Pipeline>(std::move(pieces), *loss, images(), setup.rule, setup.pipeline);
  }

  /// Enqueues a step over the next batch, without waiting for anything.
  void step() {
    std::optional<HostBatch> batch;
    if (steps > 0) batch = loader.next();
    if (!batch) loader.begin_epoch(0);
    if (!batch) batch = loader.next();
    const StepState state{
        .step = steps++, .learning_rate = Real(0.01), .loss_weight = Real(1) / Real(kBatch)};
    std::vector<BatchPart> parts;
    for (int64_t first = 0; const int64_t size : setup.sizes) {
      parts.push_back({first, 1, size});
      first += size;
    }
    if (parts.empty()) {
      pipeline->feed(*batch, state);
    } else {
      pipeline->feed(*batch, parts, state);
    }
    pipeline->zero_gradients();
    pipeline->run_schedule();
    losses.push_back(
        Tensor::empty(pipeline->loss().home(), {1}));  // the next step's takes its place
    losses.back().home().copy(losses.back().data(), pipeline->loss().data(), sizeof(Real));
  }
  Outcome three_steps() {
    for (int i = 0; i < 3; ++i) step();
    Values values;
    for (const Tensor& mean : losses) values.push_back(mean.to_host()[0]);
    return outcome(*split, values);
  }
  /// Most bytes ever in use on each device, workspaces of the layers included.
  std::vector<int64_t> peaks() const {
    for (const Stream& stream : machine.streams) stream.synchronize();
    std::vector<int64_t> all;
    for (const auto& device : machine.devices) all.push_back(device->memory().peak());
    return all;
  }

  Setup setup;
  DataLoader loader{images(), {.batch_size = kBatch}};
  Machine machine;
  std::unique_ptr<Loss> loss;
  StagedNetwork* split;
  std::unique_ptr<Pipeline> pipeline;
  std::vector<Tensor> losses;
  int64_t steps = 0;
};

Outcome three_steps(const Setup& setup) { return Run(setup).three_steps(); }

// --- Where to cut --------------------------------------------------------------------------------

TEST_CASE("A Sequential gives its layers away under their full names", "[pipeline]") {
  CHECK(names_of(layers_of({})) ==
        Names{"conv1", "pool1", "conv2", "pool2", "flatten", "fc1", "fc2", "log_softmax"});
  const ModelOptions resnet{.kind = ModelKind::resnet18, .width = 2};
  const Layers layers = layers_of(resnet);
  CHECK(names_of(layers) == Names{"stem_conv", "stem_bn", "block1.0", "block1.1", "block2.0",
                                  "block2.1", "block3.0", "block3.1", "block4.0", "block4.1", "gap",
                                  "flatten", "fc"});
  Names expected, found;
  const Model whole = make_model(resnet);
  for (const Parameter* p : whole.network->parameters()) expected.push_back(p->name);
  for (const auto& layer : layers) {
    for (const Parameter* p : layer->parameters()) found.push_back(p->name);
  }
  CHECK(found == expected);
}

TEST_CASE("No other cuts make the costliest stage cheaper", "[pipeline]") {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<double> costs(1 + random() % 8);
    for (double& cost : costs) cost = double(random() % 12);  // zeros among them
    const auto costliest = [&](const Cuts& cuts) {
      double most = 0, sum = 0;
      for (size_t layer = 0; layer < costs.size(); ++layer) {
        if (std::find(cuts.begin(), cuts.end(), layer) != cuts.end()) sum = 0;
        most = std::max(most, sum += costs[layer]);
      }
      return most;
    };
    std::vector<double> best(costs.size(), std::numeric_limits<double>::infinity());
    for (unsigned mask = 0; mask < 1u << (costs.size() - 1); ++mask) {
      Cuts cuts;
      for (size_t layer = 1; layer < costs.size(); ++layer) {
        if (mask >> (layer - 1) & 1) cuts.push_back(layer);
      }
      best[cuts.size()] = std::min(best[cuts.size()], costliest(cuts));
    }
    for (size_t stages = 1; stages <= costs.size(); ++stages) {
      const Cuts cuts = balanced_cuts(costs, static_cast<int>(stages));
      REQUIRE(cuts.size() == stages - 1);
      REQUIRE(std::set<size_t>(cuts.begin(), cuts.end()).size() == cuts.size());
      REQUIRE(std::is_sorted(cuts.begin(), cuts.end()));
      REQUIRE((cuts.empty() || (cuts.front() > 0 && cuts.back() < costs.size())));
      REQUIRE(costliest(cuts) == best[stages - 1]);
    }
  }
  const std::vector<double> two_layers{1, 2};
  for (const int stages : {0, 3}) {
    CHECK_THAT(message_of<BadInput>([&] { balanced_cuts(two_layers, stages); }),
               ContainsSubstring(fmt::format("{} stages of 2 layers, expected 1 to 2", stages)));
  }
}

TEST_CASE("--split is a list of layers, or what is to be balanced", "[pipeline][row48]") {
  const Machine machine(cpus(1));
  const Layers layers = layers_of({});
  const auto choose = [&](const std::string& text, int stages) {
    return choose_cuts(text, layers, stages, {4, 28, 28, 1}, machine.streams[0]);
  };
  CHECK(choose("3,6", 3) == Cuts{3, 6});
  CHECK(choose("1,2,3,4,5,6,7", 8) == Cuts{1, 2, 3, 4, 5, 6, 7});
  CHECK(choose("auto", 2) == Cuts{2});        // conv2 does most of the work
  CHECK(choose("parameters", 2) == Cuts{5});  // fc1 has most of the weights
  CHECK(choose("measured", 2).size() == 1);
  for (const char* text : {"auto", "parameters", "measured"}) {
    CHECK(choose(text, 1).empty());
    CHECK(choose(text, 8) == Cuts{1, 2, 3, 4, 5, 6, 7});
    CHECK_THAT(message_of<BadInput>([&] { choose(text, 9); }),
               ContainsSubstring("9 stages of 8 layers"));
  }
  const auto refused = [&](const std::string& text, int stages, const std::string& why) {
    INFO("--split '" << text << "'");
    const std::string found = message_of<BadInput>([&] { choose(text, stages); });
    CHECK_THAT(found, StartsWith("--split: "));
    CHECK_THAT(found, ContainsSubstring(why));
    CHECK(found.find('\n') == found.npos);
  };
  for (const char* text : {"", "3,,6", ",3", "3,", "x", "3x,6", "-3,6", "3 ,6", "Auto", "1e1"}) {
    refused(text, 3, fmt::format("'{}', expected auto, measured, parameters, or", text));
  }
  refused("3", 3, "3 makes 2 stages, --devices names 3");
  refused("3,6", 2, "3,6 makes 3 stages, --devices names 2");
  refused("0", 2, "cut 0 leaves a stage without layers; expected rising numbers from 1 to 7");
  refused("8", 2, "cut 8");
  refused("9", 2, "cut 9");
  refused("3,3", 3, "cut 3");
  refused("6,3", 3, "cut 3");
}

TEST_CASE("Layers are measured without leaving a trace", "[pipeline]") {
  const testing::TestDevice d;
  const Layers layers = layers_of({.kind = ModelKind::seed_bn, .dropout = true});
  probe_layers(layers, {4, 28, 28, 1}, d.stream);  // the device's workspaces stay
  const int64_t before = d.device->memory().current();
  const auto costs = probe_layers(layers, {4, 28, 28, 1}, d.stream);
  CHECK(d.device->memory().current() == before);
  REQUIRE(costs.size() == layers.size());
  for (size_t i = 0; i < costs.size(); ++i) {
    const std::string& name = costs[i].name;
    INFO(name);
    CHECK(name == layers[i]->name());
    const bool products = name.starts_with("conv") || name.starts_with("fc");
    CHECK((costs[i].flops > 0) == products);
    CHECK((costs[i].parameter_bytes > 0) == (products || name.starts_with("bn")));
    CHECK(costs[i].seconds > 0);
    for (const Parameter* p : layers[i]->parameters()) {
      CHECK_FALSE((p->value.defined() || p->grad.defined()));
    }
    for (const ModelBuffer* b : layers[i]->buffers()) CHECK_FALSE(b->value.defined());
    if (const auto* norm = dynamic_cast<const BatchNorm2d*>(layers[i].get())) {
      CHECK(norm->batches_tracked() == 0);
    }
    // 8 x 8 pixels of 20 channels, each 5 x 5 x 10 products and sums: forward, and twice backward.
    if (name == "conv2") CHECK(costs[i].flops == 3.0 * 4 * 8 * 8 * 20 * 250 * 2);
  }
}

// --- The naive split -----------------------------------------------------------------------------

/// What two passes of training, without waiting between them, and one of evaluation make.
struct Passes {
  Values scores, gradients, statistics, evaluation;
  double flops;
};

Passes passes(Module& network, Stream stream) {
  Context context(stream);
  const auto put = [&](const Shape& shape, uint32_t seed) {
    return Tensor::from_host(stream, shape, random_values(shape, seed));
  };
  const Tensor first = put({5, 16, 16, 1}, 1), second = put({3, 16, 16, 1}, 2);
  const Tensor scores_gradient = put({5, 10}, 3);
  const StepState states[] = {{.step = 3}, {.step = 4}};
  stream.copy(context.state().data(), &states[0], sizeof(StepState));
  const Tensor scores = network.forward(first, context);
  CHECK(scores.home() == stream);
  network.backward(scores_gradient, context);
  stream.copy(context.state().data(), &states[1], sizeof(StepState));
  network.forward(second, context);
  network.backward(scores_gradient.rows(0, 3), context);  // adds
  const double flops = context.flops();
  context.facts.training = false;
  const Tensor evaluation = network.forward(second, context);
  const Values values = evaluation.to_host();
  return {scores.to_host(), all_of(network, &Parameter::grad), statistics_of(network), values,
          flops};
}

TEST_CASE("A split network computes what it does in one piece, to the bit",
          "[pipeline][tsan][row42]") {
  const ModelOptions model = small(true, ModelKind::seed_bn);
  const Machine one(cpus(1));
  const Model whole = make_model(model);
  const FlatParameters parameters(*whole.network, one.streams[0]);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  const Passes expected = passes(*whole.network, one.streams[0]);
  const auto check = [&](const std::vector<Stream>& streams) {
    INFO(streams.size() << " stages");
    const Passes found = passes(*split_of(layers_of(model), streams), streams[0]);
    CHECK((found.scores == expected.scores));
    CHECK((found.gradients == expected.gradients));
    CHECK((found.statistics == expected.statistics));
    CHECK((found.evaluation == expected.evaluation));
    CHECK(found.flops == expected.flops);
  };
  for (const int stages : {1, 2, 3, 4, static_cast<int>(layers_of(model).size())}) {
    check(Machine(cpus(stages)).streams);
  }
  check(Machine("cpu:0,cpu:0,cpu:0").streams);  // the same device, opened three times
  check({one.streams[0], one.devices[0]->create_stream("2"), one.devices[0]->create_stream("3")});
}

TEST_CASE("A split network may go while a stage still reads what another made",
          "[pipeline][tsan]") {
  const Machine machine(cpus(3));
  Context context(machine.streams[0]);
  const Tensor x = Tensor::from_host(context.stream(), {2, 16, 16, 1}, Values(512, 1));
  const Tensor scores_gradient = Tensor::from_host(context.stream(), {2, 10}, Values(20, 1));
  std::unique_ptr<StagedNetwork> split = split_of(layers_of(small()), machine.streams);
  split->forward(x, context);
  sleep(10)(context.stream());
  split->backward(scores_gradient, context);
  split.reset();
  for (const Stream& stream : machine.streams) CHECK_NOTHROW(stream.synchronize());
}

TEST_CASE("A split network's state is that of the whole one", "[pipeline]") {
  const ModelOptions model = small(false, ModelKind::seed_bn);
  const Machine machine(cpus(3));
  const Model whole = make_model(model);
  const FlatParameters parameters(*whole.network, machine.streams[0]);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  const std::unique_ptr<StagedNetwork> split = split_of(layers_of(model), machine.streams);
  passes(*split, machine.streams[0]);  // moves the running statistics
  for (const Parameter* p : whole.network->parameters()) {
    p->value.copy_from_host(Values(static_cast<size_t>(p->shape.elements()), 0));
  }
  const testing::io::ScratchDirectory directory;
  const std::string path = directory / "weights.safetensors";
  const auto same = [&] {
    const auto expected = state_dict(*whole.network), found = state_dict(*split);
    return std::ranges::equal(found, expected, [](const StateTensor& a, const StateTensor& b) {
      return a.name == b.name && a.shape == b.shape && a.real == b.real && a.integer == b.integer;
    });
  };
  CHECK_FALSE(same());
  save_weights(path, *split);
  load_weights(path, *whole.network);
  CHECK(same());
  initialize(parameters, Initializer::normal, 2);
  CHECK_FALSE(same());
  save_weights(path, *whole.network);
  load_weights(path, *split);
  CHECK(same());
}

TEST_CASE("A split by hand that cannot be is refused", "[pipeline][row48]") {
  const Machine machine(cpus(3));
  for (const Cuts& cuts : {Cuts{3}, Cuts{3, 3}, Cuts{0, 3}, Cuts{6, 3}, Cuts{3, 8}, Cuts{3, 9}}) {
    const std::string text =
        message_of<BadInput>([&] { StagedNetwork(layers_of({}), cuts, machine.streams); });
    CHECK_THAT(text, StartsWith("StagedNetwork: stage"));
    CHECK(text.find('\n') == text.npos);
  }
}

// --- From stage to stage -------------------------------------------------------------------------

TEST_CASE("A channel keeps the order, and nothing is overwritten before it was read",
          "[pipeline][tsan]") {
  const Machine machine(cpus(2));
  const Stream from = machine.streams[0], to = machine.streams[1];
  const std::vector<int64_t> rows{1, 2, 2, 5, 3, 1, 7, 4};  // ragged and growing
  for (const bool slow_sender : {false, true}) {
    std::vector<Tensor> read;
    const Tensor source = Tensor::empty(from, {7, 100});
    Channel channel(from, to, 2);
    const auto receive = [&] {
      const Tensor x = channel.receive();
      if (!slow_sender) sleep(3)(to);
      read.push_back(Tensor::empty(to, x.shape()));
      to.copy(read.back().data(), x.data(), x.bytes());
      channel.release();
    };
    CHECK_FALSE(channel.can_receive());
    for (size_t i = 0; i < rows.size(); ++i) {
      CHECK(channel.can_send() == (i < 2));
      if (!channel.can_send()) receive();
      if (slow_sender) sleep(3)(from);
      from.kernels().fill(from, Real(i), source);
      channel.send(source.rows(0, rows[i]));
      CHECK(channel.can_receive());
    }
    receive();
    receive();
    CHECK_FALSE(channel.can_receive());
    for (size_t i = 0; i < rows.size(); ++i) {
      CHECK(read[i].shape() == Shape{rows[i], 100});
      CHECK((read[i].to_host() == Values(static_cast<size_t>(rows[i] * 100), Real(i))));
    }
  }
}

TEST_CASE("A channel refuses another shape, and goes while copies are under way",
          "[pipeline][tsan][row49]") {
  const Machine machine(cpus(2));
  const Stream from = machine.streams[0], to = machine.streams[1];
  for (const size_t places : {1, 2}) {
    INFO(places << " places");
    Channel channel(from, to, places);
    const Tensor x = Tensor::from_host(from, {2, 4}, Values(8, 1));
    const Tensor other = Tensor::from_host(from, {3, 5}, Values(15, 2));
    sleep(5)(from);
    channel.send(x);
    if (places == 1) {
      channel.receive();
      channel.release();
    }
    const std::string text = message_of<BadInput>([&] { channel.send(other); });
    for (const char* part : {"cpu:0", "cpu:1", "[3, 5]", "[3, 4]"}) {
      CHECK_THAT(text, ContainsSubstring(part));
    }
    CHECK(text.find('\n') == text.npos);
  }
  for (const Stream& stream : machine.streams) CHECK_NOTHROW(stream.synchronize());
}

// --- The same as one device ----------------------------------------------------------------------

TEST_CASE("Every pipeline trains as one device does", "[pipeline][row42][row45][row46]") {
  const ModelOptions model = small(true);
  const SgdRule rule{.momentum = Real(0.9)};
  const Outcome single = single_device(model, rule);
  for (const int micro_batches : {1, 2, 4, 8}) {
    std::optional<Outcome> first;
    for (const ScheduleKind kind : {kGpipe, kOneF1b, kNaive}) {
      if (kind == kNaive && micro_batches > 1) continue;
      for (const int stages : {1, 2, 3, 4}) {
        INFO(name_of(kind) << ", " << stages << " stages, " << micro_batches << " micro-batches");
        Run run({stages, {kind, micro_batches}, model, rule});
        const Outcome found = run.three_steps();
        CHECK(error(found, single) <= kTolerance);
        if (micro_batches == 1) CHECK((found == single));
        if (!first) first = found;
        CHECK((found == *first));  // micro-batches come in one order in every stage
        for (int s = 0; s < stages; ++s) {
          CHECK(run.pipeline->live()[s] == predicted_live(kind, stages, micro_batches, s));
        }
      }
    }
  }
}

TEST_CASE("Micro-batches of any sizes count as many samples as they have", "[pipeline][row43]") {
  const Outcome single = single_device(small(), {});
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5, 5, 2}, {2, 5, 5}, {1, 1, 10}}) {
    for (const ScheduleKind kind : {kGpipe, kOneF1b}) {
      Run run({.stages = 3, .pipeline = {kind, 3}, .sizes = sizes});
      CHECK(error(run.three_steps(), single) <= kTolerance);
    }
  }
}

TEST_CASE("Batches that cannot be cut so are refused", "[pipeline][row43]") {
  Run many({.pipeline = {kOneF1b, 13}});
  const std::string text = message_of<BadInput>([&] { many.step(); });
  CHECK_THAT(text, ContainsSubstring("--micro-batches: 13 of a batch of 12 samples"));
  CHECK(text.find('\n') == text.npos);
  Run wrong({.pipeline = {kOneF1b, 3}, .sizes = {6, 6}});
  CHECK_THAT(message_of<BadInput>([&] { wrong.step(); }),
             ContainsSubstring("parts of the batch: found 2, expected 3"));
  const Setup naive{.pipeline = {kNaive, 2}};
  CHECK_THAT(message_of<BadInput>([&] { Run{naive}; }), ContainsSubstring("naive"));
}

TEST_CASE("Batch normalisation sees micro-batches", "[pipeline][row47]") {
  const ModelOptions model = small(false, ModelKind::seed_bn);
  const Outcome expected = three_steps({1, {kGpipe, 4}, model});
  CHECK(error(expected, single_device(model, {})) > 1e-3);
  CHECK(expected.statistics.back() == 3 * 4);  // batches tracked
  for (const ScheduleKind kind : {kGpipe, kOneF1b}) {
    CHECK((three_steps({3, {kind, 4}, model}) == expected));
  }
  CHECK((three_steps({2, {kNaive, 1}, model}) == single_device(model, {})));
}

TEST_CASE("Recomputing changes no bit and saves memory", "[pipeline][row51]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn}) {
    const ModelOptions model = small(true, kind);
    Run keeping({3, {kGpipe, 4, false}, model});
    const Outcome expected = keeping.three_steps();
    for (const ScheduleKind schedule : {kGpipe, kOneF1b}) {
      Run run({3, {schedule, 4, true}, model});
      CHECK((run.three_steps() == expected));  // running statistics move once
      CHECK(run.peaks()[0] < keeping.peaks()[0]);
    }
  }
}

TEST_CASE("A batch is kept until the last stage has read its labels, and no longer",
          "[pipeline][tsan]") {
  for (const int stages : {1, 3}) {
    INFO(stages << " stages");
    testing::Gate gate;
    const auto wait = [&](Stream stream) { enqueue(stream, [&] { gate.pass(); }); };
    Run run({.stages = stages, .pipeline = {kOneF1b, 2}, .change = [&](Layers& layers) {
               insert(layers, layers.size(), wait, {});  // labels come behind the last layer
             }});
    std::vector<std::weak_ptr<BatchBuffer>> batches;
    run.loader.begin_epoch(0);
    const auto step = [&] {
      const std::optional<HostBatch> batch = run.loader.next();
      batches.push_back(batch->memory);
      run.pipeline->feed(*batch, {.loss_weight = Real(1) / Real(kBatch)});
      run.pipeline->zero_gradients();
      run.pipeline->run_schedule();
    };
    step();
    step();  // the host is done with the first
    for (const auto& batch : batches) CHECK_FALSE(batch.expired());
    gate.open();
    for (const Stream& stream : run.machine.streams) stream.synchronize();
    step();
    CHECK(batches[0].expired());
    CHECK(batches[1].expired());
  }
}

TEST_CASE("The result does not depend on which stage is late", "[pipeline][tsan]") {
  for (const ScheduleKind kind : {kGpipe, kOneF1b}) {
    const Setup setup{.stages = 3, .pipeline = {kind, 4, kind == kOneF1b}, .model = small(true)};
    const Outcome expected = three_steps(setup);
    for (const size_t place : {0, 4, 8}) {  // in stage 0, 1, 2
      INFO(name_of(kind) << ", late before layer " << place);
      Setup late = setup;
      late.change = [=](Layers& layers) { insert(layers, place, sleep(2), sleep(2)); };
      CHECK((three_steps(late) == expected));
    }
    const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "200");
    CHECK((three_steps(setup) == expected));
  }
}

// --- What it costs -------------------------------------------------------------------------------

TEST_CASE("1F1B needs less memory than GPipe on every device", "[pipeline][row45]") {
  Run gpipe({4, {kGpipe, 8}}), one_f1b({4, {kOneF1b, 8}});
  CHECK((gpipe.three_steps() == one_f1b.three_steps()));
  for (int s = 0; s < 4; ++s) CHECK(one_f1b.peaks()[s] < gpipe.peaks()[s]);
}

TEST_CASE("After two steps a pipeline allocates nothing more", "[pipeline]") {
  for (const ScheduleKind kind : {kGpipe, kOneF1b}) {
    for (const int micro_batches : {1, 4, 5}) {  // 5: 3, 3, 2, 2, 2 samples
      Run run({.stages = 3, .pipeline = {kind, micro_batches}});
      for (int i = 0; i < 2; ++i) run.step();
      // A stream takes its workspace when it comes there, so that what was in use at most depends
      // on how far the host was then. Behind the two steps it has it.
      run.peaks();
      std::vector<int64_t> before;
      for (const auto& device : run.machine.devices) {
        device->memory().reset_peak();
        before.push_back(device->memory().current());
      }
      for (int i = 0; i < 4; ++i) run.step();
      std::vector<int64_t> after = run.peaks();
      after.back() -= 4 * int64_t{sizeof(Real)};  // the test's own tensors of losses
      CHECK(after == before);
    }
  }
}

TEST_CASE("A long evaluation does not lose the times of a pipeline's steps", "[pipeline]") {
  Run run({});
  run.step();
  run.pipeline->network();  // for evaluation
  for (const Stream& stream : run.machine.streams) {
    for (int i = 0; i < 1100; ++i) stream.record();
  }
  const double bubble = run.pipeline->measured_bubble();
  CHECK((bubble > 0 && bubble < 1));
}

TEST_CASE("A stage that cannot send waits, whatever the schedule", "[pipeline]") {
  // Stage 0 is the slow one: stage 1 waits for its activations, or to get its gradients rid.
  for (const auto kind : {kGpipe, kOneF1b}) {
    Run run({.stages = 2, .pipeline = {kind, 8, false}, .change = [](Layers& layers) {
               insert(layers, 0, sleep(4), sleep(8));
             }});
    for (int i = 0; i < 2; ++i) run.step();
    INFO(name_of(kind));
    CHECK(run.pipeline->measured_bubble() > 0.4);  // nearly all of stage 1's half
  }
}

TEST_CASE("More micro-batches than a stream keeps times of may be measured", "[pipeline]") {
  // Times may be lost then; the run must not be.
  Run run({.stages = 2, .pipeline = {kGpipe, kBatch, false}});
  run.step();
  for (int i = 0; i < 1500; ++i) run.machine.streams[1].record();
  CHECK_NOTHROW(run.step());
  const double bubble = run.pipeline->measured_bubble();
  CHECK((bubble >= 0 && bubble <= 1));
}

TEST_CASE("Gradients are complete once per step, with the last micro-batch", "[pipeline]") {
  for (const auto kind : {kGpipe, kOneF1b}) {
    Run run({.stages = 2, .pipeline = {kind, 4, false}});
    std::map<std::string, int> calls;
    for (Parameter* p : run.split->parameters()) {
      p->on_gradient_ready = [&](Parameter& ready) { ++calls[ready.name]; };
    }
    for (int step = 1; step <= 2; ++step) {
      run.step();
      CHECK(calls.size() == run.split->parameters().size());
      for (const auto& [name, count] : calls) CHECK(count == step);
    }
  }
}

TEST_CASE("With stages that only sleep the measured bubble is that of the formula", "[pipeline]") {
  constexpr int kStages = 4;
  for (const auto& [kind, micro_batches] : {std::pair(kNaive, 1), {kOneF1b, 4}, {kGpipe, 12}}) {
    const double predicted = predicted_bubble(kStages, micro_batches);
    double found = -1;
    // A busy machine adds to the sleeps: then once more.
    for (int attempt = 0; attempt < 5 && std::abs(found - predicted) > 0.1; ++attempt) {
      Run run({.stages = kStages,
               .pipeline = {kind, micro_batches, false},
               .change = [](Layers& layers) {  // 12 layers, three a stage
                 for (const size_t place : {0, 3, 6, 9}) insert(layers, place, sleep(5), sleep(5));
               }});
      for (int i = 0; i < 2; ++i) run.step();
      found = run.pipeline->measured_bubble();
    }
    INFO(name_of(kind) << ", " << micro_batches << " micro-batches");
    CHECK(found == Approx(predicted).margin(0.1));
  }
}

// --- Failures ------------------------------------------------------------------------------------

/// A hook as the first layer of stage 1 of 3.
Setup hooked(Hook::Action forward, Hook::Action backward) {
  return {.pipeline = {kOneF1b, 4},
          .change = [=](Layers& layers) { insert(layers, 3, forward, backward); }};
}

TEST_CASE("An error of a stage names it, its device and its layers, and the others finish",
          "[pipeline][row50]") {
  for (const bool in_forward : {true, false}) {
    int calls = 0;
    const Hook::Action fault = [&](Stream) {
      if (++calls == 3) throw std::runtime_error("planted fault");  // of the third micro-batch
    };
    Run run(in_forward ? hooked(fault, {}) : hooked({}, fault));
    CHECK_THAT(run.split->text(1), ContainsSubstring("stage 1 (cpu:1"));
    CHECK_THAT(run.split->text(1), ContainsSubstring("hook to flatten"));
    CHECK(message_of<EnvironmentError>([&] { run.step(); }) ==
          run.split->text(1) + ": planted fault");
    for (const Stream& stream : run.machine.streams) CHECK_NOTHROW(stream.synchronize());
  }
}

TEST_CASE("A failure on one stage's device reaches all stages, and nobody hangs",
          "[pipeline][tsan][row50]") {
  for (const bool in_forward : {true, false}) {
    const auto begin = Clock::now();
    {
      const Hook::Action fault = [](Stream stream) {
        enqueue(stream, "fault", [] {
          std::this_thread::sleep_for(milliseconds(20));  // the host has long gone on
          throw std::runtime_error("planted fault");
        });
      };
      Run run(in_forward ? hooked(fault, {}) : hooked({}, fault));
      run.step();
      const std::string expected = run.split->text(1) + " failed: planted fault";
      for (const Stream& stream : run.machine.streams) {
        CHECK(message_of<PeerLost>([&] { stream.synchronize(); }) == expected);
      }
      const std::string text = message_of<Error>([&] {
        for (int i = 0; i < 4; ++i) run.step();
      });
      CHECK(text == expected);
    }  // all streams are drained here
    CHECK(Clock::now() - begin < std::chrono::seconds(20));
  }
}

TEST_CASE("Stages that do not fit: the stage and both shapes are named", "[pipeline][row49]") {
  Run run({.pipeline = {kOneF1b, 4}, .change = [](Layers& layers) {
             layers.erase(layers.begin() + 3);  // pool2
           }});
  const auto expected = [&](int samples) {
    return fmt::format("{}: fc1: features of input [{}, 80]: found 80, expected 20",
                       run.split->text(2), samples);
  };
  CHECK(message_of<BadInput>([&] { run.step(); }) == expected(3));
  Context context(run.machine.streams[0]);
  const Tensor x = Tensor::empty(run.machine.streams[0], {2, 16, 16, 1});
  CHECK(message_of<BadInput>([&] { run.split->forward(x, context); }) == expected(2));
  for (const Stream& stream : run.machine.streams) CHECK_NOTHROW(stream.synchronize());
}

TEST_CASE("If the loss is not finite, no stage's weights move", "[pipeline][tsan]") {
  Run run({.pipeline = {kOneF1b, 4}, .infinite_loss = true});
  run.step();
  const Values before = all_of(*run.split, &Parameter::value);
  run.step();
  run.step();
  CHECK((all_of(*run.split, &Parameter::value) == before));
  const std::vector<HealthTensor> healths = run.pipeline->healths();
  CHECK(healths.size() == 3);
  for (const HealthTensor& health : healths) CHECK(health.to_host()[0].failed_step == 1);
}

}  // namespace
}  // namespace lockstep
