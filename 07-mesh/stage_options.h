#pragma once
// This stage's options: those of stage 06, and the mesh.

#include <array>
#include <memory>
#include <set>
#include <string>

#include "05-syncbn-checkpoint/sync_batchnorm.h"
#include "06-fully-sharded/stage_options.h"
#include "07-mesh/mesh_parallel.h"

namespace lockstep {

/// Stage 03's schedules in which each rank has one stage, and any number of micro-batches.
enum class RankSchedule { gpipe, one_f1b };
constexpr auto words_of(RankSchedule) { return std::array{"gpipe", "1f1b"}; }

struct MeshStageOptions : Options {
  RankOptions ranks;
  StepOptions step;
  SyncBatchNormOptions sync_bn;
  SavingOptions saving;
  ShardingOptions sharding;
  MeshShape mesh;
  RankSchedule rank_schedule = RankSchedule::one_f1b;
  std::set<std::string> given{};  // on the command line, of the options that concern some axes only

  void add_to(OptionParser& parser) override;
  bool splits_network() const override { return true; }
  /// Ranks along `pipeline` differ.
  SimulatedRanks simulated_ranks() const override;
  /// The --emulate value with which stage 01 normalises as these ranks do.
  std::string emulation(size_t world_size) const;
};

/// Replaces the model's network by this rank's part of it, as the options say.
MeshParallel parallelize(Model& model, const Dataset& images, DeviceMesh& mesh, Stream passes,
                         Stream communication, const MeshStageOptions& options);

/// The line printed once, at the start: the mesh, and how the batch is dealt out.
std::string mesh_line(const MeshStageOptions& options, const DeviceMesh& mesh);

/// Synchronises the model's batch normalisation over the ranks `samples`; null with --no-sync-bn.
std::shared_ptr<SyncBatchNorm> synchronise(Model& model, Communicator& samples,
                                           Stream communication, const MeshStageOptions& options);

/// Adds to the summary what stages 06 and 05 measure, and what this rank sent along each axis in a
/// step. `synchronised` may be null.
void report(MeshParallel& parallel, DeviceMesh& mesh, const Optimizer& optimizer,
            SyncBatchNorm* synchronised, const MeshStageOptions& options, TrainingLog& log);

}  // namespace lockstep
