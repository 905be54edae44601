#include "common/data/batch_pool.h"

#include <new>
#include <utility>

#include "common/core/error.h"

namespace lockstep {
namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

std::shared_ptr<void> allocate_host(size_t bytes) {
  constexpr std::align_val_t alignment{kAlignment};
  return {::operator new(bytes, alignment), [](void* p) { ::operator delete(p, alignment); }};
}

BatchPool::BatchPool(int64_t buffers, int64_t samples, int64_t image_bytes,
                     const HostAllocator& allocate)
    : buffers_(static_cast<size_t>(buffers)) {
  const size_t images = aligned(static_cast<size_t>(samples * image_bytes));
  const size_t labels = static_cast<size_t>(samples) * sizeof(int32_t);
  free_.reserve(buffers_.size());
  for (BatchBuffer& buffer : buffers_) {
    buffer.memory = allocate(images + labels);
    buffer.images = static_cast<uint8_t*>(buffer.memory.get());
    buffer.labels = reinterpret_cast<int32_t*>(buffer.images + images);
    free_.push_back(&buffer);
  }
}

BatchBuffer* BatchPool::take() {
  std::lock_guard lock(mutex_);
  require(!free_.empty(), "batch pool: all {} buffers are in use, expected a free one",
          buffers_.size());
  BatchBuffer* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void BatchPool::put_back(BatchBuffer* buffer) {
  std::lock_guard lock(mutex_);
  free_.push_back(buffer);
}

std::shared_ptr<BatchBuffer> BatchPool::lend(const std::shared_ptr<BatchPool>& pool,
                                             BatchBuffer* buffer) {
  std::lock_guard lock(pool->mutex_);
  ++pool->lent_;
  return {buffer, [pool](BatchBuffer* back) { pool->reclaim(back); }};
}

void BatchPool::reclaim(BatchBuffer* buffer) {
  std::lock_guard lock(mutex_);
  free_.push_back(buffer);
  --lent_;
  reclaimed_.notify_all();
}

bool BatchPool::wait_lent_below(int64_t limit, TimePoint deadline) {
  std::unique_lock lock(mutex_);
  return reclaimed_.wait_until(lock, deadline, [&] { return lent_ < limit; });
}

int64_t BatchPool::lent() const {
  std::lock_guard lock(mutex_);
  return lent_;
}

}  // namespace lockstep
