#pragma once
// From gradients to new weights: the learning rate of every step, clipping of gradients that are
// too long, and the update.

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/kernels/kernels.h"
#include "common/nn/parameter.h"

namespace lockstep {

/// Step schedule with linear warm-up (Goyal et al., arXiv 1706.02677, section 2.2). Over the first
/// `warmup_steps` steps the rate climbs from `warmup_from` to `base`. From then on it is multiplied
/// by `gamma` every `decay_steps` steps (0: never), as torch.optim.lr_scheduler.StepLR.
struct LearningRateSchedule {
  double base = 0.1;
  double warmup_from = 0;
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;
  double gamma = 0.1;

  /// The rate of step `step`, counted from 0.
  double at(int64_t step) const;
};

enum class OptimizerKind { sgd, adam, adamw };
constexpr auto words_of(OptimizerKind) { return std::array{"sgd", "adam", "adamw"}; }
constexpr bool is_adam(OptimizerKind kind) { return kind != OptimizerKind::sgd; }

/// How to update, as torch.optim.SGD, Adam and AdamW do it (kernels/step_state.h has the formulas).
struct OptimizerRule {
  OptimizerKind kind = OptimizerKind::sgd;
  double momentum = 0;                // of SGD
  double weight_decay = 0;            // AdamW: decoupled; SGD and Adam: L2, part of the gradient
  double beta1 = 0.9, beta2 = 0.999;  // of Adam and AdamW
  double eps = 1e-8;                  // likewise
  /// For gradients in fp16: after so many good steps the loss is scaled by twice as much, as
  /// torch.amp.GradScaler does it (its growth_interval). 0: no scale.
  int64_t growth_interval = 0;
};

/// Learnt numbers that lie side by side, and their gradients.
struct UpdatedRange {
  Tensor values, gradients;          // [n], both
  BasicTensor<Stretch> stretches{};  // of both, where an optimizer knows of parameters
  AnyTensor rounded{};               // copies of the values, made by the optimizer
};

/// Scales all gradients together down to an L2 norm of `most`, as torch.nn.utils.clip_grad_norm_
/// does. Optimizer::step() calls it.
class ClipByNorm {
 public:
  /// Called between the two halves of a clip with `squares` [1], the sum of all gradients' squares.
  /// The function may enqueue work that adds the squares of gradients in other places.
  using AddOthers = std::function<void(const Tensor& squares)>;

  /// `most` 0: calls do nothing.
  ClipByNorm(const FlatParameters& parameters, double most);
  /// Clips the gradients of all ranges together.
  ClipByNorm(Stream stream, std::vector<UpdatedRange> ranges, double most,
             AddOthers add_others = {});
  /// The same, but only the gradients `counted` add to the norm. They are pieces of the ranges'
  /// gradients, or none.
  ClipByNorm(Stream stream, std::vector<UpdatedRange> ranges, std::vector<Tensor> counted,
             double most, AddOthers add_others);
  void operator()() const;

 private:
  Stream stream_;
  std::vector<UpdatedRange> ranges_;  // empty if calls do nothing
  Real most_;
  AddOthers add_others_;
  std::vector<Tensor> counted_;
  std::vector<Tensor> sums_;  // of each counted piece, as Kernels::sum_squares() wants them
  Tensor squares_;            // [1]
};

/// A state that an optimizer keeps from step to step, under PyTorch's name. There is a tensor for
/// each of the optimizer's ranges, with as many numbers as the range has. Zeros at first.
struct OptimizerState {
  std::string name;
  std::vector<Tensor> ranges;
};

/// For fp16, if a network's gradients are in several places: a number that each place tells the
/// others. The number is 0, or NaN once a gradient here has overflowed in this step. The sum of all
/// places' numbers is then NaN in all places, and their optimizers skip the step together.
class OverflowNumber {
 public:
  OverflowNumber() = default;  // where nothing can overflow
  /// `number` [1] is 0 when a step begins.
  explicit OverflowNumber(Tensor number);

