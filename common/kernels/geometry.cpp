#include "common/kernels/geometry.h"

#include "common/core/error.h"

namespace lockstep {

Window2d make_window(const std::string& layer, const Shape& x, int64_t in_channels,
                     int64_t out_channels, int64_t kernel, int64_t stride, int64_t padding) {
  // Each layer asks at every step: the words are made only where a check fails.
  if (x.axes() != 4) {
    fail<BadInput>("{}: input {} is not [batch, height, width, channels]", layer, x.text());
  }
  if (x[3] != in_channels) {
    require_equal(x[3], in_channels, layer + ": channels of input " + x.text());
  }
  const auto extent = [&](int64_t in) {
    const int64_t room = in + 2 * padding - kernel;
    if (room < 0) {
      fail<BadInput>("{}: input {} with padding {} is smaller than the {}x{} window", layer,
                     x.text(), padding, kernel, kernel);
    }
    return room / stride + 1;
  };
  return {.batch = x[0],
          .in_height = x[1],
          .in_width = x[2],
          .in_channels = in_channels,
          .out_height = extent(x[1]),
          .out_width = extent(x[2]),
          .out_channels = out_channels,
          .kernel = kernel,
          .stride = stride,
          .padding = padding};
}

}  // namespace lockstep
