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

/// Seconds that a rank has waited along each axis, and what of that was before sums began.
struct Waits {
  double data, shard, tensor, pipeline, queued;
};

Waits waits_of(MeshParallel& parallel) {
  return {parallel.seconds_waited(Axis::data), parallel.seconds_waited(Axis::shard),
          parallel.seconds_waited(Axis::tensor), parallel.seconds_waited(Axis::pipeline),
          parallel.split_ranks().seconds_queued()};
}

void sleep_on(Stream stream, double seconds) {
  stream.backend().host_task(
      "sleep", [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
}

/// A step's passes, which begin late by so many seconds.
void step(Model& model, MeshParallel& parallel, Stream passes, double late) {
  const Samples samples(4, 1);
  const auto images = Tensor::from_host(passes, {4, 16, 16, 1}, samples.images);
  const auto labels = LabelTensor::from_host(passes, {4}, samples.labels);
  passes.kernels().fill(passes, 0, parallel.loss());
  Context context(passes);
  context.state().copy_from_host({{.loss_weight = Real(1) / 4}});
  if (late > 0) sleep_on(passes, late);
  for (int part = 0; part < kMicroBatches; ++part) {
    context.facts.last_contribution = part + 1 == kMicroBatches;
    const AnyTensor scores = model.network->forward(images, context);
    model.loss->forward(scores, labels, parallel.loss(), context);
    model.network->backward(model.loss->backward(labels, context), context);
  }
}

/// Rank 0's, in a step for which rank `late` comes late. The step before it makes the connections.
Waits waits_for(int late, double seconds, const std::string& axes) {
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
    step(model, parallel, passes, 0);
    const Waits before = waits_of(parallel);
    group.together([] {});
    step(model, parallel, passes, group.rank() == late ? seconds : 0);
    const Waits after = waits_of(parallel);
    if (group.rank() != 0) return;
    found = {after.data - before.data, after.shard - before.shard, after.tensor - before.tensor,
             after.pipeline - before.pipeline, after.queued - before.queued};
  });
  REQUIRE(errors == std::vector<std::string>(4));
  return found;
}

bool is_most(double waited, double late) { return waited > 0.8 * late; }
bool is_little(double waited, double late) { return waited < 0.4 * late; }

/// Whether holds(seconds late) once. On a busy machine a rank also waits for others, or a thread,
/// that have no core: against a later rank that is less.
template <class Attempt>
bool once(Attempt holds) {
  for (double late = 0.3; late < 6; late *= 2) {
    if (holds(late)) return true;
  }
  return false;
}

TEST_CASE("A rank that is late is waited for along the axis on which it differs", "[mesh][waits]") {
  CHECK(once([](double late) {
    const Waits w = waits_for(1, late, "data=2,shard=2");
    return is_most(w.shard, late) && is_little(w.data, late);
  }));
  CHECK(once([](double late) {
    const Waits w = waits_for(2, late, "data=2,shard=2");
    return is_most(w.data, late) && is_little(w.shard, late);
  }));
  CHECK(once([](double late) {
    const Waits w = waits_for(1, late, "shard=2,tensor=2");
    return is_most(w.tensor, late) && is_little(w.queued, late) && is_little(w.shard, late);
  }));
  CHECK(once([](double late) {
    const Waits w = waits_for(2, late, "pipeline=2,data=2");
    return is_most(w.pipeline, late) && is_little(w.data, late);
  }));
}

/// What a pass waits for a sum, and what of that the sum waits for another message, in seconds. The
/// other message takes long, or the sum itself.
struct Sum {
  double waited, queued;
};
Sum sum_of(bool behind_another, double seconds) {
  Sum found{};
  const auto errors = testing::group::Job(1, "shm").run_connected(
      [&](ProcessGroup&, Communicator& comm, Stream communication) {
        Context context(communication.device().create_stream("compute"));
        PassCollectives calls(comm, communication);
        if (behind_another) sleep_on(communication, seconds);
        calls.run("fc1", Purpose::activations, context, [&](Stream stream) {
          if (!behind_another) sleep_on(stream, seconds);
        });
        found = {calls.seconds_waited(), calls.seconds_queued()};
      });
  REQUIRE(errors == std::vector<std::string>(1));
  return found;
}

TEST_CASE("What a sum waits behind another message is told apart", "[mesh][waits]") {
  CHECK(once([](double late) {
    const Sum sum = sum_of(true, late);
    return is_most(sum.waited, late) && is_most(sum.queued, late);
  }));
  CHECK(once([](double late) {
    const Sum sum = sum_of(false, late);
    return is_most(sum.waited, late) && is_little(sum.queued, late);
  }));
}

}  // namespace
}  // namespace lockstep
