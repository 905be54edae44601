// Stage 03: a network on several devices.
//
// The training program of stage 01, with the network cut in pieces, each with its weights on a
// device of its own: between the layers, as a pipeline, or inside them. Compare with
//   diff 01-single-gpu/main.cpp 03-model-split/main.cpp

#include <fmt/format.h>

#include "03-model-split/split_options.h"
#include "common/app/evaluate.h"
#include "common/app/feeder.h"
#include "common/app/program.h"
#include "common/app/training_log.h"
#include "common/app/weights_file.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"

namespace lockstep {
namespace {

void train(const Options& options, const SplitOptions& split) {
  if (split.print_schedule) {
    fmt::print("{}", split.timetable(options.device_ids().size()));
    return;
  }

  // Data: bytes in host memory.
  const DatasetPair data = load_dataset(options.data, options.data_dir);

  // The devices, each with a stream on which its work happens in order. `stream` is device 0's.
  const Devices devices = open_devices(options.device_ids(), options.device_options());
  const std::vector<Stream> streams = create_streams(devices, "compute");
  const Stream stream = streams[0];
  const HostAllocator pinned = [&](size_t bytes) { return devices[0]->allocate_host(bytes); };
  const std::unique_ptr<LocalWorld> world = make_local_world(pointers_to(devices));

  // Network in pieces, parameters, optimizers.
  Model model = make_model(options.model_options(data.train));
  const std::unique_ptr<SplitTraining> pieces =
      split_model(model, options, split, data.train, streams, *world);
  SplitTraining& training = *pieces;
  training.initialize(options.initializer(), options.seed);
  if (!options.load.empty()) {
    load_weights(options.load, [&](const auto& state) { training.load_state(state); });
  }

  // What brings the batches in and carries the losses out.
  DataLoader train_loader(data.train, options.train_loader(data.train, pinned));
  DataLoader test_loader(data.test, options.test_loader(pinned));
  const int64_t steps_per_epoch = train_loader.batches_per_epoch();
  const LearningRateSchedule schedule = options.schedule(steps_per_epoch);
  Feeder feeder(stream, data.train);
  Context context(stream);
  const Tensor loss = Tensor::empty(training.loss_stream(), {1});
  TrainingLog log("03-model-split", options, loss.home(), pointers_to(devices), data.train.count());
  log.start(data.train, data.test, training.parameter_count());
  const auto test = [&] {
    log.evaluated(
        evaluate(training.network(), *model.loss, test_loader, data.test.count(), feeder, context));
  };

  for (int64_t epoch = 0; epoch < options.epochs && !log.finished(); ++epoch) {
    log.begin_epoch(epoch);
    train_loader.begin_epoch(epoch);
    while (!log.finished()) {
      std::optional<HostBatch> batch = train_loader.next();
      if (!batch) break;
      const StepState step{.step = log.steps(),
                           .learning_rate = Real(schedule.at(log.steps())),
                           .loss_weight = Real(1) / Real(batch->size)};
      training.train_step(*batch, step, loss);
      log.step(*batch, loss, training.healths());
    }
    log.end_epoch();
    test();
  }
  if (options.epochs == 0) test();

  if (!options.save.empty()) save_weights(options.save, training.state());
  training.report(log);
  log.finish(training.flops());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::SplitOptions split;
  return lockstep::run_program(
      {.name = "03-model-split",
       .summary = "Stage 03: one network on many devices, between its layers or inside them.",
       .add_options = [&](auto& app) { split.add_to(app); },
       .baseline = "01-single-gpu",
       .emulate = [&](size_t) { return split.emulation(); }},
      argc, argv, [&](const lockstep::Options& options) { lockstep::train(options, split); });
}
