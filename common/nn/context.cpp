#include "common/nn/context.h"

#include "common/core/error.h"
#include "common/nn/module.h"

namespace lockstep {

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

Tensor copied_to(const Tensor& x, Context& context) {
  const Stream from = x.home(), to = context.stream();
  const Tensor copy = context.empty(x.shape());
  to.wait(from.record());  // x is there
  to.copy(copy.data(), x.data(), x.bytes());
  from.wait(to.record());  // x has been read: its memory may be reused
  return copy;
}

}  // namespace lockstep
