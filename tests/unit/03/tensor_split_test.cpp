// Layers and networks split inside: the same numbers as the unsplit ones, whatever rank is late;
// exactly the collectives of the table; shards that are put together again.

#include "03-model-split/tensor/tensor_split.h"

#include <fmt/ranges.h>

#include <chrono>
#include <set>
#include <thread>

#include "03-model-split/tensor/row_and_column.h"
#include "common/core/cpu_stream.h"
#include "common/core/stream_backend.h"
#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/sgd.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;
using testing::cpus;
using testing::enqueue;
using testing::kDouble;
using testing::kTolerance;
using testing::message_of;
using testing::random_values;
using testing::relative_error;
using testing::ScopedEnvironment;
using Values = std::vector<Real>;
using Names = std::vector<std::string>;
using State = std::vector<StateTensor>;

constexpr int64_t kReal = sizeof(Real);
constexpr int kWhole = -1;  // for an axis: not split

// --- Ranks, and what they have -------------------------------------------------------------------

/// The part that rank r of `ranks` has of a tensor that is split along `axis`.
Values part(const Values& values, const Shape& shape, int axis, int ranks, int r) {
  if (axis == kWhole) return values;
  int64_t inner = 1;
  for (int a = axis + 1; a < shape.rank(); ++a) inner *= shape[a];
  Values mine;
  for (int64_t i = 0; i < int64_t(values.size()); ++i) {
    const int64_t place = i / inner % shape[axis];
    if (place / (shape[axis] / ranks) == r) mine.push_back(values[i]);
  }
  return mine;
}

/// With a context on each device. A rank can be late.
struct SplitMachine : testing::Machine {
  explicit SplitMachine(const std::string& names, int late = -1, DeviceOptions options = {})
      : testing::Machine(names, options), late(late) {
    for (const Stream& stream : streams) {
      owned.push_back(std::make_unique<Context>(stream));
      contexts.push_back(owned.back().get());
    }
    set_state({});
  }

  int ranks() const { return static_cast<int>(streams.size()); }
  /// On each rank its part of a tensor that is split along `axis`, or all of it.
  Tensors put(const Shape& shape, const Values& values, int axis = kWhole) const {
    Tensors tensors;
    for (int r = 0; r < ranks(); ++r) {
      Shape mine = shape;
      if (axis != kWhole) mine[axis] /= ranks();
      tensors.push_back(Tensor::from_host(streams[r], mine, part(values, shape, axis, ranks(), r)));
    }
    return tensors;
  }
  void delay() const {
    if (late < 0) return;
    enqueue(streams[late], "sleep", [] { std::this_thread::sleep_for(milliseconds(15)); });
  }
  void set_training(bool training) const {
    for (Context* context : contexts) context->facts.training = training;
  }
  void set_state(const StepState& state) const {
    for (const Context* context : contexts) context->state().copy_from_host({state});
  }

  int late;
  std::vector<std::unique_ptr<Context>> owned;
  Contexts contexts;
};

/// Each rank has its part of `expected`, and where that is all of it, all have the same bits.
void check_parts(const Tensors& found, const Values& expected, const Shape& shape, int axis) {
  const int ranks = static_cast<int>(found.size());
  for (int r = 0; r < ranks; ++r) {
    INFO("rank " << r);
    const Values mine = part(expected, shape, axis, ranks, r);
    CHECK(relative_error(found[r].to_host(), mine) <= kTolerance);
    if (axis == kWhole) CHECK((found[r].to_host() == found[0].to_host()));
  }
}

/// The ranks' parameters, with their parts of the values of the unsplit layer's.
struct Shards {
  Shards(const SplitMachine& machine, const RankModules& modules, const FlatParameters& whole,
         const std::vector<int>& axes)
      : whole(whole), axes(axes) {
    for (int r = 0; r < machine.ranks(); ++r) {
      of_rank.push_back(std::make_unique<FlatParameters>(modules.tree(r), machine.streams[r]));
      load_part(*of_rank[r], whole, machine.ranks(), r, axes);
    }
  }

  static void load_part(const FlatParameters& shard, const FlatParameters& whole, int ranks, int r,
                        const std::vector<int>& axes) {
    for (size_t i = 0; i < axes.size(); ++i) {
      const Parameter &from = *whole.parameters()[i], &to = *shard.parameters()[i];
      to.value.copy_from_host(part(from.value.to_host(), from.shape, axes[i], ranks, r));
    }
  }

  /// They are the ranks' parts of the unsplit layer's.
  void check_gradients() const {
    for (size_t i = 0; i < axes.size(); ++i) {
      const Parameter& p = *whole.parameters()[i];
      INFO(p.name);
      Tensors gradients;
      for (const auto& parameters : of_rank) {
        CHECK(parameters->parameters()[i]->name == p.name);
        gradients.push_back(parameters->parameters()[i]->grad);
      }
      check_parts(gradients, p.grad.to_host(), p.shape, axes[i]);
    }
  }

  const FlatParameters& whole;
  std::vector<int> axes;  // of the parameters, in their order
  std::vector<std::unique_ptr<FlatParameters>> of_rank;
};

// --- One layer -----------------------------------------------------------------------------------

/// How a layer is split: axes of input, output, and parameters in memory.
struct Axes {
  int x, y;
  std::vector<int> parameters;
};

