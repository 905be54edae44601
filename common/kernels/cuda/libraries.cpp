#include "common/kernels/cuda/libraries.h"

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/cuda_stream.h"

namespace lockstep::cuda {
namespace {

std::pair<int, int> compute_capability(int device, const std::string& name) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "cudaDeviceGetAttribute", name);
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        "cudaDeviceGetAttribute", name);
  return {major, minor};
}

/// NVIDIA's recommendation (cuBLAS documentation, cublasSetWorkspace): 32 MiB from Hopper on.
size_t recommended_workspace(int device, const std::string& name) {
  return size_t{compute_capability(device, name).first >= 9 ? 32u : 4u} << 20;
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
  // Where cuBLAS divides a long sum, it adds the parts in float32, too.
  const int math = (tf32_ ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH) |
                   CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
  check(cublasSetMathMode(made, cublasMath_t(math)), "cublasSetMathMode", device_);
}

/// bf16 came with compute capability 8.0.
void Libraries::require_products_of(ElementType type) const {
  if (type != ElementType::bf16) return;
  const auto [major, minor] = compute_capability(stream_.device().id().index, device_);
  if (major >= 8) return;
  fail<DeviceError>(
      "{}: compute capability {}.{} has no products of bf16, 8.0 has; give "
      "--precision fp16 or float32",
      device_, major, minor);
}

template <class T>
T* Libraries::scratch(int64_t n) {
  return static_cast<T*>(stream_.scratch(size_t(n) * sizeof(T)));
}

