// The catalogue on CPU devices: the shared bodies in vectorised loops (launch.h), convolution and
// matrix product by an engine (engine.h).

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "common/kernels/cpu/engine.h"
#include "common/kernels/cpu/launch.h"
#include "common/kernels/cpu/real_copies.h"
#include "common/kernels/kernels.inl"

namespace lockstep::cpu {
namespace {

/// What a stream's worker computes with.
struct Worker {
  std::unique_ptr<Engine> engine;
  Workspace copies;  // RealCopies
};

/// For tasks: a call gives the stream's worker, which is made at its first call.
auto worker_of(Stream s, const EngineMaker& maker) {
  return [stream = &cpu_stream(s), make = maker.make]() -> Worker& {
    std::shared_ptr<void>& worker = stream->worker_state();
    if (!worker) worker = std::shared_ptr<Worker>(new Worker{make(*stream), Workspace(*stream)});
    return *static_cast<Worker*>(worker.get());
  };
}

class CpuKernels final : public BodyKernels<Launch> {
 public:
  explicit CpuKernels(EngineMaker maker) : maker_(std::move(maker)) {}

  std::string engine() const override { return maker_.name; }

  void conv2d(Stream s, const Window2d& g, const AnyTensor& x, const AnyTensor& weight,
              const Tensor& bias, const AnyTensor& y) override {
    if (g.empty()) return;
    with_numbers(y.type(), [&](auto number) {
      using T = decltype(number);
      cpu_stream(s).enqueue(
          "conv2d", [=, worker = worker_of(s, maker_), x = x.on<T>(s), weight = weight.on<T>(s),
                     bias = bias.on(s), y = y.on<T>(s)] {
            const int64_t in = g.input().elements(), weights = g.weight().elements(),
                          out = g.output().elements();
            RealCopies<T> copies(worker().copies, {in, weights, out});
            Real* const sums = copies.room(y, out);
            worker().engine->conv2d(g, copies.widened(x, in), copies.widened(weight, weights), bias,
                                    sums);
            copies.round(sums, y, out);
          });
    });
  }

  void conv2d_backward_input(Stream s, const Window2d& g, const AnyTensor& dy,
                             const AnyTensor& weight, const AnyTensor& dx) override {
    if (g.empty()) return;
    with_numbers(dx.type(), [&](auto number) {
      using T = decltype(number);
      cpu_stream(s).enqueue(
          "conv2d_backward_input", [=, worker = worker_of(s, maker_), dy = dy.on<T>(s),
                                    weight = weight.on<T>(s), dx = dx.on<T>(s)] {
            const int64_t in = g.input().elements(), weights = g.weight().elements(),
                          out = g.output().elements();
            RealCopies<T> copies(worker().copies, {in, weights, out});
            Real* const sums = copies.room(dx, in);
            worker().engine->conv2d_backward_input(g, copies.widened(dy, out),
                                                   copies.widened(weight, weights), sums);
            copies.round(sums, dx, in);
          });
    });
  }

  void conv2d_backward_parameters(Stream s, const Window2d& g, const AnyTensor& x,
                                  const AnyTensor& dy, const Tensor& dweight,
                                  const Tensor& dbias) override {
    if (g.empty()) return;
    with_numbers(x.type(), [&](auto number) {
      using T = decltype(number);
      cpu_stream(s).enqueue("conv2d_backward_parameters",
                            [=, worker = worker_of(s, maker_), x = x.on<T>(s), dy = dy.on<T>(s),
                             dweight = dweight.on(s), dbias = dbias.on(s)] {
                              const int64_t in = g.input().elements(),
                                            weights = g.weight().elements(),
                                            out = g.output().elements();
                              RealCopies<T> copies(worker().copies, {in, weights, out});
                              const Real* const all_x = copies.widened(x, in);
                              const Real* const all_dy = copies.widened(dy, out);
                              Engine& engine = *worker().engine;
                              if constexpr (std::is_same_v<T, Real>) {
                                engine.conv2d_backward_parameters(g, all_x, all_dy, dweight, dbias);
                              } else {  // rounded before it is added
                                Real* const sums = copies.room(nullptr, weights);
                                std::fill_n(sums, weights, Real(0));
                                engine.conv2d_backward_parameters(g, all_x, all_dy, sums, dbias);
                                copies.add_rounded(sums, dweight, weights);
                              }
                            });
    });
  }

  void matmul(Stream s, const MatMul& shape, const AnyTensor& a, const AnyTensor& b,
              const AnyTensor& c) override {
    with_numbers(a.type(), [&](auto number) {
      using T = decltype(number);
      if (c.type() == kTypeOf<Real>) {
        multiply(s, shape, a.on<T>(s), b.on<T>(s), c.on<Real>(s));
      } else {
        multiply(s, shape, a.on<T>(s), b.on<T>(s), c.on<T>(s));
      }
    });
  }

 private:
  template <class T, class C>
  void multiply(Stream s, const MatMul& shape, const T* a, const T* b, C* c) {
    if (shape.empty() && shape.accumulate) return;
    cpu_stream(s).enqueue("matmul", [=, worker = worker_of(s, maker_)] {
      const int64_t m = shape.m, n = shape.n, k = shape.k;
      constexpr bool kRounds = !std::is_same_v<T, Real>;
      if (!shape.accumulate && (kRounds || shape.empty())) std::fill_n(c, m * n, C{});
      if (shape.empty()) return;
      Engine& engine = *worker().engine;
      if constexpr (!kRounds) {
        engine.matmul(shape, a, b, c);
      } else {  // before it adds
        RealCopies<T> copies(worker().copies, {m * k, k * n, m * n});
        Real* const sums = copies.room(nullptr, m * n);
        MatMul product = shape;
        product.accumulate = false;
        engine.matmul(product, copies.widened(a, m * k), copies.widened(b, k * n), sums);
        copies.add_rounded(sums, c, m * n);
      }
    });
  }

  const EngineMaker maker_;
};

}  // namespace

std::unique_ptr<Kernels> make_kernels(EngineMaker engine) {
  return std::make_unique<CpuKernels>(std::move(engine));
}

}  // namespace lockstep::cpu
