// The one file that nvcc compiles: every kernel of the project, made from the shared bodies.

#include <algorithm>
#include <string>
#include <utility>

#include "common/core/device.h"
#include "common/kernels/cuda/launch.cuh"
// The launchers come first: they say how nvcc is to compile the bodies.
#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/libraries.h"
#include "common/kernels/cuda/transpose.cuh"
#include "common/kernels/kernels.inl"

namespace lockstep::cuda {
namespace {

/// A window of one pixel makes a convolution a product of matrices: [pixels, in_channels] by the
/// weights [out_channels, in_channels], transposed. cuBLAS has that faster than cuDNN.
bool is_product(const Window2d& g) { return g.kernel == 1 && g.padding == 0; }

MatMul product(const Window2d& g) {
  return {.m = g.batch * g.out_height * g.out_width,
          .n = g.out_channels,
          .k = g.in_channels,
          .transpose_a = false,
          .transpose_b = true,
          .accumulate = false};
}

/// The pixels of x that such a convolution sees.
Shape pixels(const Window2d& g) { return {g.batch, g.out_height, g.out_width, g.in_channels}; }

/// The same window at every pixel: of its output, the convolution with a stride keeps every
/// stride-th pixel.
Window2d with_stride_1(const Window2d& g) {
  Window2d dense = g;
  dense.stride = 1;
  dense.out_height = g.in_height + 2 * g.padding - g.kernel + 1;
  dense.out_width = g.in_width + 2 * g.padding - g.kernel + 1;
  return dense;
}

/// Whether the gradient of the input is computed as that of the window at every pixel, with zeros
/// between the pixels of dy: then the fast algorithms serve, which know no stride. Measured to be
/// up to 4.8 times as fast in float32 (docs/results/convolutions-h200.md), not with tensor cores.
bool is_spread(Stream s, const Window2d& g) {
  return g.stride == 2 && g.kernel == 3 && std::min(g.in_channels, g.out_channels) >= 32 &&
         !s.device().options().tf32;
}

class CudaKernels final : public BodyKernels<Launch> {
 public:
  std::string engine() const override {
    const size_t version = cudnnGetVersion();  // 91900 for 9.19.0
    return "cuDNN " + std::to_string(version / 10000) + '.' + std::to_string(version / 100 % 100) +
           '.' + std::to_string(version % 100);
  }

  void conv2d(Stream s, const Window2d& g, const Tensor& x, const Tensor& weight,
              const Tensor& bias, const Tensor& y) override {
    if (g.empty()) return;
    if (is_product(g)) {
      matmul(s, product(g), pixels_of(s, g, x), weight, y);
      return add_bias(s, bias, /*relu=*/false, y);
    }
    CudaStream& stream = cuda_stream(s);
    bool has_bias = false;
    stream.enqueue("conv2d", [&](cudaStream_t) {
      has_bias = stream.libraries().conv2d(g, x.on(s), weight.on(s), bias.on(s), y.on(s));
    });
    if (!has_bias) add_bias(s, bias, /*relu=*/false, y);
  }

  void conv2d_backward_input(Stream s, const Window2d& g, const Tensor& dy, const Tensor& weight,
                             const Tensor& dx) override {
    if (g.empty()) return;
    if (is_product(g)) {
      MatMul to_input = product(g);
      std::swap(to_input.n, to_input.k);
      to_input.transpose_b = false;
      if (g.stride == 1) return matmul(s, to_input, dy, weight, dx);
      const Tensor gradients = Tensor::empty(s, pixels(g));
      matmul(s, to_input, dy, weight, gradients);
      return spread(s, gradients, g.stride, dx);
    }
    if (is_spread(s, g)) {
      const Window2d dense = with_stride_1(g);
      const Tensor spread_dy = Tensor::empty(s, dense.output());
      spread(s, dy, g.stride, spread_dy);
      return conv2d_backward_input(s, dense, spread_dy, weight, dx);
    }
    CudaStream& stream = cuda_stream(s);
    stream.enqueue("conv2d_backward_input", [&](cudaStream_t) {
      stream.libraries().conv2d_backward_input(g, dy.on(s), weight.on(s), dx.on(s));
    });
  }

  void conv2d_backward_parameters(Stream s, const Window2d& g, const Tensor& x, const Tensor& dy,
                                  const Tensor& dweight, const Tensor& dbias) override {
    if (g.empty()) return;
    if (is_product(g)) {
      const MatMul to_weight{.m = g.out_channels,
                             .n = g.in_channels,
                             .k = product(g).m,
                             .transpose_a = true,
                             .transpose_b = false,
                             .accumulate = true};
      matmul(s, to_weight, dy, pixels_of(s, g, x), dweight);
    } else {
      CudaStream& stream = cuda_stream(s);
      stream.enqueue("conv2d_backward_parameters", [&](cudaStream_t) {
        stream.libraries().conv2d_backward_weight(g, x.on(s), dy.on(s), dweight.on(s));
      });
    }
    add_column_sums(s, dy, dbias);
  }

  void matmul(Stream s, const MatMul& shape, const Tensor& a, const Tensor& b,
              const Tensor& c) override {
    if (shape.empty()) {
      if (!shape.accumulate) fill(s, 0, c);
      return;
    }
    CudaStream& stream = cuda_stream(s);
    stream.enqueue("matmul", [&](cudaStream_t) {
      stream.libraries().matmul(shape, a.on(s), b.on(s), c.on(s));
    });
  }

 private:
  static Tensor pixels_of(Stream s, const Window2d& g, const Tensor& x) {
    if (g.stride == 1) return x;
    Tensor taken = Tensor::empty(s, pixels(g));
    Launch::for_each_pixel(s, "take_pixels", taken.shape(),
                           bodies::TakePixels{x.on(s), g.in_height, g.in_width, g.out_height,
                                              g.out_width, g.in_channels, g.stride, taken.on(s)});
    return taken;
  }
  static void spread(Stream s, const Tensor& few, int64_t stride, const Tensor& many) {
    const Shape &from = few.shape(), &to = many.shape();
    Launch::for_each_pixel(
        s, "spread_pixels", to,
        bodies::SpreadPixels{few.on(s), from[1], from[2], to[1], to[2], to[3], stride, many.on(s)});
  }
};

}  // namespace

std::unique_ptr<Kernels> make_kernels() { return std::make_unique<CudaKernels>(); }

cudaError_t kernels_fit_current_device() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, each_kernel<uint32_t, bodies::Add>);
}

}  // namespace lockstep::cuda
