#pragma once
// Gradients that are too long are made shorter.

#include <functional>
#include <vector>

#include "common/nn/optimizer.h"

namespace lockstep {

/// Scales all gradients together down to an L2 norm of `most`, as torch.nn.utils.clip_grad_norm_
/// does. Call it between backward and the optimizer's step.
class ClipByNorm {
 public:
  /// Called between the two halves of a clip with `squares` [1], the sum of all gradients' squares;
  /// may enqueue work that changes it: where others have further gradients, theirs are added.
  using AddOthers = std::function<void(const Tensor& squares)>;

  /// `most` 0: calls do nothing.
  ClipByNorm(const FlatParameters& parameters, double most);
  /// The gradients of all ranges together.
  ClipByNorm(Stream stream, std::vector<UpdatedRange> ranges, double most,
             AddOthers add_others = {});
  void operator()() const;

 private:
  Stream stream_;
  std::vector<UpdatedRange> ranges_;  // empty if calls do nothing
  Real most_;
  AddOthers add_others_;
  std::vector<Tensor> sums_;  // of each range, as OptimizerKernels::sum_squares() wants them
};

}  // namespace lockstep
