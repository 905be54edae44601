#pragma once
// Training of a network that lies on several devices, whichever way it is cut.

#include <vector>

#include "common/app/training_log.h"
#include "common/nn/init.h"
#include "common/nn/sgd.h"
#include "common/nn/state.h"

namespace lockstep {

/// What the program does with a network in pieces: Pipeline and TensorTraining.
class SplitTraining {
 public:
  virtual ~SplitTraining() = default;

  /// First values of all parameters: stage 01's.
  virtual void initialize(Initializer initializer, uint64_t seed) = 0;
  /// The whole network's state, put together, and the way back. Both synchronize.
  virtual std::vector<StateTensor> state() = 0;
  virtual void load_state(const std::vector<StateTensor>& state) = 0;
  /// Learnt numbers of the whole network.
  virtual int64_t parameter_count() = 0;
  /// The pieces as one network, for evaluation: what it takes and returns lies on device 0.
  virtual Module& network() = 0;

  /// Enqueues one optimizer step over a batch of whose samples each counts step.loss_weight; the
  /// batch's loss goes into `mean_loss` [1], which lies on loss_stream().
  virtual void train_step(HostBatch batch, const StepState& step, const Tensor& mean_loss) = 0;
  virtual Stream loss_stream() const = 0;
  /// Of every device's optimizer.
  virtual std::vector<HealthTensor> healths() const = 0;

  /// Floating-point operations on all devices so far, in training.
  virtual double flops() const = 0;
  /// Adds what was measured to the summary and the metrics.
  virtual void report(TrainingLog& log) = 0;
};

}  // namespace lockstep
