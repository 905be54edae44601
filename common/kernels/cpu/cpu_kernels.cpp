#include "common/kernels/cpu/cpu_kernels.h"

#include "common/kernels/body_kernels.inl"
#include "common/kernels/cpu/reduce.h"

namespace lockstep {

template class BodyKernels<cpu::Launch>;

namespace cpu {
namespace {

/// The engine of a stream's worker, which calls this.
Engine& engine_of(CpuStream& stream, std::unique_ptr<Engine> (*make)(CpuStream&)) {
  std::shared_ptr<void>& state = stream.worker_state();
  if (!state) state = std::shared_ptr<Engine>(make(stream));
  return *static_cast<Engine*>(state.get());
}

}  // namespace

void CpuKernels::conv2d(Stream s, const Window2d& g, const Tensor& x, const Tensor& weight,
                        const Tensor& bias, const Tensor& y) {
  if (g.empty()) return;
  cpu_stream(s).enqueue(
      "conv2d", [=, stream = &cpu_stream(s), make = engine_.make, x = x.on(s), w = weight.on(s),
                 b = bias.on(s), y = y.on(s)] { engine_of(*stream, make).conv2d(g, x, w, b, y); });
}

void CpuKernels::conv2d_backward_input(Stream s, const Window2d& g, const Tensor& dy,
                                       const Tensor& weight, const Tensor& dx) {
  if (g.empty()) return;
  cpu_stream(s).enqueue("conv2d_backward_input", [=, stream = &cpu_stream(s), make = engine_.make,
                                                  dy = dy.on(s), w = weight.on(s), dx = dx.on(s)] {
    engine_of(*stream, make).conv2d_backward_input(g, dy, w, dx);
  });
}

void CpuKernels::conv2d_backward_parameters(Stream s, const Window2d& g, const Tensor& x,
                                            const Tensor& dy, const Tensor& dweight,
                                            const Tensor& dbias) {
  if (g.empty()) return;
  cpu_stream(s).enqueue("conv2d_backward_parameters",
                        [=, stream = &cpu_stream(s), make = engine_.make, x = x.on(s),
                         dy = dy.on(s), dw = dweight.on(s), db = dbias.on(s)] {
                          engine_of(*stream, make).conv2d_backward_parameters(g, x, dy, dw, db);
                        });
}

void CpuKernels::matmul(Stream s, const MatMul& shape, const Tensor& a, const Tensor& b,
                        const Tensor& c) {
  if (shape.empty()) {
    if (!shape.accumulate) fill(s, 0, c);
    return;
  }
  cpu_stream(s).enqueue("matmul",
                        [=, stream = &cpu_stream(s), make = engine_.make, a = a.on(s), b = b.on(s),
                         c = c.on(s)] { engine_of(*stream, make).matmul(shape, a, b, c); });
}

}  // namespace cpu
}  // namespace lockstep
