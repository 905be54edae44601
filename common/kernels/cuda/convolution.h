#pragma once
// Convolution by cuDNN 9.

#include <map>

#include "common/core/real.h"
#include "common/kernels/cuda/check.h"
#include "common/kernels/geometry.h"

namespace lockstep::cuda {

class CudaStream;

/// The three passes of a convolution, on NHWC activations and O,H,W,I weights. For every shape
/// cuDNN's heuristics propose algorithms; the first one that is deterministic is taken, so that a
/// run can be repeated bit by bit. Nothing is timed: that would make the choice, and with it the
/// rounding, depend on the machine's load.
class Convolutions {
 public:
  Convolutions(CudaStream& stream, cudaStream_t raw, bool tf32);

  /// Returns whether the bias is in y; if not, the algorithm that was chosen cannot add it.
  bool forward(const Window2d& g, const Real* x, const Real* weight, const Real* bias, Real* y);
  void backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx);
  /// Adds to dweight.
  void backward_weight(const Window2d& g, const Real* x, const Real* dy, Real* dweight);

 private:
  /// An algorithm for one pass, and the scratch memory it needs.
  template <class Algorithm>
  struct Choice {
    Algorithm algorithm;
    size_t workspace;
  };
  struct Plan {
    TensorDescriptor x, y, bias;
    FilterDescriptor weight;
    ConvolutionDescriptor convolution;
    Choice<cudnnConvolutionFwdAlgo_t> forward;
    Choice<cudnnConvolutionBwdDataAlgo_t> backward_input;
    Choice<cudnnConvolutionBwdFilterAlgo_t> backward_weight;
    bool fuse_bias;
  };
  Plan& plan(const Window2d& g);
  Plan make_plan(const Window2d& g);
  void choose_algorithms(Plan& plan, const Window2d& g);
  bool forward_with_bias(Plan& plan, const Real* x, const Real* weight, const Real* bias, Real* y);
  void check_call(cudnnStatus_t status, const char* call) const;

  CudaStream& stream_;
  bool tf32_;
  CudnnHandle handle_;
  ActivationDescriptor identity_;
  std::map<Window2d, Plan> plans_;
};

}  // namespace lockstep::cuda
