#pragma once
// cuBLAS and cuDNN 9 on one stream: matrix products (libraries.cpp) and convolutions
// (convolutions.cpp).

#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/core/element_type.h"
#include "common/core/real.h"
#include "common/core/tensor.h"
#include "common/kernels/cuda/check.h"
#include "common/kernels/geometry.h"

namespace lockstep::cuda {

class CudaStream;
struct PixelGrid;

/// The factors by which the libraries multiply their results.
inline constexpr float kZero = 0, kOne = 1;

/// How the tensors of a convolution lie in memory when cuDNN sees them. Ours have the channels last
/// (NHWC; weights O,H,W,I). Many algorithms want them first (NCHW; O,I,H,W) and get copies.
struct Layout {
  TensorDescriptor x, y, bias;
  FilterDescriptor weight;
};

/// The handles of the libraries belong to one stream, as a stream belongs to one host thread at a
/// time. A handle is made when it is first needed: it costs tenths of a second.
///
/// Convolutions: cuDNN's heuristics propose algorithms for every shape and layout. Those that were
/// measured to be fastest come before all others. The first algorithm that is deterministic, and
/// that cuDNN then runs, is taken, so that a run can be repeated bit by bit. Nothing is timed in a
/// run: that would make the choice, and so the rounding, depend on the machine's load. A pass's
/// algorithm is chosen when the pass is first needed.
class Libraries {
 public:
  Libraries(CudaStream& stream, cudaStream_t raw);

  // Numbers T: Real, or 16 bits. Then tensor cores multiply, and add in float32.

  /// As Kernels::matmul.
  template <class T, class C>
  void matmul(const MatMul& shape, const T* a, const T* b, C* c);

  /// Returns whether the bias is in y. If not, the algorithm that computed y cannot add the bias.
  template <class T>
  bool conv2d(const Window2d& g, const T* x, const T* weight, const Real* bias, T* y);
  template <class T>
  void conv2d_backward_input(const Window2d& g, const T* dy, const T* weight, T* dx);
  /// Adds the gradient, rounded to T, to dweight.
  template <class T>
  void conv2d_backward_weight(const Window2d& g, const T* x, const T* dy, Real* dweight);

 private:
  /// How one pass can be computed.
  template <class Algorithm>
  struct Way {
    bool channels_first;
    Algorithm algorithm;
    size_t workspace;  // bytes, with the convolution's math
  };
  /// The ways that are left for a pass, the best first; empty: not yet asked for.
  template <class Algorithm>
  using Ways = std::vector<Way<Algorithm>>;
  /// The data that cuDNN needs about the convolutions of one shape, of numbers of one type.
  struct Convolution {
    Layout layouts[2];  // channels last, channels first
    ConvolutionDescriptor descriptor;
    ElementType type = kTypeOf<Real>;
    bool tensor_cores = false;
    Ways<cudnnConvolutionFwdAlgo_t> forward;
    Ways<cudnnConvolutionBwdDataAlgo_t> backward_input;
    Ways<cudnnConvolutionBwdFilterAlgo_t> backward_weight;
    bool fuse_bias = true;  // until cuDNN refuses it
  };

  void make_cublas();
  void make_cudnn();
  void require_products_of(ElementType type) const;
  template <class T>
  T* scratch(int64_t n);
  template <class T>
  void product(const MatMul& shape, const T* a, const T* b, T* c);
  template <class T, class C>
  void add_rounded(const MatMul& shape, const T* a, const T* b, T* rounded, C* c);
  Convolution& convolution(const Window2d& g, ElementType type);
  Convolution make_convolution(const Window2d& g, ElementType type) const;
  template <class Pass>
  void choose(Ways<typename Pass::Algorithm>& ways, const Convolution& conv, const Window2d& g,
              std::optional<typename Pass::Algorithm> fastest) const;
  template <class T, class Pass, class Enqueue>
  void run(Ways<typename Pass::Algorithm>& ways, const Convolution& conv, const Window2d& g,
           std::initializer_list<Shape> tensors, const std::optional<Shape>& made, Enqueue enqueue);
  template <class T>
  bool conv2d_by_cudnn(const Window2d& g, const T* x, const T* weight, const Real* bias, T* y);
  bool conv2d_with_bias(Convolution& conv, const Layout& layout, const Real* x, const Real* weight,
                        const Real* bias, Real* y, void* memory);
  template <class T>
  void backward_input_by_cudnn(const Window2d& g, const T* dy, const T* weight, T* dx);
  template <class T>
  void backward_weight_by_cudnn(const Window2d& g, const T* x, const T* dy, Real* dweight);
  template <class T>
  const T* seen_pixels(const Window2d& g, const T* x, T* room);
  void warn_once(const std::string& text) const;
  void warn_of_refusal(const char* computes, bool channels_first, int algorithm) const;
  void warn_without_proposal(const Convolution& conv, const char* computes) const;
  void warn_of_copies(const char* computes, bool channels_first) const;
  [[noreturn]] void fail_without_algorithm(const Window2d& g) const;

  CudaStream& stream_;
  const cudaStream_t raw_;
  const std::string device_;
  const bool tf32_, channels_first_;
  std::unique_ptr<Buffer> workspace_;  // cuBLAS's
  CublasHandle cublas_;
  CudnnHandle cudnn_;
  ActivationDescriptor identity_;
  std::map<std::pair<ElementType, Window2d>, Convolution> convolutions_;
};

/// The pixels that a window sees among those of the images `many`, [batch, height, width,
/// channels].
PixelGrid pixel_grid(const Window2d& g, const Shape& many);

}  // namespace lockstep::cuda
