#pragma once
// Shared by the tests of stages 04 and 05: one rank's network, and the samples it is trained on.

#include <functional>
#include <memory>
#include <vector>

#include "04-ddp/ddp.h"
#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "tests/support/nn_test_support.h"

namespace lockstep::testing {

using MakeModule = std::function<std::unique_ptr<Module>(int rank)>;

/// A network for images of 16x16.
inline MakeModule small_network(ModelKind kind = ModelKind::seed) {
  return [=](int) {
    return make_model({.kind = kind, .width = 8, .height = 16, .width_pixels = 16}).network;
  };
}

struct Samples {
  explicit Samples(int64_t count, uint32_t seed = 1)
      : images(random_values({count, 16, 16, 1}, seed)) {
    for (int64_t i = 0; i < count; ++i) labels.push_back(static_cast<int32_t>((i * 7 + seed) % 10));
  }
  int64_t count() const { return std::ssize(labels); }
  /// The samples at first, first + stride, ...
  Samples every(int64_t first, int64_t stride) const {
    Samples part(0);
    for (int64_t i = first; i < count(); i += stride) {
      part.images.insert(part.images.end(), images.begin() + i * 256,
                         images.begin() + (i + 1) * 256);
      part.labels.push_back(labels[static_cast<size_t>(i)]);
    }
    return part;
  }
  std::vector<Real> images;
  std::vector<int32_t> labels;
};

/// One rank, on a device of its own; without a communicator a network by itself.
struct Member {
  Member(int rank, const MakeModule& make, uint64_t seed)
      : device(open_device({DeviceId::Kind::cpu, rank}, {.trace = true})),
        network(make(rank)),
        parameters(*network, stream),
        optimizer(parameters, {.momentum = 0.9}),
        context(stream),
        loss(parameters.loss()) {
    initialize(parameters, Initializer::kaiming_uniform, seed);
    // Running statistics that cannot be mistaken for another rank's.
    if (seed > 1 && !parameters.buffers().empty()) {
      stream.kernels().fill(stream, Real(seed), parameters.buffer_values());
    }
  }

  /// Adds the gradients of samples that count `weight` each. Only enqueues.
  void accumulate(const Samples& samples, double weight) {
    const int64_t count = samples.count();
    context.state().copy_from_host(
        {{.step = steps, .learning_rate = Real(0.05), .loss_weight = Real(weight)}});
    const Tensor images = Tensor::from_host(stream, {count, 16, 16, 1}, samples.images);
    const LabelTensor labels = LabelTensor::from_host(stream, {count}, samples.labels);
    context.kernels().fill(stream, 0, loss);
    const Tensor scores = network->forward(images, context);
    criterion->forward(scores, labels, loss, context);
    network->backward(criterion->backward(labels, context), context);
  }
  std::vector<Real> gradients() const { return parameters.gradients().to_host(); }
  std::vector<Real> weights() const { return parameters.values().to_host(); }
  DistributedDataParallel& ddp() { return static_cast<DistributedDataParallel&>(*network); }
  Replica& wrapper() { return static_cast<Replica&>(*network); }

  std::unique_ptr<Device> device;
  Stream stream = device->create_stream("compute");
  Stream communication = device->create_stream("communication");
  std::unique_ptr<Module> network;
  FlatParameters parameters;
  Optimizer optimizer;
  Context context;
  Tensor loss;
  std::unique_ptr<Loss> criterion = make_nll_loss();
  int64_t steps = 0;
};

}  // namespace lockstep::testing
