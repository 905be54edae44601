#include "common/kernels/cpu/cpu_kernels.h"

#include "common/kernels/body_kernels.inl"
#include "common/kernels/cpu/reduce.h"

namespace lockstep {

template class BodyKernels<cpu::Launch>;

namespace cpu {

void CpuKernels::conv2d(Stream s, const Window2d& g, const Tensor& x, const Tensor& weight,
                        const Tensor& bias, const Tensor& y) {
  if (g.empty()) return;
  cpu_stream(s).enqueue(
      "conv2d", [=, stream = &cpu_stream(s), engine = engine_.get(), x = x.on(s), w = weight.on(s),
                 b = bias.on(s), y = y.on(s)] { engine->conv2d(*stream, g, x, w, b, y); });
}

void CpuKernels::conv2d_backward_input(Stream s, const Window2d& g, const Tensor& dy,
                                       const Tensor& weight, const Tensor& dx) {
  if (g.empty()) return;
  cpu_stream(s).enqueue(
      "conv2d_backward_input",
      [=, stream = &cpu_stream(s), engine = engine_.get(), dy = dy.on(s), w = weight.on(s),
       dx = dx.on(s)] { engine->conv2d_backward_input(*stream, g, dy, w, dx); });
}

void CpuKernels::conv2d_backward_parameters(Stream s, const Window2d& g, const Tensor& x,
                                            const Tensor& dy, const Tensor& dweight,
                                            const Tensor& dbias) {
  if (g.empty()) return;
  cpu_stream(s).enqueue("conv2d_backward_parameters",
                        [=, stream = &cpu_stream(s), engine = engine_.get(), x = x.on(s),
                         dy = dy.on(s), dw = dweight.on(s), db = dbias.on(s)] {
                          engine->conv2d_backward_parameters(*stream, g, x, dy, dw, db);
                        });
}

void CpuKernels::matmul(Stream s, const MatMul& shape, const Tensor& a, const Tensor& b,
                        const Tensor& c) {
  if (shape.empty()) {
    if (!shape.accumulate) fill(s, 0, c);
    return;
  }
  cpu_stream(s).enqueue(
      "matmul", [=, stream = &cpu_stream(s), engine = engine_.get(), a = a.on(s), b = b.on(s),
                 c = c.on(s)] { engine->matmul(*stream, shape, a, b, c); });
}

}  // namespace cpu
}  // namespace lockstep
