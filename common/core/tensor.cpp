#include "common/core/tensor.h"

#include <fmt/ranges.h>

#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {

// The checks of the templates in tensor.h are here, so that kernels, which include that header, are
// compiled without the formatting library.

std::string Shape::text() const { return fmt::format("[{}]", fmt::join(extents_, ", ")); }

void require_same_elements(const Shape& found, const Shape& expected) {
  require_equal(found.elements(), expected.elements(),
                "elements after reshaping " + expected.text());
}

void require_within(const char* what, int64_t first, int64_t count, int64_t extent,
                    const Shape& shape) {
  require(first >= 0 && count >= 0 && first + count <= extent,
          "{} {} to {} are not in a tensor of shape {}", what, first, first + count, shape.text());
}

void require_values(int64_t count, const Shape& shape) {
  require_equal(count, shape.elements(), "values for a tensor of shape " + shape.text());
}

void fail_elsewhere(const Shape& shape, Stream home, Stream s) {
  fail<BadInput>("a tensor {} is on {}, and an operation of {} uses it; copy it there first",
                 shape.text(), home.device().name(), s.device().name());
}

}  // namespace lockstep
