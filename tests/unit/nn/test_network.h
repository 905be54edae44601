#pragma once
// A whole network for tests, and tensors of a state by name.

#include <string_view>

#include "common/core/error.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/state_dict.h"
#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"

namespace lockstep::testing::nn {

/// A network on a device, with its parameters initialised.
struct TestNetwork {
  explicit TestNetwork(const ModelOptions& options, uint64_t seed = 1,
                       Initializer initializer = Initializer::kaiming_uniform)
      : model(make_model(options)), parameters(*model.network, device.stream) {
    initialize(parameters, initializer, seed);
  }

  /// Adds the gradients of a batch; returns its loss.
  Real step(const Shape& shape, const LabelTensor& labels) {
    const Tensor images = device.put(shape, random_values(shape, 7)), loss = device.filled({1}, 0);
    model.loss->forward(model.network->forward(images, context), labels, loss, context);
    model.network->backward(model.loss->backward(labels, context), context);
    return loss.to_host()[0];
  }

  TestDevice device;
  Model model;
  FlatParameters parameters;
  Context context{device.stream};
};

inline const StateTensor& find(const std::vector<StateTensor>& state, std::string_view name) {
  const auto found = std::ranges::find(state, name, &StateTensor::name);
  INFO(name);
  REQUIRE(found != state.end());
  return *found;
}

}  // namespace lockstep::testing::nn