/// As matmul(). cuBLAS stores columns first. A row-major matrix read in that way is its transpose,
/// so we ask for C^T = op(B)^T op(A)^T: the operands change places, and each keeps its flag.
template <class T>
void Libraries::product(const MatMul& shape, const T* a, const T* b, T* c) {
  if (!cublas_) make_cublas();
  require_products_of(kTypeOf<T>);
  const int m = static_cast<int>(shape.m), n = static_cast<int>(shape.n),
            k = static_cast<int>(shape.k);
  const auto op_a = operation(shape.transpose_a), op_b = operation(shape.transpose_b);
  const int a_line = shape.transpose_a ? m : k, b_line = shape.transpose_b ? k : n;
  const float* const beta = shape.accumulate ? &kOne : &kZero;
  if constexpr (std::is_same_v<T, Real>) {
    check(cublasSgemm(cublas_.get(), op_b, op_a, n, m, k, &kOne, b, b_line, a, a_line, beta, c, n),
          "cublasSgemm", device_);
  } else {
    const cudaDataType_t type = std::is_same_v<T, Bf16> ? CUDA_R_16BF : CUDA_R_16F;
    check(cublasGemmEx(cublas_.get(), op_b, op_a, n, m, k, &kOne, b, type, b_line, a, type, a_line,
                       beta, c, type, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx", device_);
  }
}

/// As matmul(), but the product is rounded to T, into `rounded`, before it is added.
template <class T, class C>
void Libraries::add_rounded(const MatMul& shape, const T* a, const T* b, T* rounded, C* c) {
  MatMul alone = shape;
  alone.accumulate = false;
  product(alone, a, b, rounded);
  const int64_t n = shape.m * shape.n;
  if (!shape.accumulate) {
    check(cudaMemsetAsync(c, 0, size_t(n) * sizeof(C), raw_), "cudaMemsetAsync", device_);
  }
  add_to(stream_, n, rounded, c);
}

template <class T, class C>
void Libraries::matmul(const MatMul& shape, const T* a, const T* b, C* c) {
  if constexpr (std::is_same_v<T, C>) {
    product(shape, a, b, c);
  } else {
    add_rounded(shape, a, b, scratch<T>(shape.m * shape.n), c);
  }
}

// --- Convolutions that are matrix products ------------------------------------------------------

// A window of one pixel makes a convolution a product: the pixels that it sees, [pixels, in], by
// the weights, [out, in] transposed. cuBLAS has it up to 30 times as fast as the deterministic
// algorithms of cuDNN (docs/results/convolutions-h200.md).

namespace {

bool is_product(const Window2d& g) { return g.kernel == 1 && g.padding == 0; }

int64_t pixels(const Window2d& g) { return g.batch * g.out_height * g.out_width; }

/// Numbers of the pixels that are copied, up to where the next may begin (256 bytes).
int64_t copied(const Window2d& g) {
  return g.stride > 1 ? (pixels(g) * g.in_channels + 127) / 128 * 128 : 0;
}

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

/// The pixels of x that the window sees: x itself, or a copy in `room`.
template <class T>
const T* Libraries::seen_pixels(const Window2d& g, const T* x, T* room) {
  if (g.stride == 1) return x;
  take_pixels(stream_, pixel_grid(g, g.input()), x, room);
  return room;
}

template <class T>
bool Libraries::conv2d(const Window2d& g, const T* x, const T* weight, const Real* bias, T* y) {
  if (!is_product(g)) return conv2d_by_cudnn(g, x, weight, bias, y);
  product({.m = pixels(g),
           .n = g.out_channels,
           .k = g.in_channels,
           .transpose_a = false,
           .transpose_b = true,
           .accumulate = false},
          seen_pixels(g, x, scratch<T>(copied(g))), weight, y);
  return false;
}

template <class T>
void Libraries::conv2d_backward_input(const Window2d& g, const T* dy, const T* weight, T* dx) {
  if (!is_product(g)) return backward_input_by_cudnn(g, dy, weight, dx);
  T* const of_seen = g.stride > 1 ? scratch<T>(copied(g)) : dx;
  product({.m = pixels(g),
           .n = g.in_channels,
           .k = g.out_channels,
           .transpose_a = false,
           .transpose_b = false,
           .accumulate = false},
          dy, weight, of_seen);
  if (g.stride > 1) spread_pixels(stream_, pixel_grid(g, g.input()), of_seen, dx);
}

template <class T>
void Libraries::conv2d_backward_weight(const Window2d& g, const T* x, const T* dy, Real* dweight) {
  if (!is_product(g)) return backward_weight_by_cudnn(g, x, dy, dweight);
  const MatMul shape{.m = g.out_channels,
                     .n = g.in_channels,
                     .k = pixels(g),
                     .transpose_a = true,
                     .transpose_b = false,
                     .accumulate = true};
  constexpr bool kRounds = !std::is_same_v<T, Real>;
  T* const room = scratch<T>(copied(g) + (kRounds ? g.weight().elements() : 0));
  const T* const seen = seen_pixels(g, x, room);
  if constexpr (kRounds) {
    add_rounded(shape, dy, seen, room + copied(g), dweight);
  } else {
    product(shape, dy, seen, dweight);
  }
}

// --- For numbers of each type --------------------------------------------------------------------

template void Libraries::matmul(const MatMul&, const Real*, const Real*, Real*);
template bool Libraries::conv2d(const Window2d&, const Real*, const Real*, const Real*, Real*);
template void Libraries::conv2d_backward_input(const Window2d&, const Real*, const Real*, Real*);
template void Libraries::conv2d_backward_weight(const Window2d&, const Real*, const Real*, Real*);

template void Libraries::matmul(const MatMul&, const Bf16*, const Bf16*, Bf16*);
template void Libraries::matmul(const MatMul&, const Bf16*, const Bf16*, Real*);
template bool Libraries::conv2d(const Window2d&, const Bf16*, const Bf16*, const Real*, Bf16*);
template void Libraries::conv2d_backward_input(const Window2d&, const Bf16*, const Bf16*, Bf16*);
template void Libraries::conv2d_backward_weight(const Window2d&, const Bf16*, const Bf16*, Real*);

template void Libraries::matmul(const MatMul&, const Fp16*, const Fp16*, Fp16*);
template void Libraries::matmul(const MatMul&, const Fp16*, const Fp16*, Real*);
template bool Libraries::conv2d(const Window2d&, const Fp16*, const Fp16*, const Real*, Fp16*);
template void Libraries::conv2d_backward_input(const Window2d&, const Fp16*, const Fp16*, Fp16*);
template void Libraries::conv2d_backward_weight(const Window2d&, const Fp16*, const Fp16*, Real*);

}  // namespace lockstep::cuda
