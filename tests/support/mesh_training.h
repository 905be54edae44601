#pragma once
// Steps of stage 07 on ranks that are threads of this process.

#include <memory>
#include <string>
#include <vector>

#include "05-syncbn-checkpoint/sync_batchnorm.h"
#include "07-mesh/mesh_parallel.h"
#include "common/nn/state_dict.h"
#include "tests/support/ddp_test_support.h"

namespace lockstep::testing::mesh {

constexpr ModelOptions kSeed{.width = 8, .height = 16, .width_pixels = 16};
constexpr ModelOptions kSeedBn{
    .kind = ModelKind::seed_bn, .width = 8, .height = 16, .width_pixels = 16};
constexpr double kMostNorm = 0.5;  // less than the norms of these networks' first gradients

struct MeshSetting {
  std::string mesh;
  ModelOptions model = kSeed;
  PipelinePlan plan{};  // its micro-batches are made without a pipeline, too
  ShardingOptions sharding{};
};

/// The numbers of a network after some steps.
struct MeshResult {
  std::vector<Real> weights;  // whole, in PyTorch's layout, one parameter after another
  Real loss = 0;              // of the last step
};

/// One rank's side of a run, with the objects of stage 07's train().
class MeshMember {
 public:
  /// `world` has all ranks of `group`, on the device of the streams.
  MeshMember(ProcessGroup& group, Communicator& world, Stream passes, Stream communication,
             const MeshSetting& setting)
      : setting(setting),
        mesh(MeshShape::from(setting.mesh), group, passes.device(), world),
        samples(mesh.along(kSampleAxes)),
        stream(passes),
        communication(communication),
        model(make_model(setting.model)),
        network(model, setting.model, mesh, passes, communication, setting.sharding, setting.plan),
        synchronised(convert_sync_batchnorm(*model.network, samples, communication)),
        optimizer(network.optimizer({.momentum = 0.9, .growth_interval = growth_interval()})),
        clip(network.clip_by_norm(kMostNorm)),
        context(passes, setting.sharding.precision, optimizer.loss_scale()) {
    network.initialize(Initializer::kaiming_uniform, 1);
  }

  /// Brings this rank's micro-batches of a batch to its device. Waits.
  void feed(const Samples& batch) {
    const Samples mine = batch.every(samples.rank(), samples.world_size());
    images.clear();
    labels.clear();
    for (int part = 0; part < setting.plan.micro_batches; ++part) {
      const Samples micro = mine.every(part, setting.plan.micro_batches);
      images.push_back(
          in_precision(Tensor::from_host(stream, {micro.count(), 16, 16, 1}, micro.images)));
      labels.push_back(LabelTensor::from_host(stream, {micro.count()}, micro.labels));
    }
    context.state().copy_from_host(
        {{.step = steps++,
          .learning_rate = Real(0.05),
          .loss_weight = Real(samples.world_size()) / Real(batch.count())}});
  }

  /// Computes the gradients of what was fed. Only enqueues, as the next two functions do.
  void forward_and_backward() {
    optimizer.zero_gradients();
    for (size_t part = 0; part < images.size(); ++part) {
      context.facts.last_contribution = part + 1 == images.size();
      const AnyTensor scores = model.network->forward(images[part], context);
      model.loss->forward(scores, labels[part], network.loss(), context);
      model.network->backward(model.loss->backward(labels[part], context), context);
    }
  }
  void update() {
    optimizer.step(context.state(), network.loss());
    network.gather_parameters();
    healths = network.healths(optimizer.health(), context);
  }
  void step(const Samples& batch) {
    feed(batch);
    forward_and_backward();
    clip();
    update();
  }

  /// The step in which this rank stops; -1: none so far. Waits.
  int64_t failed_step() const {
    int64_t first = -1;
    for (const HealthTensor& health : healths) {
      const int64_t failed = health.to_host()[0].failed_step;
      if (failed >= 0 && (first < 0 || failed < first)) first = failed;
    }
    return first;
  }

  /// The number of steps in which a gradient has overflowed, in fp16. Waits.
  int64_t skipped_steps() const { return optimizer.health().to_host()[0].skipped; }

  /// All ranks call it. Waits.
  MeshResult trained() {
    MeshResult found{.weights = {}, .loss = network.loss().to_host()[0]};
    network.visit_parameters([&](const StateTensor& whole) {
      found.weights.insert(found.weights.end(), whole.real.begin(), whole.real.end());
    });
    return found;
  }

  MeshSetting setting;
  DeviceMesh mesh;
  Communicator& samples;  // the ranks that have other ones
  Stream stream, communication;
  Model model;
  MeshParallel network;
  std::shared_ptr<SyncBatchNorm> synchronised;
  Optimizer optimizer;
  ClipByNorm clip;
  Context context;
  std::vector<AnyTensor> images;  // by micro-batch
  std::vector<LabelTensor> labels;
  int64_t steps = 0;  // begun
  std::vector<HealthTensor> healths{};

 private:
  int64_t growth_interval() const { return setting.sharding.precision == Precision::fp16 ? 9 : 0; }
  AnyTensor in_precision(const Tensor& x) {
    if (context.precision() == Precision::real) return x;
    AnyTensor rounded = context.activation(x.shape());
    stream.kernels().to_sixteen_bits(stream, 1, x, rounded);
    return rounded;
  }
};

/// The same steps in one process, on a CPU device.
inline MeshResult train_in_one_process(const std::vector<Samples>& batches,
                                       const ModelOptions& model) {
  const auto network = [&](int) { return make_model(model).network; };
  Member whole(0, network, 1);
  const ClipByNorm clip(whole.parameters, kMostNorm);
  for (const Samples& batch : batches) {
    whole.parameters.zero_gradients();
    whole.accumulate(batch, 1.0 / double(batch.count()));
    clip();
    whole.optimizer.step(whole.context.state(), whole.loss);
  }
  MeshResult found{.weights = {}, .loss = whole.loss.to_host()[0]};
  for (const Parameter* p : whole.parameters.parameters()) {
    const StateTensor state = state_of(*p);
    found.weights.insert(found.weights.end(), state.real.begin(), state.real.end());
  }
  return found;
}

}  // namespace lockstep::testing::mesh