/// The unsplit layer and what comes of it.
template <class Whole>
struct Expected {
  Expected(std::unique_ptr<Whole> whole, const Shape& x_shape)
      : layer(std::move(whole)), x_shape(x_shape) {
    layer->set_name("layer");
    parameters = std::make_unique<FlatParameters>(*layer, machine.streams[0]);
    initialize(*parameters, Initializer::kaiming_uniform, 3);
    x_values = random_values(x_shape, 1);
    const Tensor y = layer->forward(machine.put(x_shape, x_values)[0], *machine.contexts[0]);
    y_shape = y.shape();
    y_values = y.to_host();
    scores_gradients = random_values(y_shape, 2);
    dx = layer->backward(machine.put(y_shape, scores_gradients)[0], *machine.contexts[0]).to_host();
  }

  SplitMachine machine{cpus(1)};
  std::unique_ptr<Whole> layer;
  std::unique_ptr<FlatParameters> parameters;
  Shape x_shape, y_shape;
  Values x_values, y_values, scores_gradients, dx;
};

/// The split layer has the unsplit one's output, and gradients of input, weights and biases.
template <class Split, class Whole>
void check_layer(std::unique_ptr<Whole> whole, const Shape& x_shape, const Axes& axes,
                 const Traffic& traffic_of_many) {
  const Expected<Whole> expected(std::move(whole), x_shape);
  for (const std::string& devices : {cpus(1), cpus(2), cpus(4), std::string("cpu:0,cpu:0")}) {
    for (const int late : {-1, 0, 1}) {
      SplitMachine machine(devices, late < std::ssize(parse_devices(devices)) ? late : -1);
      INFO(devices << ", late: " << machine.late);
      const RankModules modules(*machine.world);
      Split split(*expected.layer, modules);
      const Shards shards(machine, modules, *expected.parameters, axes.parameters);
      const Tensors x = machine.put(x_shape, expected.x_values, axes.x);
      const Tensors dy = machine.put(expected.y_shape, expected.scores_gradients, axes.y);
      machine.delay();
      const Tensors y = split.forward(x, machine.contexts);
      machine.delay();
      const Tensors dx = split.backward(dy, machine.contexts);
      check_parts(y, expected.y_values, expected.y_shape, axes.y);
      check_parts(dx, expected.dx, x_shape, axes.x);
      shards.check_gradients();
      CHECK(split.traffic() == (machine.ranks() == 1 ? Traffic() : traffic_of_many));
      CHECK(split.predicted(x[0].shape()) == split.traffic());
    }
  }
}

std::unique_ptr<Linear> linear(Activation activation) {
  return std::make_unique<Linear>(24, 16, activation);
}

std::unique_ptr<Conv2d> convolution() {
  return std::make_unique<Conv2d>(8, 12, Conv2d::Options{.kernel = 3, .stride = 2, .padding = 1});
}

TEST_CASE("A linear layer split by its outputs is that layer", "[tensorsplit][tsan][row52]") {
  const Axes axes{.x = kWhole, .y = 1, .parameters = {0, 0}};
  const Traffic traffic{.all_reduces = 1, .bytes = 7 * 24 * kReal};
  check_layer<ColumnLinear>(linear(Activation::none), {7, 24}, axes, traffic);
  check_layer<ColumnLinear>(linear(Activation::relu), {7, 24}, axes, traffic);
}

TEST_CASE("A linear layer split by its inputs is that layer, bias and ReLU once",
          "[tensorsplit][tsan][row52][row54]") {
  const Axes axes{.x = 1, .y = kWhole, .parameters = {1, kWhole}};
  const Traffic traffic{.all_reduces = 1, .bytes = 7 * 16 * kReal};
  check_layer<RowLinear>(linear(Activation::none), {7, 24}, axes, traffic);
  check_layer<RowLinear>(linear(Activation::relu), {7, 24}, axes, traffic);
}

TEST_CASE("A convolution split by output channels is that convolution",
          "[tensorsplit][tsan][row53]") {
  check_layer<OutputConv2d>(convolution(), {3, 6, 7, 8},
                            {.x = kWhole, .y = 3, .parameters = {0, 0}},
                            {.all_reduces = 1, .bytes = 3 * 6 * 7 * 8 * kReal});
}

TEST_CASE("A convolution split by input channels is that convolution, bias once",
          "[tensorsplit][tsan][row53][row54]") {
  check_layer<InputConv2d>(convolution(), {3, 6, 7, 8},
                           {.x = 3, .y = kWhole, .parameters = {3, kWhole}},
                           {.all_reduces = 1, .bytes = 3 * 3 * 4 * 12 * kReal});
}

