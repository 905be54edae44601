// Stage 03: a network on several devices, as a pipeline.
//
// The training program of stage 01, with the network cut between its layers: each piece, a stage of
// the pipeline, is on a device of its own, and works on a part of the batch while the others work
// on theirs. Compare with
//   diff 01-single-gpu/main.cpp 03-model-split/pipeline/main.cpp

#include <fmt/format.h>

#include "03-model-split/pipeline/stage_options.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"
#include "common/training/evaluate.h"
#include "common/training/feeder.h"
#include "common/training/program.h"
#include "common/training/training_log.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

/// One optimizer step. Leaves the batch's mean loss in pipeline.loss(), on the last device.
void train_step(Pipeline& pipeline, const HostBatch& batch, const StepState& step) {
  pipeline.feed(batch, step);  // the first stage copies the images, the last one the labels
  pipeline.zero_gradients();
  pipeline.run_schedule();  // receive, forward, send, backward: every stage has a list of these
  pipeline.update();
}

void train(const PipelineProgramOptions& options) {
  if (options.print_schedule) return options.print_timetable(options.device_ids().size());

  // Data: bytes in host memory.
  const DatasetPair data = load_dataset(options.data, options.data_dir);

  // The devices, each with a stream on which its work happens in order. `stream` is device 0's.
  const Devices devices = open_devices(options.device_ids(), options.device_options());
  const std::vector<Stream> streams = create_streams(devices, "compute");
  const Stream stream = streams[0];
  const HostAllocator pinned = [&](size_t bytes) { return devices[0]->allocate_host(bytes); };

  // Network, in stages with a device, parameters and an optimizer each.
  Model model = make_model(options.model_options(data.train));
  Pipeline pipeline = make_pipeline(model, options, data.train, streams);  // takes the layers
  pipeline.initialize(options.init, options.seed);
  if (!options.load.empty()) load_weights(options.load, pipeline.network());
  pipeline.round();  // with --precision bf16 or fp16: copies of the weights

  // What brings the batches in and carries the losses out.
  DataLoader train_loader(data.train, options.train_loader(data.train, pinned));
  DataLoader test_loader(data.test, options.test_loader(pinned));
  const LearningRateSchedule schedule = options.schedule(train_loader.batches_per_epoch());
  Feeder feeder(stream, data.train);  // these two for the evaluation
  Context context(stream, options.precision);
  const Tensor loss = pipeline.loss();
  TrainingLog log("03-model-split", options, loss.home(), pointers_to(devices), data.train.count());
  log.start(data.train, data.test, pipeline.parameter_count());
  const auto evaluate_all = [&] {
    return evaluate(pipeline.network(), *model.loss, test_loader, data.test.count(), feeder,
                    context);
  };

  for (int64_t epoch = 0; epoch < options.epochs && !log.finished(); ++epoch) {
    log.begin_epoch(epoch);
    train_loader.begin_epoch(epoch);
    while (!log.finished()) {
      const std::optional<HostBatch> batch = train_loader.next();
      if (!batch) break;
      const StepState step{.step = log.steps(),
                           .learning_rate = Real(schedule.at(log.steps())),
                           .loss_weight = Real(1) / Real(batch->size)};
      train_step(pipeline, *batch, step);
      log.step(*batch, loss, pipeline.healths());
    }
    log.end_epoch();
    log.evaluated(evaluate_all());
  }
  if (options.epochs == 0) log.evaluated(evaluate_all());

  if (!options.save.empty()) save_weights(options.save, pipeline.network());
  pipeline.report(log);
  log.finish(pipeline.flops());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::PipelineProgramOptions options;
  return lockstep::run_program(
      {.name = "03-model-split",
       .summary = "Stage 03: a network cut between its layers, as a pipeline.",
       .baseline = "01-single-gpu",
       .emulate = [&](size_t devices) { return options.emulation(devices); }},
      options, argc, argv, [&] { lockstep::train(options); });
}
