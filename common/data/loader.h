#pragma once
// torch.utils.data.DataLoader for images in bytes: worker threads make batches ahead of the
// consumer, who gets them in order whatever the number of workers.
//
//   DataLoader loader(dataset, {.batch_size = 64, .shuffle = true, .num_workers = 2, .seed = 1});
//   loader.begin_epoch(epoch);
//   while (auto batch = loader.next()) { ... batch->images, batch->labels, batch->size ... }

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "common/data/dataset.h"
#include "common/data/random_order.h"

namespace lockstep {

/// Gets `bytes` of host memory, aligned to 64 bytes or more; freed with its last owner. A CUDA
/// backend passes an allocator of page-locked memory.
using HostAllocator = std::function<std::shared_ptr<void>(size_t bytes)>;

/// Plain memory aligned to 64 bytes.
std::shared_ptr<void> allocate_host(size_t bytes);

struct BatchBuffer;  // memory of one batch
class BatchPool;

/// A batch. A copy of a HostBatch is another owner of the same memory. When the last owner is gone,
/// the memory returns to the pool and is written again. So keep an owner until the last copy from
/// the batch has ended. A batch may outlive its loader.
struct HostBatch {
  int64_t index = 0;                ///< number of the batch in its epoch
  int64_t size = 0;                 ///< samples
  const uint8_t* images = nullptr;  ///< [size, height, width, channels], from the allocator
  const int32_t* labels = nullptr;  ///< [size], in the same allocation
  /// Its samples' places in the global batch: 0, 1, ... unless other ranks have some of the
  /// samples.
  int64_t global_size = 0, global_first = 0, global_stride = 1;
  std::shared_ptr<BatchBuffer> memory{};
};

/// Names and defaults are PyTorch's, except where noted.
struct DataLoaderOptions {
  int64_t batch_size = 1;
  bool shuffle = false;  ///< true: OrderKind::loader with `seed`
  std::shared_ptr<EpochOrder> sampler =
      nullptr;          ///< another order; without it and shuffle: the file's
  int num_workers = 0;  ///< 0: next() makes the batch itself
  std::optional<int> prefetch_factor =
      std::nullopt;                 ///< batches ahead per worker; 2 if there are workers
  bool persistent_workers = false;  ///< keep the threads from one epoch to the next
  double timeout_seconds = 0;       ///< for one batch from a worker; 0: wait for ever
  bool drop_last = false;           ///< leave out the last batch if it is short
  uint64_t seed = 0;                ///< in place of PyTorch's generator
  int max_held = 4;  ///< ours: batches the consumer may hold; with that many, next() waits
  HostAllocator allocator = allocate_host;  ///< in place of pin_memory

  /// Refuses what PyTorch refuses, each in a line with the value. Refused are batch_size <= 0,
  /// num_workers < 0, timeout < 0, prefetch_factor or persistent_workers or a timeout without
  /// workers, sampler together with shuffle. Also prefetch_factor <= 0, max_held <= 0.
  void validate() const;
};

/// Every member function but most_in_flight() belongs to one thread, the consumer's.
class DataLoader {
 public:
  /// `source` must outlive the loader. Throws BadInput on bad options and where an epoch would have
  /// 0 batches.
  DataLoader(const ImageSource& source, DataLoaderOptions options);

  /// Stops the workers and joins them. Returns when every read() of the source that a worker is in
  /// has returned (a thread inside the source's code cannot be abandoned safely).
  ~DataLoader();

  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// N / B if the last short batch is dropped, else rounded up.
  int64_t batches_per_epoch() const { return batches_; }

  /// Goes to batch `first_batch` of epoch `epoch`; the rest of an unfinished epoch is dropped.
  void begin_epoch(int64_t epoch, int64_t first_batch = 0);

  /// The next batch, or nullopt at the end of the epoch. Rethrows an error of a worker's read() as
  /// the same kind, with the worker's number before the message. By then all workers are joined;
  /// call begin_epoch() before the next batch. Throws EnvironmentError if the batch did not come
  /// within timeout_seconds. Also throws it if the consumer kept max_held batches for so long (60 s
  /// without a timeout) that it must be waiting for itself.
  std::optional<HostBatch> next();

  /// The most batches that were ever started and not yet handed out at one time: at most
  /// prefetch_factor * num_workers. For tests.
  int64_t most_in_flight() const;

 private:
  /// A batch on its way from a worker to the consumer.
  struct Made {
    BatchBuffer* buffer = nullptr;
    std::exception_ptr error;
    bool ready = false;
  };

  int64_t size_of(int64_t batch) const;
  Made make(int64_t batch) noexcept;
  void fill(int64_t batch, BatchBuffer& buffer) const;

  void work(int worker);
  int64_t first_batch_of(int worker) const;
  bool wait_for_epoch(int worker, int64_t& epochs_seen);
  /// Enforces the prefetch bound: waits until `batch` is one of the window_ batches from
  /// next_batch_ on; turn_[worker] wakes the worker. Counts the batch as in flight, and remembers
  /// the most. Returns false at once, without counting, if the epoch is cancelled.
  bool wait_for_turn(int worker, int64_t batch);
  void hand_over(int64_t batch, Made made);

  void start_workers();
  void stop_workers();

  void check_positions() const;
  void wait_for_room();
  Made wait_for_batch();
  void end_epoch();
  void abandon_epoch(int64_t batch, const Made& made);  // throws its error

  const ImageSource& source_;
  const DataLoaderOptions options_;
  const std::shared_ptr<EpochOrder> order_;
  const int64_t batch_size_;
  const int64_t batches_;
  const int64_t window_;  // prefetch_factor * num_workers
  std::shared_ptr<BatchPool> pool_;

  // Written by the consumer while no worker is inside an epoch.
  std::vector<int64_t> positions_;
  int64_t first_batch_ = 0;
  int64_t epoch_ = -1;  // -1: outside an epoch

  // Only this is read within a batch, between two samples: stopping never waits for a batch.
  std::atomic<bool> cancelled_ = true;

  mutable std::mutex mutex_;
  std::condition_variable batch_ready_;        // to the consumer
  std::condition_variable workers_idle_;       // to the consumer
  std::vector<std::condition_variable> turn_;  // to each worker
  std::vector<Made> made_;                     // batch b at b % window_
  int64_t next_batch_ = 0;                     // the one that next() gives next
  int64_t epochs_begun_ = 0;
  int workers_busy_ = 0;  // inside an epoch
  bool quit_ = false;
  int64_t in_flight_ = 0;
  int64_t most_in_flight_ = 0;

  std::vector<std::thread> workers_;  // last: they use all of the above
};

}  // namespace lockstep
