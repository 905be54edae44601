#include "common/nn/sgd.h"

#include <cmath>

namespace lockstep {

Sgd::Sgd(const FlatParameters& parameters, SgdRule rule)
    : parameters_(parameters),
      rule_(rule),
      health_(HealthTensor::from_host(parameters.stream(), {}, {Health{}})) {
  if (rule.momentum > 0) {
    velocity_ = Tensor::empty(parameters.stream(), parameters.values().shape());
    parameters.stream().kernels().fill(parameters.stream(), 0, velocity_);
  }
}

void Sgd::step(const StepStateTensor& state, const Tensor& loss) const {
  const Stream stream = parameters_.stream();
  Kernels& kernels = stream.kernels();
  kernels.check_finite(stream, state, loss, health_);
  kernels.check_finite(stream, state, parameters_.gradients(), health_);
  kernels.sgd_update(stream, state, health_, rule_, parameters_.gradients(), velocity_,
                     parameters_.values());
}

ClipByNorm::ClipByNorm(const FlatParameters& parameters, double most)
    : parameters_(parameters), most_(Real(most)) {
  if (most == 0) return;
  const int64_t count = parameters.gradients().elements();
  norm_ = Tensor::empty(parameters.stream(),
                        {1 + (count + Kernels::kNormPart - 1) / Kernels::kNormPart});
}

void ClipByNorm::operator()() const {
  if (!norm_.defined()) return;
  const Stream stream = parameters_.stream();
  stream.kernels().clip_norm(stream, most_, parameters_.gradients(), norm_);
}

double LearningRateSchedule::at(int64_t step) const {
  if (step < warmup_steps) {
    return warmup_from + (base - warmup_from) * double(step + 1) / double(warmup_steps);
  }
  if (decay_steps == 0) return base;
  const int64_t decays = step / decay_steps;
  return base * std::pow(gamma, double(decays));
}

}  // namespace lockstep
