#include "common/kernels/cuda/libraries.h"

#include "common/core/device.h"
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

cublasHandle_t Libraries::cublas() {
  if (cublas_) return cublas_.get();
  const std::string device = stream_.device().name();
  cublasHandle_t made = nullptr;
  check(cublasCreate(&made), "cublasCreate", device);
  cublas_.reset(made);
  check(cublasSetStream(made, raw_), "cublasSetStream", device);
  // A workspace of our own is counted, and keeps results the same from run to run.
  workspace_ = std::make_unique<Buffer>(Stream(stream_),
                                        recommended_workspace(stream_.device().id().index, device));
  check(cublasSetWorkspace(made, workspace_->data(), workspace_->bytes()), "cublasSetWorkspace",
        device);
  const bool tf32 = stream_.device().options().tf32;
  check(cublasSetMathMode(made, tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH),
        "cublasSetMathMode", device);
  return made;
}

/// cuBLAS stores columns first. A row-major matrix read in that way is its transpose, so we ask for
/// C^T = op(B)^T op(A)^T: the operands change places, and each keeps its flag.
void Libraries::matmul(const MatMul& shape, const Real* a, const Real* b, Real* c) {
  const int m = static_cast<int>(shape.m), n = static_cast<int>(shape.n),
            k = static_cast<int>(shape.k);
  const float alpha = 1, beta = shape.accumulate ? 1 : 0;
  check(
      cublasSgemm(cublas(), operation(shape.transpose_b), operation(shape.transpose_a), n, m, k,
                  &alpha, b, shape.transpose_b ? k : n, a, shape.transpose_a ? m : k, &beta, c, n),
      "cublasSgemm", stream_.device().name());
}

Convolutions& Libraries::convolutions() {
  if (!convolutions_) convolutions_.emplace(stream_, raw_);
  return *convolutions_;
}

}  // namespace lockstep::cuda