TEST_CASE("Split activations become whole and whole ones split, both ways",
          "[tensorsplit][tsan][row53]") {
  for (const Shape& shape : {Shape{3, 2, 5, 12}, Shape{4, 24}, Shape{1, 1, 1, 12}}) {
    for (const int ranks : {1, 2, 3, 4}) {
      INFO(shape.text() << " over " << ranks);
      SplitMachine machine(cpus(ranks), ranks - 1);
      const RankModules modules(*machine.world);
      JoinChannels join("join", modules);
      TakeChannels take("take", modules);
      const Values values = random_values(shape, 5);
      const int last = shape.rank() - 1;
      const Tensors whole = machine.put(shape, values), split = machine.put(shape, values, last);
      machine.delay();
      const auto check = [&](const Tensors& found, int axis) {
        for (int r = 0; r < ranks; ++r) {
          CHECK((found[r].to_host() == part(values, shape, axis, ranks, r)));
        }
      };
      check(join.forward(split, machine.contexts), kWhole);
      check(take.forward(whole, machine.contexts), last);
      const Traffic traffic{.all_gathers = ranks > 1 ? 1 : 0,
                            .bytes = ranks > 1 ? shape.elements() * kReal : 0};
      CHECK(join.traffic() == traffic);
      CHECK(join.predicted(split[0].shape()) == traffic);
      CHECK(take.traffic() == Traffic());
      check(join.backward(whole, machine.contexts), last);
      check(take.backward(split, machine.contexts), kWhole);
      CHECK(join.traffic() == traffic);
      CHECK(take.traffic() == traffic);
      CHECK(take.predicted(shape) == traffic);
    }
  }
}

TEST_CASE("Column, ReLU, row need one all-reduce forward and one backward",
          "[tensorsplit][tsan][row52][row56]") {
  // The outputs of the first layer, split, are the inputs of the second.
  auto both = std::make_unique<Sequential>();
  both->add("first", std::make_unique<Linear>(10, 24, Activation::relu));
  both->add("second", std::make_unique<Linear>(24, 6));
  const Shape x_shape{5, 10}, y_shape{5, 6};
  const Expected<Sequential> expected(std::move(both), x_shape);
  const auto whole = [&](size_t i) -> const Linear& {
    return dynamic_cast<const Linear&>(*expected.layer->children()[i]);
  };
  for (const int ranks : {2, 4}) {
    SplitMachine machine(cpus(ranks), 1, {.trace = true});
    const RankModules modules(*machine.world);
    ColumnLinear column(whole(0), modules);
    RowLinear row(whole(1), modules);
    const Shards shards(machine, modules, *expected.parameters, {0, 0, 1, kWhole});
    machine.delay();
    const Tensors between =
        column.forward(machine.put(x_shape, expected.x_values), machine.contexts);
    const Tensors y = row.forward(between, machine.contexts);
    machine.delay();
    const Tensors dbetween =
        row.backward(machine.put(y_shape, expected.scores_gradients), machine.contexts);
    check_parts(y, expected.y_values, y_shape, kWhole);
    check_parts(column.backward(dbetween, machine.contexts), expected.dx, x_shape, kWhole);
    shards.check_gradients();
    CHECK(row.traffic() == Traffic{.all_reduces = 1, .bytes = 5 * 6 * kReal});
    CHECK(column.traffic() == Traffic{.all_reduces = 1, .bytes = 5 * 10 * kReal});
    for (const Stream& stream : machine.streams) {
      Names summed;  // one operation of a rank per all-reduce
      for (const Span& span : stream.backend().timeline()) {
        if (std::string(span.op) == "sum_ranks") summed.push_back(*span.scope);
      }
      CHECK(summed == Names{"layer.second", "layer.first"});
    }
  }
}

TEST_CASE("A bias added by every rank is P - 1 biases too many", "[tensorsplit][row54]") {
  // As if RowLinear added up the ranks' complete layers: the comparison above would see it.
  const Expected<Linear> expected(linear(Activation::none), {7, 24});
  constexpr int kRanks = 4;
  Values wrong(expected.y_values.size());
  for (int r = 0; r < kRanks; ++r) {
    Linear shard(24 / kRanks, 16);
    const FlatParameters parameters(shard, expected.machine.streams[0]);
    Shards::load_part(parameters, *expected.parameters, kRanks, r, {1, kWhole});
    const Tensor x = Tensor::from_host(expected.machine.streams[0], {7, 24 / kRanks},
                                       part(expected.x_values, {7, 24}, 1, kRanks, r));
    const Values y = shard.forward(x, *expected.machine.contexts[0]).to_host();
    for (size_t i = 0; i < y.size(); ++i) wrong[i] += y[i];
  }
  CHECK(relative_error(wrong, expected.y_values) > 1e-2);
  const Values bias = expected.parameters->parameters()[1]->value.to_host();
  for (size_t i = 0; i < wrong.size(); ++i) wrong[i] -= (kRanks - 1) * bias[i % 16];
  CHECK(relative_error(wrong, expected.y_values) <= kTolerance);
}

// --- A network -----------------------------------------------------------------------------------

ModelOptions seed_options(ModelKind kind = ModelKind::seed) {
  return {.kind = kind, .dropout = true, .seed = 5};
}

ModelOptions resnet_options(int64_t width = 4) {
  return {
      .kind = ModelKind::resnet18, .width = width, .height = 8, .width_pixels = 8, .channels = 3};
}

/// Images and labels for a network, on the host.
struct Batch {
  Batch(const ModelOptions& o, int64_t count, uint32_t seed = 7)
      : shape{count, o.height, o.width_pixels, o.channels}, images(random_values(shape, seed)) {
    for (int64_t i = 0; i < count; ++i) labels.push_back(int32_t((i * 7 + seed) % o.classes));
  }
  Shape shape;
  Values images;
  std::vector<int32_t> labels;
};

