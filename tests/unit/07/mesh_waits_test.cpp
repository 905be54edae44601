// Which axis a rank waits for: one of four ranks, here threads, is late.

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "07-mesh/mesh_parallel.h"
#include "common/core/stream_backend.h"
#include "common/training/pass_collectives.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_test_support.h"
#include "tests/unit/comm/process_group_job.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

constexpr ModelOptions kFourLayers{
    .kind = ModelKind::mlp, .width = 4, .height = 16, .width_pixels = 16};
constexpr int kMicroBatches = 2;
constexpr double kLate = 0.3;  // seconds

/// Seconds that a rank has waited along each axis, and what of that was before sums began.
struct Waits {
  double data, shard, tensor, pipeline, queued;
};

Waits waits_of(MeshParallel& parallel) {
  return {parallel.seconds_waited(Axis::data), parallel.seconds_waited(Axis::shard),
          parallel.seconds_waited(Axis::tensor), parallel.seconds_waited(Axis::pipeline),
          parallel.split_ranks().seconds_queued()};
}

void sleep_on(Stream stream) {
  stream.backend().host_task(
      "sleep", [] { std::this_thread::sleep_for(std::chrono::duration<double>(kLate)); });
}

/// A step's passes; the passes of the rank that is late begin later.
void step(Model& model, MeshParallel& parallel, Stream passes, bool late) {
  const Samples samples(4, 1);
  const auto images = Tensor::from_host(passes, {4, 16, 16, 1}, samples.images);
  const auto labels = LabelTensor::from_host(passes, {4}, samples.labels);
  passes.kernels().fill(passes, 0, parallel.loss());
  Context context(passes);
  context.state().copy_from_host({{.loss_weight = Real(1) / 4}});
  if (late) sleep_on(passes);
  for (int part = 0; part < kMicroBatches; ++part) {
    context.facts.last_contribution = part + 1 == kMicroBatches;
    const AnyTensor scores = model.network->forward(images, context);
    model.loss->forward(scores, labels, parallel.loss(), context);
    model.network->backward(model.loss->backward(labels, context), context);
  }
}

/// Rank 0's, in a step for which rank `late` comes late. The step before it makes the connections.
Waits waits_for(int late, const std::string& axes) {
  Waits found{};
  const auto errors = testing::group::Job(4, "shm").run([&](ProcessGroup& group) {
    const auto device = open_device({DeviceId::Kind::cpu, group.rank()}, {});
    const std::unique_ptr<Communicator> world = group.connect(*device);
    const Stream passes = device->create_stream("compute");
    DeviceMesh mesh(MeshShape::from(axes), group, *device, *world);
    Model model = make_model(kFourLayers);
    MeshParallel parallel(model, kFourLayers, mesh, passes, device->create_stream("communication"),
                          {}, {ScheduleKind::one_f1b, kMicroBatches});
    parallel.initialize(Initializer::kaiming_uniform, 1);
    step(model, parallel, passes, false);
    const Waits before = waits_of(parallel);
    group.together([] {});
    step(model, parallel, passes, group.rank() == late);
    const Waits after = waits_of(parallel);
    if (group.rank() != 0) return;
    found = {after.data - before.data, after.shard - before.shard, after.tensor - before.tensor,
             after.pipeline - before.pipeline, after.queued - before.queued};
  });
  REQUIRE(errors == std::vector<std::string>(4));
  return found;
}

constexpr double kMost = 0.8 * kLate, kLittle = 0.4 * kLate;

/// Whether one of five attempts holds: on a busy machine a rank also waits for others, or a thread,
/// that have no core.
template <class Attempt>
bool once_of_five(Attempt holds) {
  for (int attempt = 0; attempt < 5; ++attempt) {
    if (holds()) return true;
  }
  return false;
}

TEST_CASE("A rank that is late is waited for along the axis on which it differs", "[mesh][waits]") {
  CHECK(once_of_five([] {
    const Waits w = waits_for(1, "data=2,shard=2");
    return w.shard > kMost && w.data < kLittle;
  }));
  CHECK(once_of_five([] {
    const Waits w = waits_for(2, "data=2,shard=2");
    return w.data > kMost && w.shard < kLittle;
  }));
  CHECK(once_of_five([] {
    const Waits w = waits_for(1, "shard=2,tensor=2");
    return w.tensor > kMost && w.queued < kLittle && w.shard < kLittle;
  }));
  CHECK(once_of_five([] {
    const Waits w = waits_for(2, "pipeline=2,data=2");
    return w.pipeline > kMost && w.data < kLittle;
  }));
}

/// What a pass waits for a sum, and what of that the sum waits for another message, in seconds. The
/// other message takes long, or the sum itself.
struct Sum {
  double waited, queued;
};
Sum sum_of(bool behind_another) {
  Sum found{};
  const auto errors = testing::group::Job(1, "shm").run_connected(
      [&](ProcessGroup&, Communicator& comm, Stream communication) {
        Context context(communication.device().create_stream("compute"));
        PassCollectives calls(comm, communication);
        if (behind_another) sleep_on(communication);
        calls.run("fc1", Purpose::activations, context, [&](Stream stream) {
          if (!behind_another) sleep_on(stream);
        });
        found = {calls.seconds_waited(), calls.seconds_queued()};
      });
  REQUIRE(errors == std::vector<std::string>(1));
  return found;
}

TEST_CASE("What a sum waits behind another message is told apart", "[mesh][waits]") {
  CHECK(once_of_five([] {
    const Sum sum = sum_of(true);
    return sum.waited > kMost && sum.queued > kMost;
  }));
  CHECK(once_of_five([] {
    const Sum sum = sum_of(false);
    return sum.waited > kMost && sum.queued < kLittle;
  }));
}

}  // namespace
}  // namespace lockstep
