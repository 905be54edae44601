#include "common/core/tensor.h"

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/listed.h"

namespace lockstep {

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

void fail_elsewhere(const Shape& shape, Stream home, Stream s) {
  fail<BadInput>("a tensor {} is on {}, and an operation of {} uses it; copy it there first",
                 shape.text(), home.device().name(), s.device().name());
}

}  // namespace lockstep
