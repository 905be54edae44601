// The one file that nvcc compiles: every kernel of the project, made from the shared bodies.

#include <string>

#include "common/kernels/cuda/launch.cuh"
// The launchers come first: they say how nvcc is to compile the bodies.
#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/layouts.cuh"
#include "common/kernels/cuda/libraries.h"
#include "common/kernels/kernels.inl"

namespace lockstep::cuda {
namespace {

class CudaKernels final : public BodyKernels<Launch> {
 public:
  std::string engine() const override {
    const size_t version = cudnnGetVersion();  // 91900 for 9.19.0
    return "cuDNN " + std::to_string(version / 10000) + '.' + std::to_string(version / 100 % 100) +
           '.' + std::to_string(version % 100);
  }

  void conv2d(Stream s, const Window2d& g, const AnyTensor& x, const AnyTensor& weight,
              const Tensor& bias, const AnyTensor& y) override {
    if (g.empty()) return;
    CudaStream& stream = cuda_stream(s);
    bool has_bias = false;
    with_numbers(y.type(), [&](auto number) {
      using T = decltype(number);
      stream.enqueue("conv2d", [&](cudaStream_t) {
        has_bias =
            stream.libraries().conv2d(g, x.on<T>(s), weight.on<T>(s), bias.on(s), y.on<T>(s));
      });
    });
    if (!has_bias) add_bias(s, bias, /*relu=*/false, y);
  }

  void conv2d_backward_input(Stream s, const Window2d& g, const AnyTensor& dy,
                             const AnyTensor& weight, const AnyTensor& dx) override {
    if (g.empty()) return;
    CudaStream& stream = cuda_stream(s);
    with_numbers(dx.type(), [&](auto number) {
      using T = decltype(number);
      stream.enqueue("conv2d_backward_input", [&](cudaStream_t) {
        stream.libraries().conv2d_backward_input(g, dy.on<T>(s), weight.on<T>(s), dx.on<T>(s));
      });
    });
  }

  void conv2d_backward_parameters(Stream s, const Window2d& g, const AnyTensor& x,
                                  const AnyTensor& dy, const Tensor& dweight,
                                  const Tensor& dbias) override {
    if (g.empty()) return;
    CudaStream& stream = cuda_stream(s);
    with_numbers(x.type(), [&](auto number) {
      using T = decltype(number);
      stream.enqueue("conv2d_backward_parameters", [&](cudaStream_t) {
        stream.libraries().conv2d_backward_weight(g, x.on<T>(s), dy.on<T>(s), dweight.on(s));
      });
    });
    add_column_sums(s, dy, dbias);
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
    if (shape.empty()) {
      if (shape.accumulate) return;
      Launch::for_each(s, "fill", shape.m * shape.n, bodies::Fill<C>{C(0), c});
      return;
    }
    CudaStream& stream = cuda_stream(s);
    stream.enqueue("matmul", [&](cudaStream_t) { stream.libraries().matmul(shape, a, b, c); });
  }
};

}  // namespace

std::unique_ptr<Kernels> make_kernels() { return std::make_unique<CudaKernels>(); }

cudaError_t kernels_fit_current_device() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, each_kernel<bodies::Add<Real, Real>>);
}

}  // namespace lockstep::cuda
