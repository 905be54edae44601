#pragma once
// ZeRO-1 in its shortest form: one update that the ranks share out.

#include "common/comm/communicator.h"
#include "common/nn/optimizer.h"

namespace lockstep {

/// Every rank has all values and all gradients, and the optimizer's state of its own shard only.
/// Leads to the same weights as FullyShardedDataParallel with ShardKind::optimizer, without units
/// and without overlap. Mirrors torch.distributed.optim.ZeroRedundancyOptimizer.
class ShardedStep {
 public:
  /// `whole` [W n] has the same layout on all W ranks. `comm` must outlive this object.
  ShardedStep(UpdatedRange whole, Communicator& comm, const OptimizerRule& rule);

  /// Makes one update. All ranks call it after a backward over their own samples. They have
  /// the same values before and after it: those that one process would have with the average
  /// of the ranks' gradients. A rank sends (W-1)/W of the numbers twice. Everything is
  /// enqueued on the home stream of the values. Watches `loss` [1] as Optimizer::step()
  /// does.
  void operator()(const StepStateTensor& state, const Tensor& loss) const;

  /// This rank's n values and gradients: views of the whole.
  const UpdatedRange& shard() const { return shard_; }

 private:
  UpdatedRange whole_, shard_;
  Communicator& comm_;
  Optimizer optimizer_;  // of the shard
};

}  // namespace lockstep
