#pragma once
// A network that is split inside its layers, used as if it were one network on device 0.

#include <deque>

#include "03-model-split/tensor/tensor_split.h"

namespace lockstep {

/// For evaluation: images and scores are on device 0. `split` must outlive this object.
class AsOneNetwork final : public Module {
 public:
  explicit AsOneNetwork(TensorSplit& split);

  Tensor forward(const Tensor& x, Context& context) override;
  /// Throws BadInput: training needs a batch on every rank.
  Tensor backward(const Tensor& dy, Context& context) override;

 private:
  TensorSplit& split_;
  std::deque<Context> others_;  // of ranks 1, 2, ...
};

}  // namespace lockstep
