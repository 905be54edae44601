#pragma once
// The catalogue on a GPU: the shared bodies as kernels (launch.cuh, reduce.cuh), convolution by
// cuDNN, matrix products by cuBLAS. kernels/kernels.h says what each operation does.

#include "common/kernels/body_kernels.h"
#include "common/kernels/cuda/check.h"

namespace lockstep::cuda {

struct Launch;

class CudaKernels final : public BodyKernels<Launch> {
 public:
  std::string engine() const override;
  void conv2d(Stream, const Window2d&, const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Tensor& y) override;
  void conv2d_backward_input(Stream, const Window2d&, const Tensor& dy, const Tensor& weight,
                             const Tensor& dx) override;
  void conv2d_backward_parameters(Stream, const Window2d&, const Tensor& x, const Tensor& dy,
                                  const Tensor& dweight, const Tensor& dbias) override;
  void matmul(Stream, const MatMul&, const Tensor& a, const Tensor& b, const Tensor& c) override;
};

/// cudaErrorNoKernelImageForDevice if this build has no code for the current GPU.
cudaError_t kernels_fit_current_device();

}  // namespace lockstep::cuda
