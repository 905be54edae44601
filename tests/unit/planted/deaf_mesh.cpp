// Four ranks of a mesh, threads of this process, train the seed network; with a fault, a stream of
// each rank does not wait. What ThreadSanitizer must report, and what it must accept.
//
//   deaf-mesh MESH none|shards|compute|communication|norm|replicas
//
//   none           all wait
//   shards         all wait, in a backward of stage 06's network on the mesh
//   compute        the passes wait for nobody
//   communication  the messages wait for nobody
//   norm           the passes do not wait for the sum of the norm
//   replicas       in that backward the sum over replicas has a stream of its own, which does not
//                  wait for the sums of shards
//
// Exit status 0: ran to the end, 1: a rank failed, 2: wrong usage. ThreadSanitizer, when it reports
// something, sets its own.

#include <algorithm>

#include "common/core/cpu_stream.h"
#include "tests/support/mesh_training.h"
#include "tests/unit/comm/process_group_job.h"

namespace lockstep {
namespace {

using testing::Samples;
using testing::mesh::MeshMember;

class FaultyStream final : public CpuStream {
 public:
  FaultyStream(Device& device, const std::string& name, bool deaf)
      : CpuStream(device, name), deaf(deaf) {}
  void wait(const Event& event) override {
    if (!deaf) CpuStream::wait(event);
  }
  bool deaf;
};

/// The ranks along an axis, whose sums go to a stream that nobody else has.
class OnOwnStream final : public Communicator {
 public:
  OnOwnStream(Communicator& ranks, Stream own)
      : Communicator(ranks.rank(), ranks.world_size()), ranks_(ranks), own_(own) {}

 private:
  void enqueue(Stream, const std::vector<Call>& together, FlightCall) override {
    const Call& call = together.front();
    ranks_.all_reduce(own_, Elements(call.mine.data, call.mine.count, call.mine.type));
  }

  Communicator& ranks_;
  Stream own_;
};

void train(ProcessGroup& group, const std::string& mesh, const std::string& fault) {
  const auto device = open_device({DeviceId::Kind::cpu, group.rank()}, {});
  const std::unique_ptr<Communicator> world = group.connect(*device);
  FaultyStream compute(*device, "compute", fault == "compute"),
      communication(*device, "communication", fault == "communication");
  MeshMember member(group, *world, Stream(compute), Stream(communication), {mesh});
  for (uint32_t step = 0; step < 2; ++step) {
    member.feed(Samples(8, step));
    member.forward_and_backward();
    compute.deaf = compute.deaf || fault == "norm";
    member.clip();
    compute.deaf = fault == "compute";
    member.update();
  }
  member.stream.synchronize();
}

/// The network of stage 06, whose shards have replicas.
void reduce_to_shards(ProcessGroup& group, const std::string& shape, bool own_stream) {
  const auto device = open_device({DeviceId::Kind::cpu, group.rank()}, {});
  const std::unique_ptr<Communicator> world = group.connect(*device);
  DeviceMesh mesh(MeshShape::from(shape), group, *device, *world);
  Communicator& shard = mesh.along({Axis::shard});
  Communicator& replicas = mesh.along({Axis::data});
  OnOwnStream deaf(replicas, device->create_stream("replicas"));
  const Stream passes = device->create_stream("compute");
  FullyShardedDataParallel network(make_model(testing::mesh::kSeed).network, passes, shard,
                                   group.exchanger(), device->create_stream("communication"), {},
                                   own_stream ? &deaf : &replicas);
  network.initialize(Initializer::kaiming_uniform, 1);
  Context context(passes);
  const Tensor x = Tensor::empty(passes, {2, 16, 16, 1});
  passes.kernels().fill(passes, 1, x);
  network.backward(network.forward(x, context), context);
  passes.synchronize();
}

int run(const std::vector<std::string>& arguments) {
  const std::vector<std::string> faults{"none",          "shards", "compute",
                                        "communication", "norm",   "replicas"};
  if (arguments.size() != 2 || std::ranges::count(faults, arguments[1]) == 0) {
    fmt::print(stderr, "usage: deaf-mesh MESH none|shards|compute|communication|norm|replicas\n");
    return 2;
  }
  const std::vector<std::string> errors =
      testing::group::Job(4, "shm", 20).run([&](ProcessGroup& group) {
        const std::string &mesh = arguments[0], &fault = arguments[1];
        if (fault == "shards") return reduce_to_shards(group, mesh, /*own_stream=*/false);
        if (fault == "replicas") return reduce_to_shards(group, mesh, /*own_stream=*/true);
        train(group, mesh, fault);
      });
  for (const std::string& error : errors) {
    if (!error.empty()) fmt::print(stderr, "{}\n", error);
  }
  return errors == std::vector<std::string>(4) ? 0 : 1;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::run({argv + 1, argv + argc}); }
