#pragma once
// This stage's own options, in addition to those of stage 05.

#include <string>

#include "05-syncbn-checkpoint/stage_options.h"
#include "06-fully-sharded/fully_sharded.h"

namespace lockstep {

struct ShardedStageOptions : CheckpointStageOptions {
  std::string shard = "parameters";  // or none, optimizer, gradients
  std::string unit = "layer";        // or block, model, or MiB
  int prefetch = 1;
  std::string reshard_after_forward = "yes";  // or no

  void add_to(OptionParser& parser);
  ShardingOptions sharding_options() const;
};

/// Throws BadInput for values of --shard, --unit and --reshard-after-forward that are none, and for
/// options that have no meaning under that --shard.
void check_sharding(const OptionParser& parser, const std::string& shard, const std::string& unit,
                    const std::string& reshard_after_forward);

/// As stage 05's, for this stage's options, too.
void require_same_settings(ProcessGroup& group, const Options& options,
                           const ShardedStageOptions& own, const DatasetPair& data);

/// Divides the model's network over the ranks, as the options say. The values are undefined.
FullyShardedDataParallel& share_out(Model& model, Stream passes, ProcessGroup& group,
                                    Communicator& comm, Stream communication,
                                    const ShardedStageOptions& own);

/// Adds to the summary what was measured: compute, communication and exposed communication per
/// step, bytes sent per step beside their formula, and the bytes that this rank keeps between steps
/// beside those of the padded model.
void report(FullyShardedDataParallel& sharded, const Optimizer& optimizer,
            const ShardedStageOptions& own, int world_size, TrainingLog& log);

}  // namespace lockstep
