#include "03-model-split/tensor/training_ranks.h"

namespace lockstep {

TrainingRanks::TrainingRanks(const TensorSplit& network, const Dataset& set,
                             const OptimizerRule& rule) {
  for (int r = 0; r < network.world_size(); ++r) {
    const FlatParameters& parameters = network.parameters(r);
    const Stream stream = parameters.stream();
    ranks_.push_back({.context = Context(stream),
                      .feeder = Feeder(stream, set),
                      .optimizer = Optimizer(parameters, rule),
                      .loss = parameters.loss()});
  }
}

void TrainingRanks::feed(const HostBatch& batch, const StepState& step) {
  for (Rank& rank : ranks_) {
    rank.context.begin_step(step);
    rank.batch = &rank.feeder.feed(batch, rank.context);
  }
}

Tensors TrainingRanks::images() {
  Tensors all;
  for (Rank& rank : ranks_) all.push_back(rank.feeder.normalize(*rank.batch, rank.context));
  return all;
}

Contexts TrainingRanks::contexts() {
  Contexts all;
  for (Rank& rank : ranks_) all.push_back(&rank.context);
  return all;
}

void TrainingRanks::zero_gradients() const {
  for (const Rank& rank : ranks_) rank.optimizer.zero_gradients();
}

Tensors TrainingRanks::loss_and_gradients(Loss& loss, const Tensors& scores) {
  Tensors gradients;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    loss.forward(scores[r], rank.batch->labels, rank.loss, rank.context);
    gradients.push_back(loss.backward(rank.batch->labels, rank.context));
  }
  return gradients;
}

void TrainingRanks::update() const {
  for (const Rank& rank : ranks_) rank.optimizer.step(rank.context.state(), rank.loss);
}

std::vector<HealthTensor> TrainingRanks::healths() const {
  std::vector<HealthTensor> all;
  for (const Rank& rank : ranks_) all.push_back(rank.optimizer.health());
  return all;
}

double TrainingRanks::flops() const {
  double all = 0;
  for (const Rank& rank : ranks_) all += rank.context.flops();
  return all;
}

}  // namespace lockstep
