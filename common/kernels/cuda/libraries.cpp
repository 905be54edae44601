#include "common/kernels/cuda/libraries.h"

#include "common/core/device.h"
#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/cuda_stream.h"

namespace lockstep::cuda {
namespace {

/// NVIDIA's recommendation (cuBLAS documentation, cublasSetWorkspace): 32 MiB from Hopper on.
size_t recommended_workspace(int device, const std::string& name) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "cudaDeviceGetAttribute", name);
  return size_t{major >= 9 ? 32u : 4u} << 20;
}

cublasOperation_t operation(bool transpose) { return transpose ? CUBLAS_OP_T : CUBLAS_OP_N; }

}  // namespace

Libraries::Libraries(CudaStream& stream, cudaStream_t raw)
    : stream_(stream),
      raw_(raw),
      device_(stream.device().name()),
      tf32_(stream.device().options().tf32),
      channels_first_(stream.device().options().nchw) {}

// --- Matrix products (cuBLAS) -------------------------------------------------------------------

void Libraries::make_cublas() {
  cublasHandle_t made = nullptr;
  check(cublasCreate(&made), "cublasCreate", device_);
  cublas_.reset(made);
  check(cublasSetStream(made, raw_), "cublasSetStream", device_);
  // A workspace of our own is counted, and keeps results the same from run to run.
  workspace_ = std::make_unique<Buffer>(
      Stream(stream_), recommended_workspace(stream_.device().id().index, device_));
  check(cublasSetWorkspace(made, workspace_->data(), workspace_->bytes()), "cublasSetWorkspace",
        device_);
  check(cublasSetMathMode(made, tf32_ ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH),
        "cublasSetMathMode", device_);
}

/// cuBLAS stores columns first. A row-major matrix read in that way is its transpose, so we ask for
/// C^T = op(B)^T op(A)^T: the operands change places, and each keeps its flag.
void Libraries::matmul(const MatMul& shape, const Real* a, const Real* b, Real* c) {
  if (!cublas_) make_cublas();
  const int m = static_cast<int>(shape.m), n = static_cast<int>(shape.n),
            k = static_cast<int>(shape.k);
  const float* const beta = shape.accumulate ? &kOne : &kZero;
  check(
      cublasSgemm(cublas_.get(), operation(shape.transpose_b), operation(shape.transpose_a), n, m,
                  k, &kOne, b, shape.transpose_b ? k : n, a, shape.transpose_a ? m : k, beta, c, n),
      "cublasSgemm", device_);
}

// --- Convolutions that are matrix products ------------------------------------------------------

// A window of one pixel makes a convolution a product: the pixels that it sees, [pixels, in], by
// the weights, [out, in] transposed. cuBLAS has it up to 30 times as fast as the deterministic
// algorithms of cuDNN (docs/results/convolutions-h200.md).

namespace {

bool is_product(const Window2d& g) { return g.kernel == 1 && g.padding == 0; }

int64_t pixels(const Window2d& g) { return g.batch * g.out_height * g.out_width; }

}  // namespace

PixelGrid pixel_grid(const Window2d& g, const Shape& many) {
  return {.images = g.batch,
          .many_height = many[1],
          .many_width = many[2],
          .few_height = g.out_height,
          .few_width = g.out_width,
          .channels = many[3],
          .stride = g.stride};
}

/// The pixels of x that the window sees: x itself, or a copy in scratch memory.
const Real* Libraries::seen_pixels(const Window2d& g, const Real* x) {
  if (g.stride == 1) return x;
  auto* const seen =
      static_cast<Real*>(stream_.scratch(pixels(g) * g.in_channels * int64_t{sizeof(Real)}));
  take_pixels(stream_, pixel_grid(g, g.input()), x, seen);
  return seen;
}

bool Libraries::conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias,
                       Real* y) {
  if (!is_product(g)) return conv2d_by_cudnn(g, x, weight, bias, y);
  matmul({.m = pixels(g),
          .n = g.out_channels,
          .k = g.in_channels,
          .transpose_a = false,
          .transpose_b = true,
          .accumulate = false},
         seen_pixels(g, x), weight, y);
  return false;
}

void Libraries::conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight,
                                      Real* dx) {
  if (!is_product(g)) return backward_input_by_cudnn(g, dy, weight, dx);
  Real* of_seen = dx;
  if (g.stride > 1) {
    of_seen =
        static_cast<Real*>(stream_.scratch(pixels(g) * g.in_channels * int64_t{sizeof(Real)}));
  }
  matmul({.m = pixels(g),
          .n = g.in_channels,
          .k = g.out_channels,
          .transpose_a = false,
          .transpose_b = false,
          .accumulate = false},
         dy, weight, of_seen);
  if (g.stride > 1) spread_pixels(stream_, pixel_grid(g, g.input()), of_seen, dx);
}

void Libraries::conv2d_backward_weight(const Window2d& g, const Real* x, const Real* dy,
                                       Real* dweight) {
  if (!is_product(g)) return backward_weight_by_cudnn(g, x, dy, dweight);
  matmul({.m = g.out_channels,
          .n = g.in_channels,
          .k = pixels(g),
          .transpose_a = true,
          .transpose_b = false,
          .accumulate = true},
         dy, seen_pixels(g, x), dweight);
}

}  // namespace lockstep::cuda