/// The state of the network with these first weights.
State initial_state(const ModelOptions& options, uint64_t seed = 1) {
  const SplitMachine machine(cpus(1));
  const Model model = make_model(options);
  const FlatParameters parameters(*model.network, machine.streams[0]);
  initialize(parameters, Initializer::kaiming_uniform, seed);
  return state_dict(*model.network);
}

/// A network with the first weights and what it takes to train it: split over devices, or unsplit
/// on one, as stage 01 trains it.
class Network {
 public:
  struct Unsplit {};
  Network(const ModelOptions& options, Unsplit) : Network(options, cpus(1), -1, {}) {
    model.network = make_model(options).network;
    flat = std::make_unique<FlatParameters>(*model.network, machine.streams[0]);
    load_state_dict(*model.network, initial_state(options));
    prepare();
  }
  Network(const ModelOptions& options, const std::string& devices,
          const std::optional<Names>& layers = {}, int late = -1, DeviceOptions device_options = {})
      : Network(options, devices, late, device_options) {
    split = std::make_unique<TensorSplit>(options, machine.streams, *machine.world, layers);
    split->load_full_state(initial_state(options));
    prepare();
  }

  const FlatParameters& parameters(int r) const { return split ? split->parameters(r) : *flat; }
  State state() const { return split ? split->full_state() : state_dict(*model.network); }

  Tensors forward(const Tensors& images) {
    if (split) return split->forward(images, machine.contexts);
    return {model.network->forward(images[0], *machine.contexts[0])};
  }

  /// Adds the gradients of the batch's mean loss; the loss, which all ranks agree on.
  Real accumulate(const Batch& batch) {
    const int64_t n = batch.shape[0];
    machine.set_state(
        {.step = steps_, .learning_rate = Real(0.05), .loss_weight = Real(1) / Real(n)});
    const Tensors images = machine.put(batch.shape, batch.images);
    std::vector<LabelTensor> labels;
    for (const Stream& stream : machine.streams) {
      labels.push_back(LabelTensor::from_host(stream, {n}, batch.labels));
    }
    machine.delay();
    const Tensors scores = forward(images);
    machine.delay();
    Tensors scores_gradients;
    for (int r = 0; r < machine.ranks(); ++r) {
      Context& context = *machine.contexts[r];
      context.kernels().fill(context.stream(), 0, losses_[r]);
      model.loss->forward(scores[r], labels[r], losses_[r], context);
      scores_gradients.push_back(model.loss->backward(labels[r], context));
    }
    if (split) split->backward(scores_gradients, machine.contexts);
    if (!split) model.network->backward(scores_gradients[0], *machine.contexts[0]);
    machine.delay();
    for (const Tensor& loss : losses_) CHECK(loss.to_host() == losses_[0].to_host());
    return losses_[0].to_host()[0];
  }

  Real step(const Batch& batch) {
    for (const auto& optimizer : optimizers_) optimizer->zero_gradients();
    const Real loss = accumulate(batch);
    for (int r = 0; r < machine.ranks(); ++r) {
      optimizers_[r]->step(machine.contexts[r]->state(), losses_[r]);
    }
    ++steps_;
    return loss;
  }

  /// The gradients of the batch's mean loss in the shape of a state, and what else it holds.
  State gradients(const Batch& batch) {
    for (const auto& optimizer : optimizers_) optimizer->zero_gradients();
    accumulate(batch);
    std::vector<Values> weights;
    for (int r = 0; r < machine.ranks(); ++r) {
      weights.push_back(parameters(r).values().to_host());
      parameters(r).values().copy_from_host(parameters(r).gradients().to_host());
    }
    const State gradients = state();
    for (int r = 0; r < machine.ranks(); ++r) parameters(r).values().copy_from_host(weights[r]);
    return gradients;
  }

  /// The scores of an evaluation, which all ranks agree on.
  Values evaluate(const Batch& batch) {
    machine.set_training(false);
    const Tensors scores = forward(machine.put(batch.shape, batch.images));
    machine.set_training(true);
    for (const Tensor& of_rank : scores) CHECK((of_rank.to_host() == scores[0].to_host()));
    return scores[0].to_host();
  }

  /// Losses of some steps, every third over a short batch; then weights and running statistics.
  Values train(const ModelOptions& options, int steps = 3) {
    Values all;
    for (int i = 0; i < steps; ++i) {
      all.push_back(step({options, i % 3 == 2 ? 2 : 4, uint32_t(7 + i)}));
    }
    for (const StateTensor& tensor : state()) {
      all.insert(all.end(), tensor.real.begin(), tensor.real.end());
    }
    return all;
  }

  SplitMachine machine;
  Model model;                           // the loss, and the network unless it is split
  std::unique_ptr<FlatParameters> flat;  // of that
  std::unique_ptr<TensorSplit> split;

 private:
  Network(const ModelOptions& options, const std::string& devices, int late,
          DeviceOptions device_options)
      : machine(devices, late, device_options) {
    model.loss = make_model(options).loss;
  }
  void prepare() {
    for (int r = 0; r < machine.ranks(); ++r) {
      optimizers_.push_back(std::make_unique<Sgd>(parameters(r), SgdRule{.momentum = Real(0.9)}));
      losses_.push_back(Tensor::empty(machine.streams[r], {1}));
    }
  }

  std::vector<std::unique_ptr<Sgd>> optimizers_;
  Tensors losses_;  // [1] each
  int64_t steps_ = 0;
};

