#pragma once
// Batches in host memory, and the pool that their memory returns to.
//
// The consumer of a batch may still be copying from it, asynchronously, when the loader has ended
// or is gone. So a batch owns a share of the pool: the memory is freed with the last batch.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace lockstep {

/// Gets `bytes` of host memory, aligned to 64 bytes or more; freed with its last owner. A CUDA
/// backend passes an allocator of page-locked memory.
using HostAllocator = std::function<std::shared_ptr<void>(size_t bytes)>;

/// Plain memory aligned to 64 bytes.
std::shared_ptr<void> allocate_host(size_t bytes);

/// Memory of one batch. Belongs to the pool; used by one maker, then by one batch at a time.
struct BatchBuffer {
  std::shared_ptr<void> memory;
  uint8_t* images = nullptr;
  int32_t* labels = nullptr;
};

/// A fixed number of equal buffers. All members may be called from any thread.
class BatchPool {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// Allocates everything at once: `buffers` buffers of `samples` images of `image_bytes` bytes
  /// each, with their labels.
  BatchPool(int64_t buffers, int64_t samples, int64_t image_bytes, const HostAllocator& allocate);

  /// A free buffer, to be filled; there always is a free one while the loader keeps to its bounds.
  BatchBuffer* take();
  /// Returns a buffer that was taken and has not become a batch.
  void put_back(BatchBuffer* buffer);

  /// The buffer is a batch in the consumer's hands until the last owner of the returned pointer is
  /// gone. The pointer owns a share of the pool, too.
  static std::shared_ptr<BatchBuffer> lend(const std::shared_ptr<BatchPool>& pool,
                                           BatchBuffer* buffer);
  /// Waits until the consumer holds fewer than `limit` batches; false when `deadline` passes first.
  bool wait_lent_below(int64_t limit, TimePoint deadline);

  int64_t lent() const;

 private:
  void reclaim(BatchBuffer* buffer);

  std::vector<BatchBuffer> buffers_;
  mutable std::mutex mutex_;
  std::condition_variable reclaimed_;
  std::vector<BatchBuffer*> free_;
  int64_t lent_ = 0;
};

/// One batch, or another owner of it. When the last owner is gone, the memory returns to the pool
/// and is written again: keep an owner until the last copy from the batch has ended. A batch may
/// outlive its loader.
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

}  // namespace lockstep
