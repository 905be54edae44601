#pragma once
// Stage 01's training on one stream, for tests that compare devices, or steps with their graphs.

#include <optional>
#include <utility>
#include <vector>

#include "common/core/device.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/training/feeder.h"
#include "common/training/step_graph.h"

namespace lockstep::testing {

struct TrainingOptions {
  ModelOptions model{};
  OptimizerRule rule{};
  int64_t batch_size = 32;
  Real learning_rate = Real(0.01);
  bool graph = false;
  Precision precision = Precision::real;
};

/// A network with seed 1 on a stream's device, and what it takes to train it on `set`, in the order
/// of the file.
class Training {
 public:
  Training(Stream stream, const Dataset& set, const TrainingOptions& options)
      : model(make_model(options.model)),
        parameters(*model.network, stream, options.precision),
        optimizer(parameters, options.rule),
        context(stream, options.precision, optimizer.loss_scale()),
        feeder(stream, set),
        loader(set, {.batch_size = options.batch_size,
                     .allocator = [&device = stream.device()](
                                      size_t bytes) { return device.allocate_host(bytes); }}),
        graph_(context, options.graph, options.batch_size),
        learning_rate_(options.learning_rate),
        loss_(parameters.loss()) {
    initialize(parameters, Initializer::kaiming_uniform, 1);
    optimizer.round();
  }

  /// Makes one step per batch of the set; returns the loss of each.
  std::vector<double> epoch(int64_t number = 0) {
    std::vector<double> losses;
    loader.begin_epoch(number);
    while (std::optional<HostBatch> batch = loader.next()) {
      losses.push_back(step(*batch));
    }
    return losses;
  }

  /// The loss of the set's first batch, without a step.
  double first_loss() {
    loader.begin_epoch(0);
    std::optional<HostBatch> batch = loader.next();
    const DeviceBatch& fed = feed(*batch);
    optimizer.zero_gradients();
    forward(fed);
    const double loss = loss_.to_host()[0];
    context.clear();
    return loss;
  }

  /// The bytes that the set's first batch keeps for backward.
  int64_t saved_bytes() {
    loader.begin_epoch(0);
    std::optional<HostBatch> batch = loader.next();
    forward(feed(*batch));
    const int64_t bytes = context.saved_bytes();
    context.clear();
    stream().synchronize();
    return bytes;
  }

  /// How often the work of a step was enqueued operation by operation.
  int64_t enqueued() const { return enqueued_; }

  Model model;
  FlatParameters parameters;
  Optimizer optimizer;
  Context context;
  Feeder feeder;
  DataLoader loader;

 private:
  Stream stream() const { return context.stream(); }
  const DeviceBatch& feed(const HostBatch& batch) {
    context.begin_step({.step = steps_++,
                        .learning_rate = learning_rate_,
                        .loss_weight = Real(1) / Real(batch.size)});
    return feeder.feed(batch, context);
  }

  void forward(const DeviceBatch& fed) {
    const AnyTensor scores = model.network->forward(feeder.normalize(fed, context), context);
    model.loss->forward(scores, fed.labels, loss_, context);
  }

  double step(const HostBatch& batch) {
    const DeviceBatch& fed = feed(batch);
    graph_.run(batch.size, [&] {
      ++enqueued_;
      optimizer.zero_gradients();
      forward(fed);
      model.network->backward(model.loss->backward(fed.labels, context), context);
      optimizer.step(context.state(), loss_);
    });
    return loss_.to_host()[0];
  }

  StepGraph graph_;
  Real learning_rate_;
  Tensor loss_;
  int64_t steps_ = 0, enqueued_ = 0;
};

}  // namespace lockstep::testing
