#pragma once
// What each rank of a network that is split inside its layers has for itself.

#include <deque>
#include <vector>

#include "03-model-split/tensor/tensor_split.h"
#include "common/nn/loss.h"
#include "common/nn/optimizer.h"
#include "common/step/feeder.h"

namespace lockstep {

/// Every rank has the whole batch, computes its whole loss, and has an optimizer for its own
/// parameters. All calls only enqueue, for one rank after the other.
class TrainingRanks {
 public:
  /// The ranks of `network`, which must outlive this object. `set` says how images are normalised.
  TrainingRanks(const TensorSplit& network, const Dataset& set, const OptimizerRule& rule);

  /// Copies the whole batch to every rank, and what the kernels need to know about the step.
  void feed(const HostBatch& batch, const StepState& step);
  /// The batch as the network takes it: [N,H,W,C] on every rank.
  Tensors images();
  Contexts contexts();
  /// Zeroes the losses, too.
  void zero_gradients() const;
  /// Adds up the loss on every rank, and returns the gradients of the scores [N,classes].
  Tensors loss_and_gradients(Loss& loss, const Tensors& scores);
  /// Every rank updates its parameters.
  void update() const;

  /// [1], rank 0's: all ranks have the same.
  Tensor loss() const { return ranks_.front().loss; }
  std::vector<HealthTensor> healths() const;
  /// Floating-point operations of all ranks so far, in training.
  double flops() const;

 private:
  struct Rank {
    Context context;
    Feeder feeder;
    Optimizer optimizer;
    Tensor loss;
    const DeviceBatch* batch = nullptr;  // fed last
  };
  std::deque<Rank> ranks_;
};

}  // namespace lockstep