constexpr Network::Unsplit kUnsplit;

/// The same tensors under the same names; numbers alike to within `tolerance` of the largest.
void check_states(const State& found, const State& expected, double tolerance) {
  REQUIRE(found.size() == expected.size());
  Values a, b;
  for (size_t i = 0; i < found.size(); ++i) {
    INFO(expected[i].name);
    CHECK(found[i].name == expected[i].name);
    CHECK(found[i].shape == expected[i].shape);
    CHECK(found[i].integer == expected[i].integer);
    a.insert(a.end(), found[i].real.begin(), found[i].real.end());
    b.insert(b.end(), expected[i].real.begin(), expected[i].real.end());
  }
  if (tolerance == 0) CHECK((a == b));
  CHECK(relative_error(a, b) <= tolerance);
}

/// What every rank has of a parameter or a running statistic is the same, bit by bit.
void check_copies(const Network& network, const ModelOptions& options) {
  const Model whole = make_model(options);
  const std::vector<Parameter*> all = whole.network->parameters();
  for (size_t i = 0; i < all.size(); ++i) {
    INFO(all[i]->name);
    const Parameter& first = *network.parameters(0).parameters()[i];
    if (!(first.shape == all[i]->shape)) continue;
    for (int r = 1; r < network.machine.ranks(); ++r) {
      const Parameter& other = *network.parameters(r).parameters()[i];
      CHECK((other.value.to_host() == first.value.to_host()));
    }
  }
}

/// Gradients, an evaluation and training of a split network against the unsplit one.
void check_network(const ModelOptions& options, const std::string& devices,
                   const std::optional<Names>& layers = {}) {
  // In ResNet-18, with so few values per channel, rounding grows tenfold with every step.
  const bool residual = options.kind == ModelKind::resnet18;
  const double tolerance = kDouble ? 1e-12 : residual ? 1e-4 : 1e-5;
  const int steps = residual ? 1 : 3;
  INFO(devices << ", layers: " << (layers ? fmt::format("{}", fmt::join(*layers, ",")) : "all"));
  Network single(options, kUnsplit), network(options, devices, layers);
  const Batch batch(options, residual ? 8 : 3);
  check_states(network.gradients(batch), single.gradients(batch), tolerance);
  CHECK(relative_error(network.evaluate(batch), single.evaluate(batch)) <= tolerance);
  CHECK(relative_error(network.train(options, steps), single.train(options, steps)) <= tolerance);
  check_copies(network, options);
  CHECK(network.split->traffic() == network.split->expected_traffic());
}

TEST_CASE("The seed networks, split, are the seed networks", "[tensorsplit][tsan][row52][row53]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn}) {
    for (const int ranks : {2, 4}) check_network(seed_options(kind), cpus(ranks));
    check_network(seed_options(kind), "cpu:0,cpu:0");
  }
}

TEST_CASE("Each layer may be split without the other", "[tensorsplit][tsan][row52][row53]") {
  for (const Names& layers : {Names{"conv2"}, Names{"fc1"}, Names{"fc1", "conv2"}, Names{}}) {
    check_network(seed_options(ModelKind::seed_bn), cpus(2), layers);
  }
}

TEST_CASE("Layers that do not divide stay whole", "[tensorsplit][row55]") {
  struct Case {
    int ranks;
    Names split;
  };
  for (const auto& [ranks, split] : {Case{1, {}}, Case{2, {"conv2", "fc1"}}, Case{3, {}},
                                     Case{5, {"conv2", "fc1"}}, Case{8, {"fc1"}}}) {
    INFO(ranks << " ranks");
    Network network(seed_options(), cpus(ranks));
    CHECK(network.split->split_names() == split);
    check_network(seed_options(), cpus(ranks));
  }
  SplitMachine machine(cpus(3));
  CHECK(TensorSplit(resnet_options(4), machine.streams, *machine.world).split_names().empty());
  CHECK(TensorSplit(resnet_options(3), machine.streams, *machine.world).split_names().size() == 8);
}

#ifdef LOCKSTEP_DOUBLE  // in float one rounding goes far in it
TEST_CASE("ResNet-18, split, is ResNet-18", "[tensorsplit][row53]") {
  for (const int ranks : {2, 4}) check_network(resnet_options(), cpus(ranks));
  check_network(resnet_options(), cpus(2), Names{"block1.1", "block3.0"});
}
#endif

TEST_CASE("A residual block on several streams", "[tensorsplit][tsan][row53]") {
  check_network(resnet_options(2), cpus(2), Names{"block2.0"});
}

TEST_CASE("On one rank the split network changes no bit", "[tensorsplit]") {
  for (const ModelOptions& options : {seed_options(ModelKind::seed_bn), resnet_options()}) {
    Network single(options, kUnsplit), network(options, cpus(1));
    CHECK((network.train(options) == single.train(options)));
    CHECK(network.split->traffic() == Traffic());
  }
}

