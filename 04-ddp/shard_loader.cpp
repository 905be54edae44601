#include "04-ddp/shard_loader.h"

#include <algorithm>

#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

HostAllocator pinned(Device& device) {
  return [&device](size_t bytes) { return device.allocate_host(bytes); };
}

}  // namespace

ShardLoader::ShardLoader(const Dataset& set, const Options& options, const HostAllocator& allocator,
                         int rank, int world_size, Sharding sharding)
    : rank_(rank), world_size_(world_size), samples_(set.count()), batch_size_(options.batch_size) {
  require_rank(rank, world_size);
  DataLoaderOptions loader = options.test_loader(allocator);
  if (sharding == Sharding::padded) {
    require(options.order != OrderKind::loader,
            "--pad: PyTorch's shards follow --order sampler or file, found loader; choose one of "
            "the two");
    require(batch_size_ % world_size == 0,
            "--pad: equal parts of a global batch of {} for {} ranks are not possible; give a "
            "--batch-size that {} divides",
            batch_size_, world_size, world_size);
    sampler_ = std::make_shared<DistributedSampler>(
        samples_, DistributedSampler::Options{.rank = rank,
                                              .world_size = world_size,
                                              .shuffle = options.order == OrderKind::sampler,
                                              .seed = static_cast<uint64_t>(options.seed),
                                              .drop_last = options.drop_last});
    loader.sampler = sampler_;
    loader.batch_size = batch_size_ / world_size;
    samples_ = sampler_->size() * world_size;
  } else {
    auto shard = std::make_shared<GlobalBatchShard>(
        make_order(options.order, samples_, static_cast<uint64_t>(options.seed)), rank, world_size,
        batch_size_);
    loader.batch_size = shard->part_of(batch_size_);
    loader.sampler = shard;
  }
  batches_ =
      options.drop_last ? samples_ / batch_size_ : (samples_ + batch_size_ - 1) / batch_size_;
  require(batches_ > 0,
          "{} training samples give no batch of {} for {} ranks; use more data or smaller batches",
          set.count(), batch_size_, world_size);
  loader_ = std::make_unique<DataLoader>(set, loader);
}

ShardLoader::ShardLoader(const Dataset& set, const Options& options, Device& device,
                         ProcessGroup& group, const Communicator& comm, Sharding sharding)
    : ShardLoader(group.together([&] {
        return ShardLoader(set, options, pinned(device), comm.rank(), comm.world_size(), sharding);
      })) {}

void ShardLoader::begin_epoch(int64_t epoch, int64_t first_batch) {
  require(first_batch >= 0 && first_batch <= batches_,
          "loader: first batch {} of an epoch, expected 0 to {}", first_batch, batches_);
  if (sampler_) sampler_->set_epoch(epoch);
  // This rank has a part of every global batch, but perhaps none of the last one.
  loader_->begin_epoch(epoch, std::min(first_batch, loader_->batches_per_epoch()));
  next_ = first_batch;
}

int64_t ShardLoader::global_size(int64_t batch) const {
  return std::min(batch_size_, samples_ - batch * batch_size_);
}

Real loss_weight(const HostBatch& batch, int world_size) {
  // [task 04.5] uneven shards
  return Real(world_size) / Real(batch.global_size);
  // [end 04.5]
}

DataLoaderOptions evaluation_loader(const Dataset& set, const Options& options, Device& device,
                                    ProcessGroup& group, const Communicator& comm) {
  return group.together([&] {
    return evaluation_loader(set, options, pinned(device), comm.rank(), comm.world_size());
  });
}

DataLoaderOptions evaluation_loader(const Dataset& set, const Options& options,
                                    const HostAllocator& allocator, int rank, int world_size) {
  require_rank(rank, world_size);
  require(
      set.count() >= world_size,
      "{} test images for {} ranks: expected one or more for each; use more data or fewer ranks",
      set.count(), world_size);
  DataLoaderOptions loader = options.test_loader(allocator);
  loader.sampler = make_evaluation_shard(set.count(), rank, world_size);
  loader.batch_size = std::max<int64_t>(1, options.batch_size / world_size);
  return loader;
}

std::optional<HostBatch> ShardLoader::next() {
  if (next_ == batches_) return {};
  const int64_t index = next_++, size = global_size(index);
  HostBatch batch;
  if (size > rank_) batch = loader_->next().value();
  batch.index = index;
  batch.global_size = size;
  batch.global_first = rank_;
  batch.global_stride = world_size_;
  return batch;
}

}  // namespace lockstep