  const Tensor& number() const { return number_; }
  /// Kernels::check_finite() notes here what it finds in the gradients of this step.
  const HealthTensor& found() const { return found_; }
  /// Makes the number NaN if found() has a finding, and clears found() for the next step.
  void write(Stream stream) const;

 private:
  Tensor number_;
  HealthTensor found_, nothing_;
};

/// Updates flat buffers of one device, a range of numbers in one pass. The learning rate and the
/// number of the step come from StepState. A parameter without a gradient in this step stays as it
/// is, with its state. It gets no weight decay, no momentum, no count of its steps, as in PyTorch.
/// Once the loss or a gradient was not finite, all weights and the state stay as they are.
class Optimizer {
 public:
  /// Updates all parameters. `overflow` as below.
  Optimizer(const FlatParameters& parameters, const OptimizerRule& rule, Tensor overflow = {});
  /// Updates these ranges, which are at home in `stream`. zero_gradients() zeroes `zeroed` or,
  /// without it, the ranges' gradients. The ranges' stretches belong to the parameters that `marks`
  /// knows. Without marks, all numbers have a gradient in every step. If the loss is scaled, a step
  /// is also skipped when `overflow` [1] is not finite. This number tells of gradients in other
  /// places (torch's ShardedGradScaler asks all ranks likewise).
  Optimizer(Stream stream, std::vector<UpdatedRange> ranges, const OptimizerRule& rule,
            std::vector<Tensor> zeroed = {}, GradientMarks marks = {}, Tensor overflow = {});

  /// Rounds the values to their copies in 16 bits, if there are any. The constructor and each step
  /// do this. Call it when values have been loaded since.
  void round() const;
  /// Zeroes the gradients; for FlatParameters the loss and the marks, too.
  void zero_gradients() const;
  /// Updates all ranges from the gradients, or none. Watches `loss` [1], too. If the loss is
  /// scaled, the gradients are divided by its scale first. A gradient that is not finite then skips
  /// this update, and halves the scale. After that, `clip` makes the gradients shorter.
  void step(const StepStateTensor& state, const Tensor& loss, const ClipByNorm& clip) const {
    step_or_skip(state, loss, &clip);
  }
  void step(const StepStateTensor& state, const Tensor& loss) const {
    step_or_skip(state, loss, nullptr);
  }

  const HealthTensor& health() const { return health_; }
  /// The scale of the loss, for contexts; undefined if the rule has no scale.
  HealthTensor loss_scale() const { return scales_loss() ? health_ : HealthTensor(); }
  /// SGD with momentum: "momentum"; Adam and AdamW: "exp_avg" and "exp_avg_sq"; else empty.
  const std::vector<OptimizerState>& state() const { return state_; }
  /// PyTorch's "step" of Adam and AdamW: how often each of parameters() has been updated. Empty for
  /// SGD. Both synchronize.
  std::vector<int64_t> steps() const;
  void set_steps(const std::vector<int64_t>& steps) const;
  /// Continues with the scale of the loss from the end of another run, if the rule has a scale.
  void set_scale(Real scale, int64_t good_steps, int64_t skipped) const;
  /// The parameters that the optimizer knows, in the order of its buffers.
  const std::vector<Parameter*>& parameters() const { return marks_.parameters(); }

 private:
  bool scales_loss() const { return rule_.growth_interval > 0; }
  void make_one_owner();
  void add_state(const std::string& name);
  void step_or_skip(const StepStateTensor& state, const Tensor& loss, const ClipByNorm* clip) const;
  void update(const StepStateTensor& state, size_t range) const;
  AdamRule adam() const;  // the rule, where it is one of these

  Stream stream_;
  std::vector<UpdatedRange> ranges_;
  std::vector<Tensor> zeroed_;  // by zero_gradients()
  GradientMarks marks_;
  Tensor overflow_;
  OptimizerRule rule_;
  std::vector<OptimizerState> state_;
  CountTensor steps_;
  Tensor factors_;  // Kernels::adam_count()
  HealthTensor health_;
};

}  // namespace lockstep
