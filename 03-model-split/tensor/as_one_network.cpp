#include "03-model-split/tensor/as_one_network.h"

#include "common/core/error.h"

namespace lockstep {

AsOneNetwork::AsOneNetwork(TensorSplit& split) : split_(split) {
  for (int r = 1; r < split.world_size(); ++r) others_.emplace_back(split.parameters(r).stream());
}

Tensor AsOneNetwork::forward(const Tensor& x, Context& context) {
  Tensors images{x};
  Contexts contexts{&context};
  for (Context& other : others_) {
    other.facts = context.facts;
    images.push_back(copied_to(x, other));
    contexts.push_back(&other);
  }
  return split_.forward(images, contexts)[0];
}

Tensor AsOneNetwork::backward(const Tensor&, Context&) {
  fail<BadInput>("tensor split: this network is for evaluation, expected train_step()");
}

}  // namespace lockstep
