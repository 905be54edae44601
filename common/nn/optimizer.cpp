#include "common/nn/optimizer.h"

#include <cmath>
#include <utility>

#include "common/core/error.h"

namespace lockstep {

double LearningRateSchedule::at(int64_t step) const {
  if (step < warmup_steps) {
    return warmup_from + (base - warmup_from) * double(step + 1) / double(warmup_steps);
  }
  if (decay_steps == 0) return base;
  const int64_t decays = step / decay_steps;
  return base * std::pow(gamma, double(decays));
}

// --- Clipping ----------------------------------------------------------------------------------

ClipByNorm::ClipByNorm(const FlatParameters& parameters, double most)
    : ClipByNorm(parameters.stream(), {{parameters.values(), parameters.gradients()}}, most) {}

namespace {

std::vector<Tensor> gradients_of(const std::vector<UpdatedRange>& ranges) {
  std::vector<Tensor> gradients;
  for (const UpdatedRange& range : ranges) gradients.push_back(range.gradients);
  return gradients;
}

}  // namespace

ClipByNorm::ClipByNorm(Stream stream, std::vector<UpdatedRange> ranges, double most,
                       AddOthers add_others)
    : ClipByNorm(stream, ranges, gradients_of(ranges), most, std::move(add_others)) {}

ClipByNorm::ClipByNorm(Stream stream, std::vector<UpdatedRange> ranges, std::vector<Tensor> counted,
                       double most, AddOthers add_others)
    : stream_(stream), most_(Real(most)), add_others_(std::move(add_others)) {
  if (most == 0) return;
  ranges_ = std::move(ranges);
  counted_ = std::move(counted);
  for (const Tensor& gradients : counted_) {
    const int64_t parts = (gradients.elements() + Kernels::kSumPart - 1) / Kernels::kSumPart;
    sums_.push_back(Tensor::empty(stream_, {1 + parts}));
  }
  squares_ = sums_.empty() ? Tensor::empty(stream_, {1}) : sums_.front().range(0, {1});
}

void ClipByNorm::operator()() const {
  if (ranges_.empty()) return;
  Kernels& kernels = stream_.kernels();
  if (counted_.empty()) kernels.fill(stream_, 0, squares_);
  for (size_t i = 0; i < counted_.size(); ++i) {
    kernels.sum_squares(stream_, counted_[i], sums_[i]);
    if (i > 0) kernels.add(stream_, sums_[i].range(0, {1}), squares_);
  }
  if (add_others_) add_others_(squares_);
  for (const UpdatedRange& range : ranges_) {
    kernels.clip_to_norm(stream_, most_, squares_, range.gradients);
  }
}

// --- The update --------------------------------------------------------------------------------

OverflowNumber::OverflowNumber(Tensor number)
    : number_(std::move(number)),
      found_(HealthTensor::from_host(number_.home(), {}, {Health{}})),
      nothing_(HealthTensor::from_host(number_.home(), {}, {Health{}})) {}

void OverflowNumber::write(Stream stream) const {
  stream.kernels().poison(stream, found_, number_);
  stream.copy(found_.data(), nothing_.data(), nothing_.bytes());
}

constexpr Real kFirstScale = 65536;  // of the loss: GradScaler's

Optimizer::Optimizer(const FlatParameters& parameters, const OptimizerRule& rule, Tensor overflow)
    : Optimizer(parameters.stream(),
                {{parameters.values(), parameters.gradients(), parameters.stretches(),
                  parameters.rounded()}},
                rule, {parameters.contribution()}, parameters.marks(), std::move(overflow)) {}

Optimizer::Optimizer(Stream stream, std::vector<UpdatedRange> ranges, const OptimizerRule& rule,
                     std::vector<Tensor> zeroed, GradientMarks marks, Tensor overflow)
    : stream_(stream),
      ranges_(std::move(ranges)),
      zeroed_(std::move(zeroed)),
      marks_(std::move(marks)),
      overflow_(std::move(overflow)),
      rule_(rule),
      health_(
          HealthTensor::from_host(stream, {}, {Health{.scale = scales_loss() ? kFirstScale : 1}})) {
  const bool zeroes_ranges = zeroed_.empty();
  for (const UpdatedRange& range : ranges_) {
    require_equal(range.gradients.elements(), range.values.elements(),
                  "optimizer: gradients of a range");
    if (zeroes_ranges) zeroed_.push_back(range.gradients);
  }
  if (!marks_.marks().defined()) make_one_owner();
  if (is_adam(rule.kind)) {
    add_state("exp_avg");
    add_state("exp_avg_sq");
    const int64_t parameters = marks_.marks().elements();
    steps_ = CountTensor::empty(stream_, {parameters});
    factors_ = Tensor::empty(stream_, {parameters, 2});
    stream_.kernels().fill_count(stream_, 0, steps_);
  } else if (rule.momentum > 0) {
    add_state("momentum");
  }
  round();
}

/// One parameter has all numbers, and has a gradient in every step.
void Optimizer::make_one_owner() {
  marks_ = GradientMarks({}, Tensor::from_host(stream_, {1}, {1}));
  for (UpdatedRange& range : ranges_) {
    range.stretches = BasicTensor<Stretch>::from_host(stream_, {1}, {{range.values.elements(), 0}});
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

std::vector<int64_t> Optimizer::steps() const {
  return steps_.defined() ? steps_.to_host() : std::vector<int64_t>();
}

void Optimizer::set_steps(const std::vector<int64_t>& steps) const {
  if (steps_.defined()) steps_.copy_from_host(steps);
}

void Optimizer::zero_gradients() const {
  for (const Tensor& gradients : zeroed_) stream_.kernels().fill(stream_, 0, gradients);
  marks_.forget();
}

void Optimizer::set_scale(Real scale, int64_t good_steps, int64_t skipped) const {
  if (!scales_loss()) return;
  health_.copy_from_host({Health{.scale = scale, .good_steps = good_steps, .skipped = skipped}});
}

void Optimizer::step_or_skip(const StepStateTensor& state, const Tensor& loss,
                             const ClipByNorm* clip) const {
  Kernels& kernels = stream_.kernels();
  kernels.check_finite(stream_, state, loss, health_);
  // Before the first update: a gradient of the last range must keep the first one from moving.
  for (const UpdatedRange& range : ranges_) {
    if (scales_loss()) {
      kernels.unscale(stream_, state, health_, range.gradients);
    } else {
      kernels.check_finite(stream_, state, range.gradients, health_);
    }
  }
  if (scales_loss() && overflow_.defined()) kernels.unscale(stream_, state, health_, overflow_);
  if (clip != nullptr) (*clip)();
  marks_.write(stream_);  // what no exchange between ranks has written
  if (is_adam(rule_.kind)) {
    kernels.adam_count(stream_, state, health_, marks_.marks(), adam(), steps_, factors_);
  }
  for (size_t range = 0; range < ranges_.size(); ++range) update(state, range);
  if (scales_loss()) kernels.update_scale(stream_, rule_.growth_interval, health_);
  round();
}

void Optimizer::round() const {
  for (const UpdatedRange& range : ranges_) {
    if (!range.rounded.defined()) continue;
    stream_.kernels().to_sixteen_bits(stream_, 1, range.values, range.rounded);
  }
}

void Optimizer::update(const StepStateTensor& state, size_t range) const {
  const auto& [values, gradients, stretches, rounded] = ranges_[range];
  const Owners owners{stretches, marks_.marks()};
  if (!is_adam(rule_.kind)) {
    const SgdRule sgd{.momentum = Real(rule_.momentum), .weight_decay = Real(rule_.weight_decay)};
    stream_.kernels().sgd_update(stream_, state, health_, owners, sgd, gradients,
                                 state_.empty() ? Tensor() : state_[0].ranges[range], values);
    return;
  }
  stream_.kernels().adam_update(stream_, state, health_, owners, adam(), factors_, gradients,
                                state_[0].ranges[range], state_[1].ranges[range], values);
}

AdamRule Optimizer::adam() const {
  return {.beta1 = rule_.beta1,
          .beta2 = rule_.beta2,
          .eps = rule_.eps,
          .weight_decay = rule_.weight_decay,
          .decoupled = rule_.kind == OptimizerKind::adamw};
}

}  // namespace lockstep
