#pragma once
// The state that a forward pass leaves for its backward pass.

#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/core/any_tensor.h"
#include "common/kernels/kernels.h"

namespace lockstep {

class Module;

/// Facts about a pass that the host knows when it enqueues the pass. The facts for kernels are in
/// Context::state().
struct PassFacts {
  bool training = true;           // batch statistics and dropout; false: evaluation, no backward
  bool recompute = false;         // a second forward of the same samples: running statistics stay
  bool update_running = true;     // BatchNorm's running statistics take this pass into account
  bool last_contribution = true;  // gradients are complete after this backward: hooks are called
  int64_t first_sample = 0;       // of this pass's samples, if it is only a part of what was fed
  int64_t step = 0;               // optimizer steps made before this one
};

/// The activations that one micro-batch saved for backward, and the facts of its pass. One stream,
/// one device. Memory comes from a pool, which several contexts of a stream may share. So memory
/// follows the number of micro-batches that are alive at the same time.
class Context {
 public:
  /// `precision` is that of all activations of the passes. If `loss_scale` is defined, losses
  /// multiply the gradient that they give to backward by the scale in it. All later gradients then
  /// have this factor, too (Optimizer::step()).
  explicit Context(Stream stream, Precision precision = Precision::real,
                   HealthTensor loss_scale = {})
      : Context(std::make_shared<TensorPool>(stream), precision, std::move(loss_scale)) {}
  explicit Context(std::shared_ptr<TensorPool> pool, Precision precision = Precision::real,
                   HealthTensor loss_scale = {})
      : pool_(std::move(pool)),
        precision_(precision),
        loss_scale_(std::move(loss_scale)),
        state_(StepStateTensor::empty(pool_->stream(), {})) {}

  Stream stream() const { return pool_->stream(); }
  Kernels& kernels() const { return stream().kernels(); }
  TensorPool& pool() { return *pool_; }
  /// Takes memory from `pool`, of the same stream, from now on; returns the pool before it.
  std::shared_ptr<TensorPool> replace_pool(std::shared_ptr<TensorPool> pool) {
    return std::exchange(pool_, std::move(pool));
  }
  /// Sets the state that kernels read in the passes from here on. Feeding a batch (Feeder) adds the
  /// places of its samples and copies the state to the device.
  void begin_step(const StepState& step) {
    step_ = step;
    facts.step = step.step;
  }
  const StepState& step() const { return step_; }
  /// The same in device memory, for kernels.
  const StepStateTensor& state() const { return state_; }

  // Tensors with undefined contents, given back to the pool when their last handle is destroyed.

  /// For an activation, or the gradient of one: in the precision of the passes.
  AnyTensor activation(const Shape& shape) { return empty(shape, type_of(precision_)); }
  /// For statistics, sums, probabilities: Real with any precision.
  Tensor empty(const Shape& shape) { return pool_->take<Real>(shape); }
  /// For copies of a tensor of this type.
  AnyTensor empty(const Shape& shape, ElementType type);
  /// For the positions of maxima among activations.
  Positions positions(const Shape& shape);
  Precision precision() const { return precision_; }

  /// The data that a module keeps from forward to backward.
  struct Saved {
    std::vector<AnyTensor> tensors{};
    Positions positions{};
    Shape shape{};
  };
  /// Keeps `saved` for `owner`'s backward; keeps nothing in evaluation.
  void save(const Module& owner, Saved saved);
  /// Hands over what was saved, once. The memory is free when the caller drops it.
  Saved take(const Module& owner);
  /// Bytes of all that is saved now.
  int64_t saved_bytes() const;
  /// Forgets everything saved (a pass that will have no backward).
  void clear() { saved_.clear(); }

  const HealthTensor& loss_scale() const { return loss_scale_; }

  /// For a change that a pass makes on the host: a graph does not contain that. Runs `effect` now,
  /// and adds it to the list given to record_effects(), so that a replay can repeat it.
  void on_host(std::function<void()> effect);
  void record_effects(std::vector<std::function<void()>>* effects) { effects_ = effects; }

  /// Floating-point operations of the convolutions and linear layers enqueued so far in training;
  /// evaluation does not count.
  void add_flops(double flops);
  double flops() const { return flops_; }

  PassFacts facts;

 private:
  std::shared_ptr<TensorPool> pool_;
  Precision precision_;
  HealthTensor loss_scale_;
  StepState step_{};
  StepStateTensor state_;
  std::unordered_map<const Module*, Saved> saved_;
  std::vector<std::function<void()>>* effects_ = nullptr;
  double flops_ = 0;
};

/// A copy of x on `context`'s device, made by its stream. Each stream waits for the other where
/// needed.
AnyTensor copied_to(const AnyTensor& x, Context& context);

}  // namespace lockstep
