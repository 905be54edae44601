#pragma once
// cuBLAS and cuDNN 9 on one stream: matrix products and convolutions.

#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/core/real.h"
#include "common/core/tensor.h"
#include "common/kernels/cuda/check.h"
#include "common/kernels/geometry.h"

namespace lockstep::cuda {

class CudaStream;

/// How a tensor or a filter (O,H,W,I) of a convolution looks in memory. Ours have the channels
/// last; with --nchw cuDNN gets copies that have them first (NCHW and O,I,H,W).
struct Operand {
  TensorDescriptor given;  // to cuDNN
  TensorDescriptor ours;   // null: the same
  size_t bytes;            // of a copy; 0: none is made

  Operand() = default;
  /// `shape` is [n, height, width, channels]; `device` is for error texts.
  Operand(const Shape& shape, bool channels_first, const std::string& device);
};

/// The handles of the libraries belong to one stream, as a stream belongs to one host thread at a
/// time. A handle is made when it is first needed: it costs tenths of a second.
///
/// Convolutions: cuDNN's heuristics propose algorithms for every shape; the first is taken that is
/// deterministic and that cuDNN then runs, so that a run can be repeated bit by bit. Nothing is
/// timed: that would make the choice, and with it the rounding, depend on the machine's load. A
/// pass's algorithm is chosen when the pass is first needed.
class Libraries {
 public:
  Libraries(CudaStream& stream, cudaStream_t raw);

  /// As Kernels::matmul.
  void matmul(const MatMul& shape, const Real* a, const Real* b, Real* c);

  /// Returns whether the bias is in y; if not, the algorithm that was chosen cannot add it.
  bool conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias, Real* y);
  void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx);
  /// Adds to dweight.
  void conv2d_backward_weight(const Window2d& g, const Real* x, const Real* dy, Real* dweight);

 private:
  /// An algorithm for one pass, and the scratch memory it needs with the convolution's math.
  template <class Algorithm>
  struct Choice {
    Algorithm algorithm;
    size_t workspace;
  };
  /// Those that are left for a pass, fastest first by cuDNN's estimate; empty: not yet asked for.
  template <class Algorithm>
  using Choices = std::vector<Choice<Algorithm>>;
  /// What cuDNN has to know about the convolutions of one shape.
  struct Convolution {
    Operand x, y, weight, bias;
    FilterDescriptor filter;
    ConvolutionDescriptor descriptor;
    Choices<cudnnConvolutionFwdAlgo_t> forward;
    Choices<cudnnConvolutionBwdDataAlgo_t> backward_input;
    Choices<cudnnConvolutionBwdFilterAlgo_t> backward_weight;
    bool fuse_bias = true;  // until cuDNN refuses it
  };

  void make_cublas();
  void make_cudnn();
  Convolution& convolution(const Window2d& g);
  Convolution make_convolution(const Window2d& g) const;
  template <class Proposal, class Propose, class WorkspaceSize>
  Choices<decltype(Proposal::algo)> choose(const Window2d& g, const char* call, Propose propose,
                                           WorkspaceSize workspace_size) const;
  template <class Algorithm, class Pass>
  void run(Choices<Algorithm>& choices, const Window2d& g, const char* call,
           std::initializer_list<const Operand*> operands, Pass pass);
  bool conv2d_with_bias(Convolution& convolution, const Real* x, const Real* weight,
                        const Real* bias, Real* y, void* memory);
  void check_call(cudnnStatus_t status, const char* call) const;
  [[noreturn]] void fail_without_algorithm(const Window2d& g) const;

  CudaStream& stream_;
  const cudaStream_t raw_;
  const std::string device_;
  const bool tf32_, channels_first_;
  std::unique_ptr<Buffer> workspace_;  // cuBLAS's
  CublasHandle cublas_;
  CudnnHandle cudnn_;
  ActivationDescriptor identity_;
  std::map<Window2d, Convolution> convolutions_;
};

}  // namespace lockstep::cuda
