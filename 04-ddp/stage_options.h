#pragma once
// This stage's options, in groups that later stages have, too, and the replica that they ask for.

#include <array>
#include <concepts>
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

/// How ranks take a step together, each with a part of the batch: every stage from here on has it.
struct StepOptions {
  bool pad = false;
  int accumulate = 1;
  double clip_norm = 0;  // 0: off
  bool no_broadcast_buffers = false;

  void add_to(OptionParser& parser);

  Sharding sharding() const { return pad ? Sharding::padded : Sharding::global_batch; }
  /// The micro-batches of a rank's part of a batch, whose gradients add up before they are reduced.
  /// All ranks have equally many, since batch normalisation may need the other ranks in each of
  /// them.
  BatchSplit accumulation() const {
    return {.kind = BatchSplit::Kind::micro, .parts = accumulate, .keep_empty = true};
  }
  /// The --emulate value with which stage 01 divides a batch, for normalisation, as this many ranks
  /// do. Throws BadInput if there is none.
  std::string emulation(size_t world_size) const;
};

/// How large buckets are.
struct BucketOptions {
  double bucket_mb = -1;  // -1: 1 MiB, then 25 MiB

  void add_to(OptionParser& parser);
  BucketCaps caps() const { return bucket_mb == -1 ? BucketCaps() : BucketCaps::equal(bucket_mb); }
};

enum class ReplicaKind { bucketed, manual };
constexpr auto words_of(ReplicaKind) { return std::array{"bucketed", "manual"}; }

/// How whole replicas of a network reduce their gradients.
struct ReplicaOptions {
  ReplicaKind ddp = ReplicaKind::bucketed;
  AllReduceKind all_reduce = AllReduceKind::library;
  BucketOptions buckets;
  bool no_overlap = false;
  bool find_unused_parameters = false;

  void add_to(OptionParser& parser);
};

struct DdpStageOptions : Options {
  RankOptions ranks;
  ReplicaOptions replica;
  StepOptions step;

  void add_to(OptionParser& parser);
};

/// The settings of the options with these roles, and the other things that weights depend on: the
/// precision and the sizes of the data sets.
nlohmann::json run_settings(const OptionTable& options, std::initializer_list<Role> roles,
                            const DatasetPair& data);
/// Everything that must be the same on all ranks: the weights, or the number of calls, depend on
/// it.
nlohmann::json shared_settings(const OptionTable& options, const DatasetPair& data);

/// Throws BadInput, on all ranks, with both values, if the ranks differ in one of these settings:
/// they would train different networks, or wait for each other.
void require_same_settings(ProcessGroup& group, const nlohmann::json& mine);
void require_same_settings(ProcessGroup& group, const OptionTable& options,
                           const DatasetPair& data);
/// The same for all options of a stage.
template <std::derived_from<Options> StageOptions>
void require_same_settings(ProcessGroup& group, const StageOptions& options,
                           const DatasetPair& data) {
  require_same_settings(group, table_of(options), data);
}

/// Wraps the model's network as the options say; its weights are now rank 0's.
Replica& wrap_in_replica(Model& model, const FlatParameters& parameters, ProcessGroup& group,
                         Communicator& comm, Stream communication, const ReplicaOptions& replica,
                         const StepOptions& step);
template <std::derived_from<Options> StageOptions>
Replica& wrap_in_replica(Model& model, const FlatParameters& parameters, ProcessGroup& group,
                         Communicator& comm, Stream communication, const StageOptions& options) {
  return wrap_in_replica(model, parameters, group, comm, communication, options.replica,
                         options.step);
}

/// The line printed once, at the start: how the batch and the learning rate come about.
std::string batch_line(const Options& options, const StepOptions& step, const ProcessGroup& group);

/// Adds to the summary what the replica measured: compute, communication and exposed communication
/// per step, and the bytes sent, as counted, next to 2 (W-1)/W times the model.
void report(Replica& replica, const FlatParameters& parameters, int world_size, TrainingLog& log);

}  // namespace lockstep
