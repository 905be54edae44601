#pragma once
// The catalogue on CPU devices: the shared bodies in vectorised loops (launch.h, reduce.h),
// convolution and matrix product by an engine. kernels/kernels.h says what each operation does.

#include <string>
#include <utility>

#include "common/kernels/body_kernels.h"
#include "common/kernels/cpu/engine.h"

namespace lockstep::cpu {

struct Launch;

class CpuKernels final : public BodyKernels<Launch> {
 public:
  explicit CpuKernels(EngineMaker engine) : engine_(std::move(engine)) {}

  std::string engine() const override { return engine_.name; }
  void conv2d(Stream, const Window2d&, const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Tensor& y) override;
  void conv2d_backward_input(Stream, const Window2d&, const Tensor& dy, const Tensor& weight,
                             const Tensor& dx) override;
  void conv2d_backward_parameters(Stream, const Window2d&, const Tensor& x, const Tensor& dy,
                                  const Tensor& dweight, const Tensor& dbias) override;
  void matmul(Stream, const MatMul&, const Tensor& a, const Tensor& b, const Tensor& c) override;

 private:
  EngineMaker engine_;
};

}  // namespace lockstep::cpu
