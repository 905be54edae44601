#pragma once
// This stage's options, in groups that later stages have, too, and the replica that they ask for.

#include <concepts>
#include <initializer_list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "04-ddp/ddp.h"
#include "04-ddp/shard_loader.h"
#include "common/options/rank_options.h"
#include "common/training/program.h"
#include "common/training/training_log.h"

namespace lockstep {

/// How ranks take a step together, each with a part of the batch. All later stages have these, too.
struct StepOptions {
  bool pad = false;
  int accumulate = 1;
  double clip_norm = 0;  // 0: off
  bool no_broadcast_buffers = false;

  void add_to(OptionParser& parser);

  Sharding sharding() const { return pad ? Sharding::padded : Sharding::global_batch; }
  /// The micro-batches of a rank's part of a batch. Their gradients add up before they are
  /// reduced. All ranks have equally many, since batch normalisation may need all ranks in each
  /// micro-batch.
  BatchSplit accumulation() const {
    return {.kind = BatchSplit::Kind::micro, .parts = accumulate, .keep_empty = true};
  }
  /// The --emulate value with which stage 01 normalises the same parts of a batch as these ranks
  /// do. Throws BadInput if there is no such value.
  std::string emulation(size_t world_size) const;
  /// The same where these ranks normalise each micro-batch together.
  std::string emulation_together(size_t world_size) const;
};

struct DdpStageOptions : Options {
  RankOptions ranks;
  ReplicaOptions replica;
  StepOptions step;

  void add_to(OptionParser& parser) override;
};

/// Wraps the model's network as the options say; its weights are now rank 0's.
Replica& wrap_in_replica(Model& model, const FlatParameters& parameters, ProcessGroup& group,
                         Communicator& comm, Stream communication, ReplicaOptions replica,
                         const StepOptions& step);
template <std::derived_from<Options> StageOptions>
Replica& wrap_in_replica(Model& model, const FlatParameters& parameters, ProcessGroup& group,
                         Communicator& comm, Stream communication, const StageOptions& options) {
  return wrap_in_replica(model, parameters, group, comm, communication, options.replica,
                         options.step);
}

/// The line printed once, at the start: how the batch is dealt out, and the learning rate.
std::string batch_line(const Options& options, const StepOptions& step, const ProcessGroup& group);

/// Adds to the summary what the replica measured: compute, communication and exposed communication
/// per step. Adds the bytes sent, as counted, beside the formula: 2 (W-1)/W times the model.
void report(Replica& replica, const FlatParameters& parameters, int world_size, TrainingLog& log);

}  // namespace lockstep
