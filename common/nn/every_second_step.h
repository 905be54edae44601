#pragma once
// A layer that some steps leave out.

#include "common/nn/module.h"

namespace lockstep {

/// x + inner(x) in steps 0, 2, 4, ... and in evaluation, x alone in the others: there the inner
/// module's parameters have no gradient. The simplest form of stochastic depth (Huang et al., arXiv
/// 1603.09382), by turns instead of by chance, so that all ranks leave out the same. The inner
/// module's output has x's shape.
class EverySecondStep final : public Module {
 public:
  explicit EverySecondStep(std::unique_ptr<Module> inner);
  Tensor forward(const Tensor& x, Context& context) override;
  Tensor backward(const Tensor& dy, Context& context) override;

 private:
  Module& inner_;
};

}  // namespace lockstep
