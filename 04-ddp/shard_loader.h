#pragma once
// The batches of one rank.

#include <memory>
#include <optional>

#include "04-ddp/distributed_sampler.h"
#include "common/comm/process_group.h"
#include "common/options/options.h"

namespace lockstep {

/// How the samples of an epoch are dealt to the ranks.
enum class Sharding {
  global_batch,  // each batch of stage 01, dealt out: every sample once; parts may be unequal
  padded,        // PyTorch's DistributedSampler: equal parts, some samples twice
};

/// Loads the batches of a rank: batch s is its part of global batch s. All ranks get equally many.
class ShardLoader {
 public:
  /// The batches of `set`, with --batch-size, --order, --drop-last and the loader's options. Throws
  /// BadInput as require_rank() does, and for batches smaller than the world. With Sharding::padded
  /// also throws BadInput for batches that W does not divide, for --order loader, and where nothing
  /// is left for a rank.
  ShardLoader(const Dataset& set, const Options& options, const HostAllocator& allocator, int rank,
              int world_size, Sharding sharding);
  /// The same for this rank of `comm`, whose ranks share the samples out. Batches lie in memory
  /// from which `device` copies fast. A failure on one rank of the group is a failure on all of its
  /// ranks (ProcessGroup::together).
  ShardLoader(const Dataset& set, const Options& options, Device& device, ProcessGroup& group,
              const Communicator& comm, Sharding sharding);

  /// The same on all ranks.
  int64_t batches_per_epoch() const { return batches_; }
  /// Goes to global batch `first_batch` of the epoch: 0, or the one at which a checkpoint was made.
  void begin_epoch(int64_t epoch, int64_t first_batch = 0);
  /// The next batch; its size is 0 where the global batch, the last one, has too few samples for
  /// all ranks. Returns nothing at the end of the epoch.
  std::optional<HostBatch> next();

 private:
  int64_t global_size(int64_t batch) const;

  int rank_, world_size_;
  int64_t samples_, batch_size_, batches_, next_ = 0;  // of the global batches
  std::shared_ptr<DistributedSampler> sampler_;        // Sharding::padded
  std::unique_ptr<DataLoader> loader_;
};

/// The weight of a sample in its rank's loss (StepState::loss_weight), which adds up the rank's
/// samples. Losses and gradients are then averaged over the W ranks. The average must be the mean
/// over all samples of the global batch, however unequal the parts are. This rank has `batch.size`
/// of the `batch.global_size` samples, perhaps none.
Real loss_weight(const HostBatch& batch, int world_size);

/// A loader's options for this rank's part of a test set, with no sample twice
/// (make_evaluation_shard).
/// Throws BadInput as require_rank() does, and for fewer samples than ranks.
DataLoaderOptions evaluation_loader(const Dataset& set, const Options& options,
                                    const HostAllocator& allocator, int rank, int world_size);
/// The same for this rank of `comm`; a failure on one rank of the group is a failure on all.
DataLoaderOptions evaluation_loader(const Dataset& set, const Options& options, Device& device,
                                    ProcessGroup& group, const Communicator& comm);

}  // namespace lockstep
