// Files that pass between this program and PyTorch, both ways: the same images, the same scores.

#include <algorithm>
#include <cstdlib>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/training/weights_file.h"
#include "tests/support/catch.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

const std::filesystem::path kInterop = LOCKSTEP_PARITY_REFERENCE;
constexpr double kScoreTolerance = 1e-5;

/// The seed network with batch normalisation on a CPU device.
struct SeedBn {
  SeedBn() { initialize(parameters, Initializer::kaiming_uniform, 1); }

  /// What it makes of the images in a file, as PyTorch normalises them: [n, 10].
  std::vector<double> scores(const std::filesystem::path& io) {
    const SafetensorsFile file = load_safetensors(io);
    const TensorEntry& images = *std::ranges::find(file.tensors(), "images", &TensorEntry::name);
    std::vector<Real> pixels;
    for (const std::byte byte : images.bytes) {
      pixels.push_back(Real((std::to_integer<int>(byte) / 255.0 - 0.1307) / 0.3081));
    }
    Context context(stream);
    context.facts.training = false;
    const Tensor x = Tensor::from_host(stream, {images.shape[0], 28, 28, 1}, pixels);
    const std::vector<Real> y = network->forward(x, context).to_host();
    return {y.begin(), y.end()};
  }

  std::unique_ptr<Device> device = open_device({DeviceId::Kind::cpu, 0}, {});
  Stream stream = device->create_stream("compute");
  std::unique_ptr<Module> network = make_model({.kind = ModelKind::seed_bn}).network;
  FlatParameters parameters{*network, stream};
};

/// Numbers that a trained network might have, running statistics included.
void make_trained(SeedBn& net) {
  std::vector<Real> statistics = net.parameters.buffer_values().to_host();
  for (size_t i = 0; i < statistics.size(); ++i) statistics[i] += Real(i % 7) / 20;
  net.parameters.buffer_values().copy_from_host(statistics);
  set_batches_tracked(*net.network, {938, 938});
}

TEST_CASE("A recorded file of PyTorch's gives PyTorch's scores", "[parity][row106][row110]") {
  SeedBn net;
  load_weights(kInterop / "interop_seed_bn.safetensors", *net.network);
  const Weights expected = read_weights(kInterop / "interop_io.safetensors");
  CHECK(largest(difference(net.scores(kInterop / "interop_io.safetensors"),
                           expected.at("scores"))) <= kScoreTolerance);
  CHECK(batches_tracked(*net.network) == std::vector<int64_t>{3, 3});

  const TempDir folder;
  save_weights(folder / "back", *net.network);
  CHECK(relative_l2(read_weights(folder / "back"),
                    read_weights(kInterop / "interop_seed_bn.safetensors")) == 0);
}

TEST_CASE("PyTorch and this program load each other's files", "[parity][row106][row110]") {
  const TempDir folder;
  SeedBn theirs, ours;
  make_trained(ours);
  const Optimizer optimizer(ours.parameters, {.momentum = 0.9});
  save_checkpoint(folder.path(), {*ours.network, ours.parameters, optimizer}, TrainingState());

  const char* named = std::getenv("LOCKSTEP_TORCH_PYTHON");
  const ProcessResult run =
      run_process({named != nullptr ? named : "python3", kInterop.parent_path() / "interop.py",
                   "exchange", checkpoint_path(folder.path(), 0), folder.path()},
                  kDeadline);
  if (run.status == 77) LOCKSTEP_SKIP("no torch in python3, or in $LOCKSTEP_TORCH_PYTHON");
  INFO(story(run));
  REQUIRE(run.status == 0);

  load_weights(folder / "weights", *theirs.network);
  const std::vector<double> of_theirs = read_weights(folder / "io").at("scores"),
                            of_ours = read_weights(folder / "scores").at("scores");
  CHECK(largest(difference(theirs.scores(folder / "io"), of_theirs)) <= kScoreTolerance);
  CHECK(largest(difference(ours.scores(folder / "io"), of_ours)) <= kScoreTolerance);
  CHECK(largest(difference(of_theirs, of_ours)) > 0.01);
}

}  // namespace
}  // namespace lockstep
