#pragma once
// The training step of a network that is split inside its layers.

#include <deque>
#include <memory>
#include <vector>

#include "03-model-split/split_training.h"
#include "03-model-split/tensor_split.h"
#include "common/app/feeder.h"
#include "common/nn/loss.h"

namespace lockstep {

/// Every rank gets the whole batch, computes its parts of the split layers and all of the others,
/// the loss included, and updates its own parameters. What is whole stays the same on all ranks,
/// bit by bit, because it is computed from the same numbers in the same order.
class TensorTraining final : public SplitTraining {
 public:
  /// `loss` and `set` (which says how images are normalised) must outlive this; `model` is what
  /// the split network is of.
  TensorTraining(std::unique_ptr<TensorSplit> split, Loss& loss, const ModelOptions& model,
                 const Dataset& set, const SgdRule& rule);

  void initialize(Initializer initializer, uint64_t seed) override;
  std::vector<StateTensor> state() override { return split_->full_state(); }
  void load_state(const std::vector<StateTensor>& state) override {
    split_->load_full_state(state);
  }
  int64_t parameter_count() override;
  Module& network() override { return *evaluation_; }
  void train_step(HostBatch batch, const StepState& step, const Tensor& mean_loss) override;
  Stream loss_stream() const override { return workers_.front().context.stream(); }
  std::vector<HealthTensor> healths() const override;
  double flops() const override;
  void report(TrainingLog& log) override { split_->report(log); }

 private:
  struct Worker {
    Context context;
    Feeder feeder;
    Sgd optimizer;
    Tensor loss;  // [1], this rank's
  };
  Contexts contexts();

  std::unique_ptr<TensorSplit> split_;
  Loss& loss_;
  ModelOptions model_;
  std::deque<Worker> workers_;
  std::unique_ptr<Module> evaluation_;
};

}  // namespace lockstep