TEST_CASE("Masks are those of the unsplit layer's channels", "[tensorsplit]") {
  // Without the offset all ranks would drop what rank 0 drops.
  const ModelOptions options = seed_options();
  SplitMachine machine(cpus(4));
  TensorSplit split(options, machine.streams, *machine.world);
  split.load_full_state(initial_state(options));
  machine.set_state({.step = 2});
  const auto drop = [&](const std::string& name, const Shape& shape, int r) {
    for (const auto& layer : split.module(r).children()) {
      if (layer->name() != name) continue;
      const Tensor ones = machine.put(shape, Values(size_t(shape.elements()), 1))[r];
      return layer->forward(ones, *machine.contexts[r]).to_host();
    }
    return Values();
  };
  Dropout2d whole(Real(0.5), options.seed);
  whole.set_name("drop2d");
  const Shape shape{16, 1, 1, 20};
  const Values expected =
      whole.forward(machine.put(shape, Values(16 * 20, 1))[0], *machine.contexts[0]).to_host();
  for (int r = 0; r < 4; ++r) {
    CHECK((drop("drop2d", {16, 1, 1, 5}, r) == part(expected, shape, 3, 4, r)));
    CHECK((drop("drop1d", {16, 50}, r) == drop("drop1d", {16, 50}, 0)));  // whole: the same
  }
  CHECK((drop("drop2d", {16, 1, 1, 5}, 1) != drop("drop2d", {16, 1, 1, 5}, 0)));
}

// --- Order between the ranks ---------------------------------------------------------------------

TEST_CASE("The result does not depend on which rank is late", "[tensorsplit][tsan]") {
  const ModelOptions options = seed_options(ModelKind::seed_bn);
  struct Case {
    std::optional<Names> layers;
    std::vector<int> late;
  };
  for (const Case& tried : {Case{{}, {0, 2}}, Case{Names{"conv2"}, {3}}, Case{Names{"fc1"}, {1}}}) {
    const auto steps = [&](const std::string& devices, int late) {
      return Network(options, devices, tried.layers, late).train(options);
    };
    const Values expected = steps(cpus(4), -1);
    for (const int late : tried.late) CHECK((steps(cpus(4), late) == expected));
    CHECK((steps("cpu:0,cpu:0,cpu:0,cpu:0", 1) == expected));
    const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "200");
    CHECK((steps(cpus(4), -1) == expected));
  }
}

TEST_CASE("A failure of one rank reaches the others, and nobody hangs", "[tensorsplit][tsan]") {
  const ModelOptions options = seed_options();
  Network network(options, cpus(4));
  const Tensors images = network.machine.put({2, 28, 28, 1}, Values(2 * 28 * 28, 1));
  enqueue(network.machine.streams[2], "fault", [] { throw std::runtime_error("planted fault"); });
  network.forward(images);
  for (const size_t other : {0, 1, 3}) {
    const std::string text =
        message_of<PeerLost>([&] { network.machine.streams[other].synchronize(); });
    CHECK_THAT(text, ContainsSubstring("cpu:2"));
    CHECK_THAT(text, ContainsSubstring("planted fault"));
  }
}

// --- What is exchanged ---------------------------------------------------------------------------

/// "conv2: 1 all-reduces, 0 all-gathers, 8640 bytes" of every layer that exchanged something.
Names exchanged(const TensorSplit& split) {
  Names lines;
  for (const auto& layer : split.layers()) {
    const Traffic t = layer->traffic();
    if (t == Traffic()) continue;
    lines.push_back(fmt::format("{}: {} + {}, {}", layer->name(), t.all_reduces, t.all_gathers,
                                t.bytes / kReal));
  }
  return lines;
}

/// The number of all-reduces that the ranks' streams ran, by scope; all ranks agree on them.
std::map<std::string, int> all_reduces_run(const Network& network) {
  std::vector<std::map<std::string, int>> counts;
  for (const Stream& stream : network.machine.streams) {
    stream.synchronize();
    counts.emplace_back();
    for (const Span& span : stream.backend().timeline()) {
      if (std::string(span.op) == "sum_ranks") ++counts.back()[*span.scope];
    }
    CHECK(counts.back() == counts[0]);
  }
  return counts[0];
}

TEST_CASE("The collectives are those of the table and none else", "[tensorsplit][row56]") {
  const ModelOptions options = seed_options(ModelKind::seed_bn);
  constexpr int64_t n = 3;
  const int64_t conv2_in = n * 12 * 12 * 10, fc1_in = n * 320, fc1_out = n * 50;
  struct Case {
    std::optional<Names> layers;
    Names lines;  // layer: all-reduces + all-gathers, numbers
    std::map<std::string, int> run;
  };
  const std::string conv2 = fmt::format("conv2: 1 + 0, {}", conv2_in);
  const std::string fc1 = fmt::format("fc1: 1 + 0, {}", fc1_out);
  const std::string join = fmt::format("fc1.join: 0 + 1, {}", fc1_in);
  const std::string take = fmt::format("fc1.take: 0 + 1, {}", fc1_in);
  for (const auto& [layers, lines, run] :
       {Case{{}, {conv2, fc1}, {{"conv2", 1}, {"fc1", 1}}},
        Case{Names{"conv2"}, {conv2, join}, {{"conv2", 1}}},
        Case{Names{"fc1"}, {take, fc1}, {{"fc1", 1}}}, Case{Names{}, {}, {}}}) {
    for (const int ranks : {2, 4}) {
      Network network(options, cpus(ranks), layers, -1, {.trace = true});
      network.step(Batch(options, n));
      CHECK(exchanged(*network.split) == lines);
      CHECK(all_reduces_run(network) == run);
      CHECK(network.split->traffic() == network.split->expected_traffic());
      network.evaluate(Batch(options, n));  // does not count
      CHECK(exchanged(*network.split) == lines);
      CHECK(network.split->traffic() == network.split->expected_traffic());
    }
  }
}

