#pragma once
// cuBLAS and cuDNN on one stream.

#include <memory>
#include <optional>

#include "common/core/tensor.h"
#include "common/kernels/cuda/check.h"
#include "common/kernels/cuda/convolution.h"
#include "common/kernels/geometry.h"

namespace lockstep::cuda {

/// The handles of the libraries belong to one stream, as a stream belongs to one host thread at a
/// time. A handle is made when it is first needed: it costs tenths of a second.
class Libraries {
 public:
  Libraries(CudaStream& stream, cudaStream_t raw) : stream_(stream), raw_(raw) {}

  /// As Kernels::matmul.
  void matmul(const MatMul& shape, const Real* a, const Real* b, Real* c);
  Convolutions& convolutions();

 private:
  cublasHandle_t cublas();

  CudaStream& stream_;
  cudaStream_t raw_;
  std::unique_ptr<Buffer> workspace_;  // cuBLAS's
  CublasHandle cublas_;
  std::optional<Convolutions> convolutions_;
};

}  // namespace lockstep::cuda
