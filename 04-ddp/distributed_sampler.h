#pragma once
// Which samples a rank sees.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/data/random_order.h"

namespace lockstep {

/// Throws BadInput for a world without ranks, and for a rank outside [0, W).
void require_rank(int rank, int world_size);

/// Mirrors torch.utils.data.DistributedSampler, bit for bit: rank r gets positions r, r + W, ... of
/// the epoch's order. All ranks get equally many: the order is extended with its own beginning, or,
/// with drop_last, cut. So some samples count twice in an epoch, or not at all.
class DistributedSampler final : public EpochOrder {
 public:
  struct Options {
    int rank = 0, world_size = 1;
    bool shuffle = true;
    uint64_t seed = 0;
    bool drop_last = false;
    /// Gets a line when an order is given a second time; by default the line goes to stderr.
    std::function<void(const std::string&)> warn{};
  };
  /// Deals out samples 0 to n - 1. Throws BadInput for a rank outside [0, W).
  DistributedSampler(int64_t n, Options options);

  /// Sets the epoch whose order order_of_epoch() gives. Call it before every epoch: the order
  /// follows from seed + epoch. Without this call the sampler stays at epoch 0, as PyTorch's does.
  void set_epoch(int64_t epoch);
  /// The number of samples of a rank: ceil(N/W), with drop_last floor(N/W).
  int64_t size() const override { return size_; }
  /// This rank's samples, [size()], in the order of the epoch given to set_epoch(); the loader's
  /// own number is ignored. Warns if the sampler has given that epoch's order before.
  std::vector<int64_t> order_of_epoch(int64_t) override;

 private:
  Options options_;
  std::unique_ptr<EpochOrder> order_;  // of all samples
  int64_t size_;
  int64_t epoch_ = 0, last_given_ = -1;
};

/// Rank r's part of every global batch. Batch s has the positions [sB, min(N, (s+1)B)); rank r gets
/// numbers r, r + W, ... of these positions. So all ranks together see every sample once, in stage
/// 01's batches. Parts are unequal where W does not divide. Where W divides B and N, this is what
/// DistributedSampler gives with a local batch of B/W.
class GlobalBatchShard final : public EpochOrder {
 public:
  /// The shard of `order`. Throws BadInput for a rank outside [0, W), and for batches smaller than
  /// W, where some rank would get nothing.
  GlobalBatchShard(std::unique_ptr<EpochOrder> order, int rank, int world_size, int64_t batch_size);

  int64_t size() const override;
  std::vector<int64_t> order_of_epoch(int64_t epoch) override;

  /// How many samples this rank gets of a global batch of `batch_size`: 0 where that is too small.
  int64_t part_of(int64_t batch_size) const;

 private:
  std::unique_ptr<EpochOrder> order_;
  int rank_, world_size_;
  int64_t batch_size_;
};

/// Gives rank r the samples r, r + W, ... of an evaluation over samples 0 to n - 1. Nothing is
/// padded, so counts summed over the ranks are those of one process. Throws BadInput as above.
std::unique_ptr<EpochOrder> make_evaluation_shard(int64_t n, int rank, int world_size);

}  // namespace lockstep
