#include "04-ddp/distributed_sampler.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "common/core/error.h"
#include "common/core/text.h"

namespace lockstep {
namespace {

/// Samples first, first + stride, ... below `end`.
int64_t strided(int64_t first, int64_t end, int64_t stride) {
  return first < end ? (end - first + stride - 1) / stride : 0;
}

}  // namespace

void require_rank(int rank, int world_size) {
  require(world_size >= 1, "sampler: rank {} of {} ranks, expected one rank or more", rank,
          world_size);
  require(rank >= 0 && rank < world_size, "sampler: rank {} of {} ranks, expected 0 to {}", rank,
          world_size, world_size - 1);
}

// --- DistributedSampler --------------------------------------------------------------------------

DistributedSampler::DistributedSampler(int64_t n, Options options)
    : options_(std::move(options)),
      order_(
          make_order(options_.shuffle ? OrderKind::sampler : OrderKind::file, n, options_.seed)) {
  require_rank(options_.rank, options_.world_size);
  const int64_t world_size = options_.world_size;
  size_ = options_.drop_last ? n / world_size : (n + world_size - 1) / world_size;
  if (!options_.warn) {
    options_.warn = warn;
  }
}

void DistributedSampler::set_epoch(int64_t epoch) {
  require(epoch >= 0, "sampler: epoch {} is negative; epochs count from 0", epoch);
  epoch_ = epoch;
}

std::vector<int64_t> DistributedSampler::order_of_epoch(int64_t) {
  if (last_given_ == epoch_ && options_.shuffle) {
    options_.warn(fmt::format(
        "sampler: the order of epoch {} comes a second time; call set_epoch() before every epoch",
        epoch_));
  }
  last_given_ = epoch_;
  const std::vector<int64_t> order = order_->order_of_epoch(epoch_);
  // [task 04.4] distributed sampler
  std::vector<int64_t> mine;
  if (order.empty()) return mine;
  for (int64_t i = 0; i < size_; ++i) {
    const size_t position = static_cast<size_t>(options_.rank + i * options_.world_size);
    mine.push_back(order[position % order.size()]);  // past the end it starts again
  }
  return mine;
  // [end 04.4]
}

// --- Shards without padding ----------------------------------------------------------------------

GlobalBatchShard::GlobalBatchShard(std::unique_ptr<EpochOrder> order, int rank, int world_size,
                                   int64_t batch_size)
    : order_(std::move(order)), rank_(rank), world_size_(world_size), batch_size_(batch_size) {
  require_rank(rank, world_size);
  require(batch_size >= world_size,
          "global batch: {} samples for {} ranks, expected one or more each; give a larger "
          "--batch-size or fewer ranks",
          batch_size, world_size);
}

int64_t GlobalBatchShard::part_of(int64_t batch_size) const {
  return strided(rank_, batch_size, world_size_);
}

int64_t GlobalBatchShard::size() const {
  const int64_t samples = order_->size();
  return samples / batch_size_ * part_of(batch_size_) + part_of(samples % batch_size_);
}

std::vector<int64_t> GlobalBatchShard::order_of_epoch(int64_t epoch) {
  const std::vector<int64_t> order = order_->order_of_epoch(epoch);
  std::vector<int64_t> mine;
  const int64_t samples = std::ssize(order);
  for (int64_t batch = 0; batch < samples; batch += batch_size_) {
    const int64_t end = std::min(samples, batch + batch_size_);
    for (int64_t i = batch + rank_; i < end; i += world_size_) {
      mine.push_back(order[static_cast<size_t>(i)]);
    }
  }
  return mine;
}

std::unique_ptr<EpochOrder> make_evaluation_shard(int64_t n, int rank, int world_size) {
  // One batch of all samples, or of as many as there are ranks if there are fewer.
  return std::make_unique<GlobalBatchShard>(make_order(OrderKind::file, n, 0), rank, world_size,
                                            std::max<int64_t>(n, world_size));
}

}  // namespace lockstep
