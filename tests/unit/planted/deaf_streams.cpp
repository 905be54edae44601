// Two ranks, threads of this process, share two layers; with a fault, one of each rank's streams
// waits for nobody. What ThreadSanitizer must report, and what it must accept.
//
//   deaf-streams none|compute|communication fast|late
//
// Exit status 0: ran to the end, 1: the correct program computed a wrong result, 2: wrong usage.
// ThreadSanitizer, when it reports something, sets its own.

#include <chrono>
#include <cstdio>
#include <thread>

#include "03-model-split/tensor/row_and_column.h"
#include "common/comm/host_communicator.h"
#include "common/core/cpu_stream.h"
#include "common/kernels/devices.h"
#include "tests/support/rank_threads.h"
#include "tests/support/shm_peers.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

/// Before and after every wait the host sleeps: by then what is enqueued has long been done, and
/// whatever told the host so would hide the fault.
class FaultyStream final : public CpuStream {
 public:
  FaultyStream(Device& device, const std::string& name, bool deaf, milliseconds pause)
      : CpuStream(device, name), deaf_(deaf), pause_(pause) {}
  void wait(const Event& event) override {
    std::this_thread::sleep_for(pause_);
    if (!deaf_) CpuStream::wait(event);
    std::this_thread::sleep_for(pause_);
  }

 private:
  bool deaf_;
  milliseconds pause_;
};

/// One rank's passes through a column and a row, all of whose numbers are 1: the output is that of
/// the whole layers.
bool pass(Communicator& comm, const std::string& deaf, milliseconds pause) {
  const std::unique_ptr<Device> device = open_device({DeviceId::Kind::cpu, comm.rank()}, {});
  FaultyStream compute(*device, "compute", deaf == "compute", pause),
      communication(*device, "communication", deaf == "communication", pause);
  const Stream stream(compute);
  SplitRanks ranks(comm, Stream(communication));
  Sequential layers;
  layers.add("column", std::make_unique<ColumnLinear>(Linear(8, 64), ranks))
      .add("row", std::make_unique<RowLinear>(Linear(64, 8), ranks));
  const FlatParameters parameters(layers, stream);
  stream.kernels().fill(stream, 1, parameters.values());
  Context context(stream);
  const Tensor x = Tensor::empty(stream, {4, 8});
  stream.kernels().fill(stream, 1, x);
  const Tensor y = layers.forward(x, context), dx = layers.backward(y, context);
  const std::vector<Real> out = y.to_host(), gradient = dx.to_host();
  const Real expected = 64 * (8 + 1) + 1;
  return out == std::vector<Real>(out.size(), expected) &&
         gradient == std::vector<Real>(gradient.size(), 64 * 8 * expected);
}

int run(const std::vector<std::string>& arguments) {
  const std::string deaf = arguments.empty() ? "" : arguments[0];
  const std::string pace = arguments.size() < 2 ? "" : arguments[1];
  if ((deaf != "none" && deaf != "compute" && deaf != "communication") ||
      (pace != "fast" && pace != "late")) {
    fmt::print(stderr, "usage: deaf-streams none|compute|communication fast|late\n");
    return 2;
  }
  auto peers = testing::shm_peers(2, 20);
  const std::vector<std::string> errors = testing::run_ranks(2, [&](int rank) {
    HostCommunicator comm(rank, 2, make_shm_transport(std::move(peers[size_t(rank)])));
    if (!pass(comm, deaf, milliseconds(pace == "late" ? 20 : 0))) fail<BadInput>("wrong numbers");
  });
  for (const std::string& error : errors) {
    if (!error.empty()) fmt::print(stderr, "{}\n", error);
  }
  return deaf == "none" && errors != std::vector<std::string>(2) ? 1 : 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::run({argv + 1, argv + argc}); }
