// Stage 03: a network on several devices.
//
// The training program of stage 01, with the network cut in pieces, each with its weights on a
// device of its own: between the layers, as a pipeline, or inside them. Compare with
//   diff 01-single-gpu/main.cpp 03-model-split/main.cpp

#include <CLI/CLI.hpp>

#include "03-model-split/pipeline.h"
#include "03-model-split/tensor_training.h"
#include "common/app/evaluate.h"
#include "common/app/feeder.h"
#include "common/app/program.h"
#include "common/app/training_log.h"
#include "common/app/weights_file.h"
#include "common/core/error.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"

namespace lockstep {
namespace {

/// What this stage's own options say.
struct SplitOptions {
  std::string split = "auto";
  std::string schedule = "1f1b";
  int micro_batches = 0;  // 0: 4, but 1 for the naive schedule
  bool recompute = false;
  bool print_schedule = false;
  std::vector<std::string> tensor_split;  // "auto", or the layers to be split inside

  bool inside_layers() const { return !tensor_split.empty(); }
  int parts() const {
    return micro_batches > 0 ? micro_batches : schedule == "naive" || inside_layers() ? 1 : 4;
  }
  PipelineOptions pipeline() const { return {parse_schedule(schedule), parts(), recompute}; }
};

/// A network in pieces, and what trains it. One of the first two.
struct Pieces {
  std::unique_ptr<LayerSplit> stages;
  std::unique_ptr<TensorSplit> shards;
  std::unique_ptr<SplitTraining> training;
};

Pieces cut_between_layers(const Options& options, const SplitOptions& split, const Dataset& set,
                          const std::vector<Stream>& streams, Model& model) {
  Layers layers = static_cast<Sequential&>(*model.network).release_layers();
  const Shape images{std::max<int64_t>(2, options.batch_size / split.parts()), set.height,
                     set.width, set.channels};
  const Cuts cuts =
      choose_cuts(split.split, layers, static_cast<int>(streams.size()), images, streams[0]);
  Pieces pieces;
  pieces.stages = std::make_unique<LayerSplit>(std::move(layers), cuts, streams);
  auto pipeline = std::make_unique<Pipeline>(*pieces.stages, *model.loss, set, options.sgd_rule(),
                                             split.pipeline());
  pipeline->require_samples(options.smallest_batch(set.count()));
  pieces.training = std::move(pipeline);
  return pieces;
}

Pieces cut_inside_layers(const Options& options, const SplitOptions& split, const Dataset& set,
                         const std::vector<Stream>& streams, LocalWorld& world, Model& model) {
  require(split.micro_batches == 0 && !split.recompute && split.split == "auto",
          "--tensor-split: --split, --micro-batches and --recompute are for cuts between layers; "
          "leave them out");
  std::optional<TensorSplit::Names> names;
  if (split.tensor_split != TensorSplit::Names{"auto"}) names = split.tensor_split;
  Pieces pieces;
  const ModelOptions network = options.model_options(set);
  pieces.shards = std::make_unique<TensorSplit>(network, streams, world, names);
  pieces.training = std::make_unique<TensorTraining>(*pieces.shards, streams, *model.loss, network,
                                                     set, options.sgd_rule());
  return pieces;
}

void train(const Options& options, const SplitOptions& split) {
  const std::vector<DeviceId> ids = options.device_ids();
  if (split.print_schedule) {
    const PipelineOptions timetable = split.pipeline();
    fmt::print("{}",
               draw(timetable.schedule, static_cast<int>(ids.size()), timetable.micro_batches));
    return;
  }

  // Data: bytes in host memory.
  const DatasetPair data = load_dataset(options.data, options.data_dir);

  // The devices, each with a stream on which its work happens in order. `stream` is device 0's.
  const Devices devices = open_devices(ids, options.device_options());
  const std::vector<Stream> streams = create_streams(devices, "compute");
  const Stream stream = streams[0];
  const HostAllocator pinned = [&](size_t bytes) { return devices[0]->allocate_host(bytes); };
  const std::unique_ptr<LocalWorld> world = make_local_world(pointers_to(devices));

  // Network in pieces, parameters, optimizers.
  Model model = make_model(options.model_options(data.train));
  const Pieces pieces = split.inside_layers()
                            ? cut_inside_layers(options, split, data.train, streams, *world, model)
                            : cut_between_layers(options, split, data.train, streams, model);
  SplitTraining& training = *pieces.training;
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
  TrainingLog log("03-model-split", options, stream, pointers_to(devices), data.train.count(),
                  steps_per_epoch);
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
      const int64_t index = batch->index, size = batch->size;
      const StepState facts{.step = log.steps(),
                            .learning_rate = Real(schedule.at(log.steps())),
                            .loss_weight = Real(1) / Real(size)};
      training.train_step(std::move(*batch), facts, loss);
      log.step(index, size, loss, training.healths());
    }
    log.end_epoch();
    test();
  }
  if (options.epochs == 0) test();

  if (!options.save.empty()) save_weights(options.save, training.state());
  training.report(log);
  log.finish(training.flops());
}

void add_options(CLI::App& app, SplitOptions& split) {
  app.add_option("--split", split.split,
                 "the layers with which stages begin (3,6), or what is to be balanced: auto "
                 "(operations), measured (time), parameters (bytes)");
  app.add_option("--schedule", split.schedule, "naive, gpipe or 1f1b");
  app.add_option("--micro-batches", split.micro_batches,
                 "parts of a batch; 0: 4, in the naive schedule 1")
      ->check(CLI::Range(0, 1024));
  app.add_flag("--recompute", split.recompute,
               "run each forward again before its backward instead of keeping its work");
  app.add_flag("--print-schedule", split.print_schedule,
               "draw the timetable for these devices and micro-batches, and end");
  app.add_option("--tensor-split", split.tensor_split,
                 "no pipeline: split inside the layers, auto (all that divide) or by name "
                 "(conv2,fc1)")
      ->delimiter(',');
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::SplitOptions split;
  return lockstep::run_program(
      {.name = "03-model-split",
       .summary = "Stage 03: one network on many devices, between its layers or inside them.",
       .add_options = [&](CLI::App& app) { lockstep::add_options(app, split); },
       .baseline = "01-single-gpu",
       .emulate =
           [&](size_t) {
             return split.inside_layers() ? "none" : "micro:" + std::to_string(split.parts());
           }},
      argc, argv, [&](const lockstep::Options& options) { lockstep::train(options, split); });
}
