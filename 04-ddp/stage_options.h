#pragma once
// This stage's own options, and the replica that they ask for.

#include <initializer_list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "04-ddp/ddp.h"
#include "04-ddp/shard_loader.h"
#include "common/app/training_log.h"
#include "common/options/described.h"
#include "common/options/rank_options.h"

namespace lockstep {

struct DdpStageOptions : RankOptions {
  std::string ddp = "bucketed";  // or manual
  std::string all_reduce = "library";
  double bucket_mb = -1;  // -1: 1 MiB, then 25 MiB
  bool no_overlap = false;
  bool no_broadcast_buffers = false;
  bool find_unused_parameters = false;
  int accumulate = 1;
  double clip_norm = 0;  // 0: off
  bool pad = false;

  void add_to(OptionParser& parser);

  DdpOptions ddp_options() const;
  Sharding sharding() const { return pad ? Sharding::padded : Sharding::global_batch; }
  /// The micro-batches of a rank's part of a batch, whose gradients add up before they are reduced.
  /// All ranks have equally many, since batch normalisation may need the other ranks in each of
  /// them.
  BatchSplit accumulation() const {
    return {.kind = BatchSplit::Kind::micro, .parts = accumulate, .keep_empty = true};
  }
  /// The --emulate value with which stage 01 divides a batch, for normalisation, as `ranks` ranks
  /// do. Throws BadInput if there is none.
  std::string emulation(size_t world_size) const;
};

/// The settings of the options with these roles, and the other things that weights depend on: the
/// precision and the sizes of the data sets.
nlohmann::json run_settings(const OptionTable& options, std::initializer_list<Role> roles,
                            const DatasetPair& data);
/// Everything that must be the same on all ranks: the weights, or the number of calls, depend on
/// it.
nlohmann::json shared_settings(const OptionTable& options, const DatasetPair& data);
nlohmann::json shared_settings(const Options& options, const DdpStageOptions& own,
                               const DatasetPair& data);

/// Throws BadInput, on all ranks, with both values, if the ranks differ in one of these settings:
/// they would train different networks, or wait for each other.
void require_same_settings(ProcessGroup& group, const nlohmann::json& mine);
/// The same for all settings of this stage.
void require_same_settings(ProcessGroup& group, const Options& options, const DdpStageOptions& own,
                           const DatasetPair& data);

/// Wraps the model's network as the options say; its weights are now rank 0's.
Replica& wrap_in_replica(Model& model, const FlatParameters& parameters, ProcessGroup& group,
                         Communicator& comm, Stream communication, const DdpStageOptions& own);

/// The line printed once, at the start: how the batch and the learning rate come about.
std::string batch_line(const Options& options, const DdpStageOptions& own,
                       const ProcessGroup& group);

/// Adds to the summary what the replica measured: compute, communication and exposed communication
/// per step, and the bytes sent, as counted, next to 2 (W-1)/W times the model.
void report(Replica& replica, const FlatParameters& parameters, int world_size, TrainingLog& log);

}  // namespace lockstep
