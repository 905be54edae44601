#include "common/nn/context.h"

#include "common/core/error.h"
#include "common/nn/module.h"

namespace lockstep {

AnyTensor Context::empty(const Shape& shape, ElementType type) {
  return with_numbers(
      type, [&](auto number) -> AnyTensor { return pool_->take<decltype(number)>(shape); });
}

Positions Context::positions(const Shape& shape) {
  if (precision_ == Precision::real) return pool_->take<int32_t>(shape);
  return pool_->take<int16_t>(shape);
}

int64_t Context::saved_bytes() const {
  int64_t bytes = 0;
  for (const auto& [owner, saved] : saved_) {
    for (const AnyTensor& tensor : saved.tensors) bytes += int64_t(tensor.bytes());
    if (saved.positions.wide.defined()) bytes += int64_t(saved.positions.wide.bytes());
    if (saved.positions.narrow.defined()) bytes += int64_t(saved.positions.narrow.bytes());
  }
  return bytes;
}

void Context::save(const Module& owner, Saved saved) {
  if (facts.training) saved_[&owner] = std::move(saved);
}

Context::Saved Context::take(const Module& owner) {
  const auto found = saved_.find(&owner);
  require(found != saved_.end(),
          "{}: backward without a forward in training mode before it in the same context",
          owner.name());
  Saved saved = std::move(found->second);
  saved_.erase(found);
  return saved;
}

void Context::on_host(std::function<void()> effect) {
  effect();
  if (effects_ != nullptr) effects_->push_back(std::move(effect));
}

void Context::add_flops(double flops) {
  if (facts.training) on_host([=, this] { flops_ += flops; });
}

AnyTensor copied_to(const AnyTensor& x, Context& context) {
  const Stream from = x.home(), to = context.stream();
  const bool real = x.type() == kTypeOf<Real>;
  const AnyTensor copy = real ? AnyTensor(context.empty(x.shape())) : context.activation(x.shape());
  to.wait(from.record());  // x is there
  to.copy(copy.data(), x.data(), x.bytes());
  from.wait(to.record());  // x has been read: its memory may be reused
  return copy;
}

}  // namespace lockstep
