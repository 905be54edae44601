#include "common/core/tensor.h"

#include <new>
#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/core/text.h"

namespace lockstep {
namespace {

void* allocate(Stream home, size_t bytes) try {
  return home.backend().allocate(bytes);
} catch (const std::bad_alloc&) {
  fail<DeviceError>(
      "{}: no room for {:.1f} MiB beside the {:.1f} MiB in use{}; use a smaller batch "
      "or model, or more devices",
      home.device().name(), double(bytes) / 1048576.0,
      double(home.device().memory().current()) / 1048576.0, home.device().memory_note());
}

}  // namespace

Buffer::Buffer(Stream home, size_t bytes)
    : home_(home), bytes_(bytes), data_(allocate(home, bytes)) {
  home_.device().memory().add(static_cast<int64_t>(bytes_));
}

Buffer::~Buffer() {
  home_.backend().release(data_, bytes_);
  home_.device().memory().subtract(static_cast<int64_t>(bytes_));
}

// The checks of the templates in tensor.h are here, so that kernels, which include that header, are
// compiled without the formatting library.

int64_t Shape::product(size_t first) const {
  int64_t product = 1;
  bool empty = false;
  for (size_t axis = first; axis < extents_.size(); ++axis) {
    empty = empty || extents_[axis] == 0;
    const int64_t factor = extents_[axis] == 0 ? 1 : extents_[axis];
    // The host multiplies some hundred times per step: it names the shape only where it must.
    if (factor <= 0 || __builtin_mul_overflow(product, factor, &product)) {
      fail<BadInput>(
          "shape {}: found {} as an extent, expected numbers from 0 on whose product is less "
          "than 2^63",
          text(), extents_[axis]);
    }
  }
  return empty ? 0 : product;
}

size_t Shape::bytes(size_t element) const {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(elements(), element, &bytes)) {
    fail<BadInput>("shape {}: found {} elements of {} bytes, expected less than 2^63 bytes", text(),
                   elements(), element);
  }
  return size_t(bytes);
}

std::string Shape::text() const { return fmt::format("[{}]", listed(extents_)); }

void require_same_elements(const Shape& found, const Shape& expected) {
  if (found.elements() == expected.elements()) return;
  require_equal(found.elements(), expected.elements(),
                "elements after reshaping " + expected.text());
}

void require_within(const char* what, int64_t first, int64_t count, int64_t extent,
                    const Shape& shape) {
  if (first >= 0 && count >= 0 && count <= extent && first <= extent - count) return;
  fail<BadInput>("{} {} to {} are not in a tensor of shape {}", what, first,
                 int64_t(uint64_t(first) + uint64_t(count)), shape.text());
}

void require_values(int64_t count, const Shape& shape) {
  require_equal(count, shape.elements(), "values for a tensor of shape " + shape.text());
}

void require_readable(Stream home, const void* data, const Shape& shape, bool floating) {
  home.device().require_readable(data, shape, floating);
}

void fail_elsewhere(const Shape& shape, Stream home, Stream s) {
  fail<BadInput>("a tensor {} is on {}, and an operation of {} uses it; copy it there first",
                 shape.text(), home.device().name(), s.device().name());
}

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
