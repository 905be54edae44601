#pragma once
// Ranks that share layers, and networks split over them, compared with the same network in one
// piece.

#include "03-model-split/tensor/tensor_split.h"

#include <fmt/ranges.h>

#include <chrono>
#include <thread>

#include "common/nn/init.h"
#include "common/nn/optimizer.h"
#include "tests/support/catch.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"

namespace lockstep::testing::tensor_split {

constexpr int64_t kReal = sizeof(Real);

/// How many numbers rank 0 sends for an all-reduce of `numbers`: its own for the others' parts of
/// the sum, and its part of the sum to all others.
inline int64_t sent_for_sum(int64_t numbers, int64_t ranks) {
  const int64_t part = numbers / ranks;
  return numbers - part + (ranks - 1) * part;
}
/// And for an all-gather whose result is `numbers`.
inline int64_t sent_for_gather(int64_t numbers, int64_t ranks) {
  return numbers / ranks * (ranks - 1);
}
constexpr int kWhole = -1;  // for an axis: not split

// --- Ranks, and what they have -------------------------------------------------------------------

/// The part that rank r of `ranks` has of a tensor that is split along `axis`.
inline std::vector<Real> part(const std::vector<Real>& values, const Shape& shape, int axis,
                              int ranks, int r) {
  if (axis == kWhole) return values;
  int64_t inner = 1;
  for (int a = axis + 1; a < shape.rank(); ++a) inner *= shape[a];
  std::vector<Real> mine;
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
  /// On each rank, the rank's part of a tensor that is split along `axis`, or all of it.
  Tensors put(const Shape& shape, const std::vector<Real>& values, int axis = kWhole) const {
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
    enqueue(streams[late], "sleep",
            [] { std::this_thread::sleep_for(std::chrono::milliseconds(15)); });
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

/// Each rank has its part of `expected`; if that is all of it, all ranks have the same bits.
inline void check_parts(const Tensors& found, const std::vector<Real>& expected, const Shape& shape,
                        int axis) {
  const int ranks = static_cast<int>(found.size());
  for (int r = 0; r < ranks; ++r) {
    INFO("rank " << r);
    const std::vector<Real> mine = part(expected, shape, axis, ranks, r);
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

// --- A network -----------------------------------------------------------------------------------

inline ModelOptions seed_options(ModelKind kind = ModelKind::seed) {
  return {.kind = kind, .dropout = true, .seed = 5};
}

inline ModelOptions resnet_options(int64_t width = 4) {
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
  std::vector<Real> images;
  std::vector<int32_t> labels;
};

/// The state of the network with these first weights.
inline std::vector<StateTensor> initial_state(const ModelOptions& options, uint64_t seed = 1) {
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
          const std::optional<std::vector<std::string>>& layers = {}, int late = -1,
          DeviceOptions device_options = {})
      : Network(options, devices, late, device_options) {
    split = std::make_unique<TensorSplit>(options, machine.streams, *machine.world, layers);
    split->load_full_state(initial_state(options));
    prepare();
  }

  const FlatParameters& parameters(int r) const { return split ? split->parameters(r) : *flat; }
  std::vector<StateTensor> state() const {
    return split ? split->full_state() : state_dict(*model.network);
  }

  Tensors forward(const Tensors& images) {
    if (split) return split->forward(images, machine.contexts);
    return {model.network->forward(images[0], *machine.contexts[0])};
  }

  /// Adds the gradients of the batch's mean loss. Returns the loss, on which all ranks agree.
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
  std::vector<StateTensor> gradients(const Batch& batch) {
    for (const auto& optimizer : optimizers_) optimizer->zero_gradients();
    accumulate(batch);
    std::vector<std::vector<Real>> weights;
    for (int r = 0; r < machine.ranks(); ++r) {
      weights.push_back(parameters(r).values().to_host());
      parameters(r).values().copy_from_host(parameters(r).gradients().to_host());
    }
    const std::vector<StateTensor> gradients = state();
    for (int r = 0; r < machine.ranks(); ++r) parameters(r).values().copy_from_host(weights[r]);
    return gradients;
  }

  /// The scores of an evaluation, on which all ranks agree.
  std::vector<Real> evaluate(const Batch& batch) {
    machine.set_training(false);
    const Tensors scores = forward(machine.put(batch.shape, batch.images));
    machine.set_training(true);
    for (const Tensor& of_rank : scores) CHECK((of_rank.to_host() == scores[0].to_host()));
    return scores[0].to_host();
  }

  /// Losses of some steps, every third over a short batch; then weights and running statistics.
  std::vector<Real> train(const ModelOptions& options, int steps = 3) {
    std::vector<Real> all;
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
      optimizers_.push_back(
          std::make_unique<Optimizer>(parameters(r), OptimizerRule{.momentum = 0.9}));
      losses_.push_back(Tensor::empty(machine.streams[r], {1}));
    }
  }

  std::vector<std::unique_ptr<Optimizer>> optimizers_;
  Tensors losses_;  // [1] each
  int64_t steps_ = 0;
};

constexpr Network::Unsplit kUnsplit;

/// The same tensors under the same names; numbers alike to within `tolerance` of the largest.
inline void check_states(const std::vector<StateTensor>& found,
                         const std::vector<StateTensor>& expected, double tolerance) {
  REQUIRE(found.size() == expected.size());
  std::vector<Real> a, b;
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
inline void check_copies(const Network& network, const ModelOptions& options) {
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
inline void check_network(const ModelOptions& options, const std::string& devices,
                          const std::optional<std::vector<std::string>>& layers = {}) {
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
  CHECK(network.split->traffic() == network.split->predicted_traffic());
}

}  // namespace lockstep::testing::tensor_split
