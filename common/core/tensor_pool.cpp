#include "common/core/tensor_pool.h"

#include <utility>

namespace lockstep {

std::shared_ptr<Buffer> TensorPool::take_block(size_t bytes) {
  // The smallest free block that fits, but none more than twice too large: a short last batch may
  // use the blocks of a full one, a scalar must not occupy an activation's.
  bytes = (std::max<size_t>(bytes, 1) + 63) / 64 * 64;
  FreeList::iterator best = free_->end();
  for (auto block = free_->begin(); block != free_->end(); ++block) {
    const size_t size = (*block)->bytes();
    if (size < bytes || size > 2 * bytes) continue;
    if (best == free_->end() || size < (*best)->bytes()) best = block;
  }
  std::unique_ptr<Buffer> block;
  if (best == free_->end()) {
    block = std::make_unique<Buffer>(stream_, bytes);
    ++allocations_;
  } else {
    block = std::exchange(*best, std::move(free_->back()));
    free_->pop_back();
  }
  return {block.release(), [free = free_](Buffer* returned) { free->emplace_back(returned); }};
}

}  // namespace lockstep
