#pragma once
// This stage's options: groups of stages 04 and 05, and what is shared out.

#include <string>

#include "05-syncbn-checkpoint/stage_options.h"
#include "06-fully-sharded/fully_sharded.h"

namespace lockstep {

struct ShardedStageOptions : Options {
  RankOptions ranks;
  StepOptions step;
  SyncBatchNormOptions sync_bn;
  SavingOptions saving;
  ShardingOptions sharding;

  void add_to(OptionParser& parser) override;
  bool splits_network() const override { return true; }
  /// The --emulate value with which stage 01 normalises as these ranks do.
  std::string emulation(size_t world_size) const { return sync_bn.emulation(step, world_size); }
};

/// Divides the model's network over the ranks, as the options say. The values are undefined.
FullyShardedDataParallel& shard(Model& model, Stream passes, ProcessGroup& group,
                                Communicator& comm, Stream communication,
                                const ShardedStageOptions& options);

/// Bytes of parameters and gradients that one of `world_size` ranks sends in a step of so many
/// micro-batches, by the formula.
int64_t bytes_by_formula(const FullyShardedDataParallel& sharded, int micro_batches,
                         int world_size);

/// Adds measurements to the summary. Per step, which has so many micro-batches: compute,
/// communication, exposed communication, and the bytes sent beside their formula. Between steps:
/// the bytes that this rank keeps beside those of the padded model.
void report(FullyShardedDataParallel& sharded, const Optimizer& optimizer, int micro_batches,
            int world_size, TrainingLog& log);

}  // namespace lockstep
