// The catalogue on CPU devices: the shared bodies in vectorised loops (launch.h), convolution and
// matrix product by an engine (engine.h).

#include <memory>
#include <string>
#include <utility>

#include "common/kernels/cpu/engine.h"
#include "common/kernels/cpu/launch.h"
#include "common/kernels/kernels.inl"

namespace lockstep::cpu {
namespace {

/// For tasks: a call gives the engine of the stream's worker, which makes it at its first call.
auto workers_engine(Stream s, const EngineMaker& maker) {
  return [stream = &cpu_stream(s), make = maker.make]() -> Engine& {
    std::shared_ptr<void>& engine = stream->worker_state();
    if (!engine) engine = std::shared_ptr<Engine>(make(*stream));
    return *static_cast<Engine*>(engine.get());
  };
}

class CpuKernels final : public BodyKernels<Launch> {
 public:
  explicit CpuKernels(EngineMaker maker) : maker_(std::move(maker)) {}

  std::string engine() const override { return maker_.name; }

  void conv2d(Stream s, const Window2d& g, const Tensor& x, const Tensor& weight,
              const Tensor& bias, const Tensor& y) override {
    if (g.empty()) return;
    cpu_stream(s).enqueue(
        "conv2d", [=, engine = workers_engine(s, maker_), x = x.on(s), weight = weight.on(s),
                   bias = bias.on(s), y = y.on(s)] { engine().conv2d(g, x, weight, bias, y); });
  }

  void conv2d_backward_input(Stream s, const Window2d& g, const Tensor& dy, const Tensor& weight,
                             const Tensor& dx) override {
    if (g.empty()) return;
    cpu_stream(s).enqueue(
        "conv2d_backward_input",
        [=, engine = workers_engine(s, maker_), dy = dy.on(s), weight = weight.on(s),
         dx = dx.on(s)] { engine().conv2d_backward_input(g, dy, weight, dx); });
  }

  void conv2d_backward_parameters(Stream s, const Window2d& g, const Tensor& x, const Tensor& dy,
                                  const Tensor& dweight, const Tensor& dbias) override {
    if (g.empty()) return;
    cpu_stream(s).enqueue(
        "conv2d_backward_parameters",
        [=, engine = workers_engine(s, maker_), x = x.on(s), dy = dy.on(s), dweight = dweight.on(s),
         dbias = dbias.on(s)] { engine().conv2d_backward_parameters(g, x, dy, dweight, dbias); });
  }

  void matmul(Stream s, const MatMul& shape, const Tensor& a, const Tensor& b,
              const Tensor& c) override {
    if (shape.empty()) {
      if (!shape.accumulate) fill(s, 0, c);
      return;
    }
    cpu_stream(s).enqueue(
        "matmul", [=, engine = workers_engine(s, maker_), a = a.on(s), b = b.on(s), c = c.on(s)] {
          engine().matmul(shape, a, b, c);
        });
  }

 private:
  const EngineMaker maker_;
};

}  // namespace

std::unique_ptr<Kernels> make_kernels(EngineMaker engine) {
  return std::make_unique<CpuKernels>(std::move(engine));
}

}  // namespace lockstep::cpu
