// A training run that does little but save: checkpoint-saver DIR STEPS EVERY resumes from the
// newest checkpoint in DIR, saves every EVERY steps, and ends after STEPS. Its gradients are
// numbers that follow from the step. For tests that kill it.

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/options/report.h"

namespace lockstep {
namespace {

void train(const std::filesystem::path& directory, int64_t steps, int64_t every) {
  const std::unique_ptr<Device> device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream stream = device->create_stream("compute");
  const std::unique_ptr<Module> network = make_model({.kind = ModelKind::seed_bn}).network;
  const FlatParameters parameters(*network, stream);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  const Optimizer optimizer(parameters, {.momentum = 0.9});
  const StepStateTensor state_of_step = StepStateTensor::empty(stream, {});
  const Tensor loss = Tensor::from_host(stream, {1}, {0});
  const Trained trained{*network, parameters, optimizer};

  TrainingState state;
  const auto warn = [](const std::string& line) { fmt::print(stderr, "{}\n", line); };
  if (const auto newest = newest_checkpoint(directory, warn)) {
    restore(*newest, trained);
    state = TrainingState::from_json(newest->training, newest->path.string());
  }
  while (state.steps < steps) {
    state_of_step.copy_from_host({{.step = state.steps, .learning_rate = Real(0.01)}});
    stream.kernels().fill(stream, Real(state.steps % 7) - Real(2.9), parameters.gradients());
    optimizer.step(state_of_step, loss);
    if (++state.steps % every != 0) continue;
    save_checkpoint(directory, trained, state);
    remove_old_checkpoints(directory, state.steps, 2);
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::report_uncaught_errors();
  if (argc != 4) return 1;
  lockstep::train(argv[1], std::atoll(argv[2]), std::atoll(argv[3]));
}
