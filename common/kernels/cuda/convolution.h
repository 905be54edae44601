#pragma once
// Convolution by cuDNN 9.

#include <initializer_list>
#include <map>
#include <vector>

#include "common/core/real.h"
#include "common/kernels/cuda/check.h"
#include "common/kernels/cuda/convolution_operands.h"
#include "common/kernels/geometry.h"

namespace lockstep::cuda {

class CudaStream;

/// The three passes of a convolution, on NHWC activations and O,H,W,I weights; with --nchw cuDNN is
/// given copies of them that have the channels first (NCHW and O,I,H,W). cuDNN's heuristics
/// propose algorithms for every shape; the first is taken that is deterministic and that cuDNN then
/// runs, so that a run can be repeated bit by bit. Nothing is timed: that would make the choice,
/// and with it the rounding, depend on the machine's load. A pass is planned when it is first
/// needed.
class Convolutions {
 public:
  Convolutions(CudaStream& stream, cudaStream_t raw);

  /// Returns whether the bias is in y; if not, the algorithm that was chosen cannot add it.
  bool forward(const Window2d& g, const Real* x, const Real* weight, const Real* bias, Real* y);
  void backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx);
  /// Adds to dweight.
  void backward_weight(const Window2d& g, const Real* x, const Real* dy, Real* dweight);

 private:
  /// An algorithm for one pass, and the scratch memory it needs with the plan's math.
  template <class Algorithm>
  struct Choice {
    Algorithm algorithm;
    size_t workspace;
  };
  /// Those that are left for a pass, fastest first by cuDNN's estimate; empty: not yet asked for.
  template <class Algorithm>
  using Choices = std::vector<Choice<Algorithm>>;
  struct Plan {
    Operand x, y, weight, bias;
    FilterDescriptor filter;
    ConvolutionDescriptor convolution;
    Choices<cudnnConvolutionFwdAlgo_t> forward;
    Choices<cudnnConvolutionBwdDataAlgo_t> backward_input;
    Choices<cudnnConvolutionBwdFilterAlgo_t> backward_weight;
    bool fuse_bias = true;  // until cuDNN refuses it
  };
  Plan& plan(const Window2d& g);
  Plan make_plan(const Window2d& g) const;
  template <class Proposal, class Propose, class WorkspaceSize>
  Choices<decltype(Proposal::algo)> choose(const Window2d& g, const char* call, Propose propose,
                                           WorkspaceSize workspace_size) const;
  template <class Algorithm, class Pass>
  void run(Choices<Algorithm>& choices, const Window2d& g, const char* call,
           std::initializer_list<const Operand*> operands, Pass pass);
  bool forward_with_bias(Plan& plan, const Real* x, const Real* weight, const Real* bias, Real* y,
                         void* workspace);
  void check_call(cudnnStatus_t status, const char* call) const;
  [[noreturn]] void fail_without_algorithm(const Window2d& g) const;

  CudaStream& stream_;
  const bool tf32_, channels_first_;
  CudnnHandle handle_;
  ActivationDescriptor identity_;
  std::map<Window2d, Plan> plans_;
};

}  // namespace lockstep::cuda