TEST_CASE("A residual block has one all-reduce forward and one backward", "[tensorsplit][row56]") {
  const ModelOptions options = resnet_options();
  Network network(options, cpus(2), {}, -1, {.trace = true});
  constexpr int64_t n = 3;
  network.step(Batch(options, n));
  Names expected;
  // Pixels and channels of each block's input and output.
  const int64_t in[] = {64 * 4, 64 * 4, 64 * 4, 16 * 8, 16 * 8, 4 * 16, 4 * 16, 1 * 32};
  const int64_t out[] = {64 * 4, 64 * 4, 16 * 8, 16 * 8, 4 * 16, 4 * 16, 1 * 32, 1 * 32};
  std::map<std::string, int> run;
  for (int i = 0; i < 8; ++i) {
    const std::string block = fmt::format("block{}.{}", i / 2 + 1, i % 2);
    expected.push_back(fmt::format("{}: 2 + 0, {}", block, n * (in[i] + out[i])));
    run[block + ".conv1"] = run[block + ".conv2"] = 1;
  }
  CHECK(exchanged(*network.split) == expected);
  CHECK(all_reduces_run(network) == run);
  CHECK(network.split->traffic() == network.split->expected_traffic());
}

TEST_CASE("What ranks run carries the layers' names", "[tensorsplit]") {
  Network network(seed_options(ModelKind::seed_bn), cpus(2), {}, -1, {.trace = true});
  network.step(Batch(seed_options(), 2));
  for (const Stream& stream : network.machine.streams) {
    stream.synchronize();
    std::set<std::string> scopes;
    for (const Span& span : stream.backend().timeline()) {
      if (span.scope != nullptr) scopes.insert(*span.scope);
    }
    CHECK(scopes == std::set<std::string>{"conv1", "bn1", "pool1", "conv2", "bn2", "drop2d",
                                          "pool2", "flatten", "fc1", "drop1d", "fc2",
                                          "log_softmax"});
  }
}

