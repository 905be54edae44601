#pragma once
// The optimizer: what becomes of the weights when the gradients are there.

#include <string>
#include <vector>

#include "common/kernels/kernels.h"
#include "common/nn/parameter.h"

namespace lockstep {

enum class OptimizerKind { sgd, adam, adamw };

/// Parses "sgd", "adam" or "adamw". Throws BadInput for others.
OptimizerKind parse_optimizer(const std::string& text);

/// How to update, as torch.optim.SGD, Adam and AdamW do it (kernels/step_state.h has the formulas).
struct OptimizerRule {
  OptimizerKind kind = OptimizerKind::sgd;
  double momentum = 0;                // of SGD
  double weight_decay = 0;            // AdamW: decoupled; SGD and Adam: L2, part of the gradient
  double beta1 = 0.9, beta2 = 0.999;  // of Adam and AdamW
  double eps = 1e-8;                  // likewise
};

/// Learnt numbers that lie side by side, and their gradients.
struct UpdatedRange {
  Tensor values, gradients;  // [n], both
};

/// What an optimizer remembers from step to step, under PyTorch's name: for each of its ranges as
/// many numbers as that has. Zeros at first.
struct OptimizerState {
  std::string name;
  std::vector<Tensor> ranges;
};

/// Updates flat buffers of one device, a range of numbers in one pass. The learning rate and the
/// number of the step come from StepState. Once the loss or a gradient was not finite, the weights
/// and the state stay as they are.
class Optimizer {
 public:
  /// Of all parameters.
  Optimizer(const FlatParameters& parameters, const OptimizerRule& rule);
  /// Of these ranges, which are at home in `stream`. zero_gradients() zeroes `zeroed`; without it,
  /// the ranges' gradients.
  Optimizer(Stream stream, std::vector<UpdatedRange> ranges, const OptimizerRule& rule,
            std::vector<Tensor> zeroed = {});

  /// Zeroes the gradients; of FlatParameters the loss, too (FlatParameters::loss()).
  void zero_gradients() const;
  /// One update from the gradients, of all ranges or of none. `loss` [1] is watched, too.
  void step(const StepStateTensor& state, const Tensor& loss) const;

  const HealthTensor& health() const { return health_; }
  /// SGD with momentum: "momentum"; Adam and AdamW: "exp_avg" and "exp_avg_sq"; else empty.
  const std::vector<OptimizerState>& state() const { return state_; }

 private:
  void add_state(const std::string& name);
  void update(const StepStateTensor& state, size_t range) const;

  Stream stream_;
  std::vector<UpdatedRange> ranges_;
  std::vector<Tensor> zeroed_;  // by zero_gradients()
  OptimizerRule rule_;
  std::vector<OptimizerState> state_;
  HealthTensor health_;
};

}  // namespace lockstep
