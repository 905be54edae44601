#pragma once
// A network on one device or on several, and its results for a batch.

#include "02-dataparallel/data_parallel.h"

#include "common/core/error.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"

namespace lockstep::testing::data_parallel {

constexpr int64_t kReal = sizeof(Real);
constexpr const char* kConvolution = "conv2d";  // the name of its forward in a trace
constexpr bool kWrapped = true;

// --- A network on one device or on several -------------------------------------------------------

inline std::function<std::unique_ptr<Module>()> model(ModelKind kind, bool dropout = false) {
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
  std::vector<Real> samples;
  std::vector<int32_t> labels;
};

/// A network with seed 1 and what it takes to train it: on the first device alone, as
/// stage 01 does, or wrapped, as stage 02 does.
class Network {
 public:
  Network(const std::function<std::unique_ptr<Module>()>& make, const std::string& devices,
          bool wrapped = false, DeviceOptions options = {})
      : machine(devices, options),
        network(make()),
        parameters(*network, stream()),
        optimizer(parameters, {.momentum = 0.9}),
        context(stream()),
        loss_(Tensor::empty(stream(), {1})) {
    initialize(parameters, Initializer::kaiming_uniform, 1);
    if (!wrapped) return;
    auto wrapper =
        std::make_unique<DataParallel>(std::move(network), parameters, make, machine.streams);
    parallel = wrapper.get();
    network = std::move(wrapper);
  }

  Stream stream() const { return machine.streams[0]; }
  Tensor put(const Batch& batch) const {
    return Tensor::from_host(stream(), batch.shape, batch.samples);
  }
  void set(const StepState& state) const { context.state().copy_from_host({state}); }

  /// Adds the gradients of `weight` times the sum of the samples' losses to those already there.
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
  std::vector<Real> gradients(const Batch& batch) {
    optimizer.zero_gradients();
    accumulate(batch, Real(1) / Real(batch.shape[0]));
    return parameters.gradients().to_host();
  }
  /// Makes an optimizer step; returns the mean loss.
  Real step(const Batch& batch) {
    optimizer.zero_gradients();
    accumulate(batch, Real(1) / Real(batch.shape[0]));
    optimizer.step(context.state(), loss_);
    return loss_.to_host()[0];
  }
  /// Makes three steps over different batches, the last one short. Returns all they leave: losses,
  /// weights, momentum, running statistics.
  std::vector<Real> three_steps(int64_t batch_size) {
    std::vector<Real> all;
    all.push_back(step(Batch(batch_size, 7)));
    all.push_back(step(Batch(batch_size, 8)));
    all.push_back(step(Batch((batch_size + 2) / 3, 9)));
    for (const Tensor& part :
         {parameters.values(), optimizer.state().at(0).ranges.at(0), parameters.buffer_values()}) {
      const std::vector<Real> values = part.to_host();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  /// The time of the last step's passes, from the first operation on.
  double passes_seconds() const { return passes_end_->seconds_since(*passes_begin_); }
  /// The scores of an evaluation.
  std::vector<Real> evaluate(const Batch& batch) {
    context.facts.training = false;
    const Tensor scores = network->forward(put(batch), context);
    context.facts.training = true;
    return scores.to_host();
  }

  Machine machine;
  std::unique_ptr<Module> network;
  FlatParameters parameters;
  Optimizer optimizer;
  Context context;
  DataParallel* parallel = nullptr;  // the network, where it is wrapped

 private:
  std::unique_ptr<Loss> loss_function_ = make_nll_loss();
  Tensor loss_;
  int64_t steps_ = 0;
  std::optional<TimedEvent> passes_begin_, passes_end_;
};

}  // namespace lockstep::testing::data_parallel
