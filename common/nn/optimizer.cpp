#include "common/nn/optimizer.h"

#include <utility>

#include "common/core/error.h"

namespace lockstep {

OptimizerKind parse_optimizer(const std::string& text) {
  if (text == "sgd") return OptimizerKind::sgd;
  if (text == "adam") return OptimizerKind::adam;
  if (text == "adamw") return OptimizerKind::adamw;
  fail<BadInput>("--optimizer: '{}' is not known; choose sgd, adam or adamw", text);
}

Optimizer::Optimizer(const FlatParameters& parameters, const OptimizerRule& rule)
    : Optimizer(parameters.stream(), {{parameters.values(), parameters.gradients()}}, rule,
                {parameters.gradients_and_loss()}) {}

Optimizer::Optimizer(Stream stream, std::vector<UpdatedRange> ranges, const OptimizerRule& rule,
                     std::vector<Tensor> zeroed)
    : stream_(stream),
      ranges_(std::move(ranges)),
      zeroed_(std::move(zeroed)),
      rule_(rule),
      health_(HealthTensor::from_host(stream, {}, {Health{}})) {
  const bool zeroes_ranges = zeroed_.empty();
  for (const UpdatedRange& range : ranges_) {
    require_equal(range.gradients.elements(), range.values.elements(),
                  "optimizer: gradients of a range");
    if (zeroes_ranges) zeroed_.push_back(range.gradients);
  }
  if (rule.kind != OptimizerKind::sgd) {
    add_state("exp_avg");
    add_state("exp_avg_sq");
  } else if (rule.momentum > 0) {
    add_state("momentum");
  }
}

void Optimizer::add_state(const std::string& name) {
  OptimizerState state{name, {}};
  for (const UpdatedRange& range : ranges_) {
    state.ranges.push_back(Tensor::empty(stream_, range.values.shape()));
    stream_.kernels().fill(stream_, 0, state.ranges.back());
  }
  state_.push_back(std::move(state));
}

void Optimizer::zero_gradients() const {
  for (const Tensor& gradients : zeroed_) stream_.kernels().fill(stream_, 0, gradients);
}

void Optimizer::step(const StepStateTensor& state, const Tensor& loss) const {
  Kernels& kernels = stream_.kernels();
  kernels.check_finite(stream_, state, loss, health_);
  // Before the first update: a gradient of the last range must keep the first one from moving.
  for (const UpdatedRange& range : ranges_) {
    kernels.check_finite(stream_, state, range.gradients, health_);
  }
  for (size_t range = 0; range < ranges_.size(); ++range) update(state, range);
}

void Optimizer::update(const StepStateTensor& state, size_t range) const {
  const auto& [values, gradients] = ranges_[range];
  if (rule_.kind == OptimizerKind::sgd) {
    const SgdRule sgd{.momentum = Real(rule_.momentum), .weight_decay = Real(rule_.weight_decay)};
    stream_.kernels().sgd_update(stream_, state, health_, sgd, gradients,
                                 state_.empty() ? Tensor() : state_[0].ranges[range], values);
    return;
  }
  const AdamRule adam{.beta1 = rule_.beta1,
                      .beta2 = rule_.beta2,
                      .eps = rule_.eps,
                      .weight_decay = rule_.weight_decay,
                      .decoupled = rule_.kind == OptimizerKind::adamw};
  stream_.kernels().adam_update(stream_, state, health_, adam, gradients, state_[0].ranges[range],
                                state_[1].ranges[range], values);
}

}  // namespace lockstep
