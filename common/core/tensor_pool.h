#pragma once
// Memory that is used again and again in the order of one stream.

#include <memory>
#include <vector>

#include "common/core/tensor.h"

namespace lockstep {

/// Hands out tensors of one stream and takes them back when their last handle is destroyed. Blocks
/// are reused at once: the next user of a block enqueues its work after the previous user's, on the
/// same stream. So a steady training step allocates nothing, and the tensors held at the same time
/// decide the peak.
/// A tensor that another stream used must be handed back before its handle is destroyed (see
/// Buffer).
class TensorPool {
 public:
  explicit TensorPool(Stream stream) : stream_(stream), free_(std::make_shared<FreeList>()) {}

  /// A tensor with undefined contents.
  template <class T>
  BasicTensor<T> take(const Shape& shape) {
    return BasicTensor<T>(take_block(shape.bytes(sizeof(T))), shape);
  }
  Stream stream() const { return stream_; }
  /// Blocks ever allocated: constant in a steady state.
  int64_t allocations() const { return allocations_; }

 private:
  using FreeList = std::vector<std::unique_ptr<Buffer>>;
  std::shared_ptr<Buffer> take_block(size_t bytes);

  Stream stream_;
  std::shared_ptr<FreeList> free_;  // outlives the pool while tensors are out
  int64_t allocations_ = 0;
};

}  // namespace lockstep
