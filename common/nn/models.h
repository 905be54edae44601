#pragma once
// The networks.

#include <array>
#include <memory>
#include <utility>

#include "common/nn/loss.h"
#include "common/nn/module.h"

namespace lockstep {

enum class ModelKind { seed, seed_bn, seed_skip, mlp, resnet18 };
constexpr auto words_of(ModelKind) {
  return std::array{"seed", "seed-bn", "seed-skip", "mlp", "resnet18"};
}

/// Whether it normalises batches, so that it matters which samples a device sees together.
bool has_batch_norm(ModelKind kind);

struct ModelOptions {
  ModelKind kind = ModelKind::seed;
  int64_t width = 64;  // ResNet-18: channels of the first block; mlp: a quarter of its features
  int64_t depth = 5;   // of the mlp: linear layers
  bool dropout = false;
  uint32_t seed = 1;                                     // for the dropout masks
  int64_t height = 28, width_pixels = 28, channels = 1;  // of the images
  int64_t classes = 10;
};

/// A network and the loss it is trained with.
struct Model {
  std::unique_ptr<Module> network;
  std::unique_ptr<Loss> loss;

  /// Replaces the network by a wrapper, made from the network and `rest`.
  template <class Wrapper, class... Rest>
  Wrapper& wrap(Rest&&... rest) {
    auto wrapper = std::make_unique<Wrapper>(std::move(network), std::forward<Rest>(rest)...);
    Wrapper& wrapped = *wrapper;
    network = std::move(wrapper);
    return wrapped;
  }
};

/// Builds and names a network.
/// * seed: conv 1-10 5x5, max-pool 2, ReLU, conv 10-20 5x5, [dropout2d], max-pool 2, ReLU,
///   linear 320-50, ReLU, [dropout], linear 50-10, log-softmax; loss: NLL. 21,840 parameters.
/// * seed-bn: the same with batch normalisation after each convolution.
/// * seed-skip: seed with another linear layer, 50-50, before the last, which every second step
///   leaves out (EverySecondStep).
/// * mlp: linear layers, all but the last with 4 width features and ReLU, the last one to the
///   classes; loss: cross-entropy. Its parameters outweigh its activations.
/// * resnet18: conv 3x3, batch normalisation, ReLU, four blocks of two residuals with width,
///   2, 4, 8 times width channels, global average, linear; loss: cross-entropy.
Model make_model(const ModelOptions& options);

}  // namespace lockstep
