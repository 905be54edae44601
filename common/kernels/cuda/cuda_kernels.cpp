#include "common/kernels/cuda/cuda_kernels.h"

#include "common/core/error.h"
#include "common/kernels/cuda/cuda_stream.h"
#include "common/kernels/cuda/libraries.h"

namespace lockstep::cuda {

std::string CudaKernels::engine() const {
  const size_t version = cudnnGetVersion();  // 91900 for 9.19.0
  return fmt::format("cuDNN {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void CudaKernels::conv2d(Stream s, const Window2d& g, const Tensor& x, const Tensor& weight,
                         const Tensor& bias, const Tensor& y) {
  if (g.empty()) return;
  CudaStream& stream = cuda_stream(s);
  bool has_bias = false;
  stream.enqueue("conv2d", [&](cudaStream_t) {
    has_bias =
        stream.libraries().convolutions().forward(g, x.on(s), weight.on(s), bias.on(s), y.on(s));
  });
  if (!has_bias) add_bias(s, bias, /*relu=*/false, y);
}

void CudaKernels::conv2d_backward_input(Stream s, const Window2d& g, const Tensor& dy,
                                        const Tensor& weight, const Tensor& dx) {
  if (g.empty()) return;
  CudaStream& stream = cuda_stream(s);
  stream.enqueue("conv2d_backward_input", [&](cudaStream_t) {
    stream.libraries().convolutions().backward_input(g, dy.on(s), weight.on(s), dx.on(s));
  });
}

void CudaKernels::conv2d_backward_parameters(Stream s, const Window2d& g, const Tensor& x,
                                             const Tensor& dy, const Tensor& dweight,
                                             const Tensor& dbias) {
  if (g.empty()) return;
  CudaStream& stream = cuda_stream(s);
  stream.enqueue("conv2d_backward_parameters", [&](cudaStream_t) {
    stream.libraries().convolutions().backward_weight(g, x.on(s), dy.on(s), dweight.on(s));
  });
  add_column_sums(s, dy, dbias);
}

void CudaKernels::matmul(Stream s, const MatMul& shape, const Tensor& a, const Tensor& b,
                         const Tensor& c) {
  if (shape.empty()) {
    if (!shape.accumulate) fill(s, 0, c);
    return;
  }
  CudaStream& stream = cuda_stream(s);
  stream.enqueue(
      "matmul", [&](cudaStream_t) { stream.libraries().matmul(shape, a.on(s), b.on(s), c.on(s)); });
}

}  // namespace lockstep::cuda