TEST_CASE("A rank has its part of the parameters, and a steady step allocates nothing",
          "[tensorsplit]") {
  const ModelOptions options = seed_options();
  for (const auto& [ranks, count] : {std::pair{1, 21'840}, {2, 11'330}, {4, 6'075}}) {
    Network network(options, cpus(ranks));
    for (int r = 0; r < ranks; ++r) CHECK(network.split->parameters(r).count() == count);
    const auto allocations = [&] {
      int64_t sum = 0;
      for (Context* context : network.machine.contexts) sum += context->pool().allocations();
      return sum;
    };
    network.step(Batch(options, 6));
    const int64_t after_one = allocations();
    network.step(Batch(options, 6));
    CHECK(allocations() == after_one);
  }
}

// --- Refusals ------------------------------------------------------------------------------------

TEST_CASE("Features that do not divide are refused with the numbers", "[tensorsplit][row55]") {
  SplitMachine machine(cpus(3));
  const RankModules modules(*machine.world);
  const auto check = [](const std::string& text, const std::string& expected) {
    CHECK_THAT(text, ContainsSubstring(expected));
    CHECK(text.find('\n') == text.npos);
  };
  auto wide = linear(Activation::none);  // 24 to 16
  wide->set_name("wide");
  Linear narrow(16, 24);
  narrow.set_name("narrow");
  auto conv = convolution();  // 8 to 12
  conv->set_name("conv");
  Conv2d to_eight(12, 8, {});
  to_eight.set_name("to_eight");
  check(message_of<BadInput>([&] { ColumnLinear(*wide, modules); }),
        "wide: 16 output features cannot be split evenly over 3 ranks");
  check(message_of<BadInput>([&] { RowLinear(narrow, modules); }),
        "narrow: 16 input features cannot be split evenly over 3 ranks");
  check(message_of<BadInput>([&] { OutputConv2d(to_eight, modules); }),
        "to_eight: 8 output channels cannot be split evenly over 3 ranks");
  check(message_of<BadInput>([&] { InputConv2d(*conv, modules); }),
        "conv: 8 input channels cannot be split evenly over 3 ranks");
  TakeChannels take("take", modules);
  const auto flat = machine.put({2, 16}, Values(32, 1));
  check(message_of<BadInput>([&] { take.forward(flat, machine.contexts); }),
        "take: 16 channels cannot be split evenly over 3 ranks");
}

TEST_CASE("A split by name that does not divide is refused", "[tensorsplit][row55]") {
  SplitMachine machine(cpus(3));
  const auto check = [&](const ModelOptions& options, const Names& layers,
                         const std::string& expected) {
    const std::string text = message_of<BadInput>(
        [&] { TensorSplit(options, machine.streams, *machine.world, layers); });
    CHECK_THAT(text, ContainsSubstring(expected));
    CHECK(text.find('\n') == text.npos);
  };
  check(seed_options(), {"conv2", "fc1"},
        "conv2: 20 output channels cannot be split evenly over 3 ranks");
  check(seed_options(), {"fc1"}, "fc1: 320 input features cannot be split evenly over 3 ranks");
  check(resnet_options(4), {"block2.1"},
        "block2.1.conv1: 8 output channels cannot be split evenly over 3 ranks");
}

TEST_CASE("Layers that cannot be split are refused with those that can", "[tensorsplit][row55]") {
  SplitMachine machine(cpus(2));
  const auto split = [&](const ModelOptions& options, const Names& layers) {
    return message_of<BadInput>(
        [&] { TensorSplit(options, machine.streams, *machine.world, layers); });
  };
  for (const std::string name : {"conv3", "conv1", "", "fc2"}) {
    CHECK_THAT(split(seed_options(), {"fc1", name}),
               ContainsSubstring("'" + name +
                                 "' cannot be split in this network; choose from "
                                 "conv2, fc1"));
  }
  CHECK_THAT(split(resnet_options(), {"conv2"}),
             ContainsSubstring("'conv2'") && ContainsSubstring("block1.0, block1.1, block2.0"));
}

TEST_CASE("A rank's wrong input names the rank, its device and the layer", "[tensorsplit]") {
  Network network(seed_options(), cpus(2));
  Tensors images = network.machine.put({2, 28, 28, 1}, Values(2 * 28 * 28, 1));
  images[1] = Tensor::empty(network.machine.streams[1], {2, 28, 28, 3});
  const std::string text = message_of<BadInput>([&] { network.forward(images); });
  CHECK_THAT(text, ContainsSubstring("rank 1 on cpu:1: conv1"));
  CHECK(text.find('\n') == text.npos);
  images.pop_back();
  CHECK_THAT(message_of<BadInput>([&] { network.forward(images); }),
             ContainsSubstring("1 tensors and 2 contexts for 2 ranks"));
  std::swap(network.machine.contexts[0], network.machine.contexts[1]);
  CHECK_THAT(message_of<BadInput>([&] {
               network.forward(network.machine.put({2, 28, 28, 1}, Values(2 * 28 * 28, 1)));
             }),
             ContainsSubstring("rank 0 works on stream compute of cpu:0") &&
                 ContainsSubstring("compute of cpu:1"));
  CHECK_THAT(message_of<BadInput>([&] {
               TensorSplit(seed_options(), {network.machine.streams[0]}, *network.machine.world);
             }),
             ContainsSubstring("1 streams for a world of 2 ranks"));
}

// --- The state -----------------------------------------------------------------------------------

TEST_CASE("Shards put together are the checkpoint, from 2 ranks to 4 to 1",
          "[tensorsplit][row57]") {
  for (const ModelOptions& options : {seed_options(ModelKind::seed_bn), resnet_options()}) {
    // A state in which no two tensors are alike, running statistics included.
    Network trained(options, kUnsplit);
    trained.train(options);
    const State checkpoint = trained.state();
    State state = checkpoint;
    for (const int ranks : {2, 4, 1}) {
      INFO(ranks << " ranks");
      Network network(options, cpus(ranks));
      network.split->load_full_state(state);
      state = network.split->full_state();
      check_states(state, checkpoint, 0);
    }
    Network again(options, kUnsplit);
    load_state_dict(*again.model.network, state);
    const Batch batch(options, 4);
    CHECK((again.evaluate(batch) == trained.evaluate(batch)));
  }
}

TEST_CASE("Every rank has its part, under the unsplit network's names", "[tensorsplit][row57]") {
  const ModelOptions options = seed_options(ModelKind::seed_bn);
  const State state = initial_state(options, 3);
  const std::map<std::string, int> axes{
      {"conv2.weight", 0},     {"conv2.bias", 0},      {"bn2.weight", 0}, {"bn2.bias", 0},
      {"bn2.running_mean", 0}, {"bn2.running_var", 0}, {"fc1.weight", 1}};
  for (const int ranks : {2, 4}) {
    Network network(options, cpus(ranks));
    network.split->load_full_state(state);
    for (int r = 0; r < ranks; ++r) {
      const State found = state_dict(network.split->module(r));
      REQUIRE(found.size() == state.size());
      for (size_t i = 0; i < state.size(); ++i) {
        INFO(state[i].name << " of rank " << r);
        CHECK(found[i].name == state[i].name);
        const auto axis = axes.find(state[i].name);
        CHECK((found[i].real == part(state[i].real, state[i].shape,
                                     axis == axes.end() ? kWhole : axis->second, ranks, r)));
      }
    }
  }
}

TEST_CASE("A state that does not fit is refused by the unsplit shapes, and nothing changes",
          "[tensorsplit][row57]") {
  const ModelOptions options = seed_options();
  Network network(options, cpus(2));
  const State before = network.state();
  State bad = initial_state(options, 9);
  for (StateTensor& tensor : bad) {
    if (tensor.name != "conv2.bias") continue;
    tensor.shape = {10};
    tensor.real.resize(10);
  }
  std::erase_if(bad, [](const StateTensor& tensor) { return tensor.name == "fc2.bias"; });
  const std::string text = message_of<BadInput>([&] { network.split->load_full_state(bad); });
  CHECK_THAT(text, ContainsSubstring("conv2.bias has shape [10], expected [20]"));
  CHECK_THAT(text, ContainsSubstring("missing fc2.bias"));
  check_states(network.state(), before, 0);
}

}  // namespace
}  // namespace lockstep
