// Stage 03: a network on several devices, split inside its layers.
//
// The training program of stage 01, with the wide layers cut: every device (a rank) has a part of
// their weights, and all of the other layers. What is whole stays the same on all ranks, bit by
// bit: it is computed from the same numbers in the same order. Compare with
//   diff 01-single-gpu/main.cpp 03-model-split/tensor/main.cpp

#include "03-model-split/tensor/as_one_network.h"
#include "03-model-split/tensor/stage_options.h"
#include "03-model-split/tensor/training_ranks.h"
#include "common/app/program.h"
#include "common/app/training_log.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/step/evaluate.h"
#include "common/step/feeder.h"
#include "common/step/weights_file.h"

namespace lockstep {
namespace {

/// One optimizer step over a batch that every rank has. Leaves its mean loss in ranks.loss().
void train_step(TensorSplit& network, Loss& loss, TrainingRanks& ranks) {
  const Tensors images = ranks.images();
  ranks.zero_gradients();  // and the losses: both add up
  const Tensors scores = network.forward(images, ranks.contexts());
  network.backward(ranks.loss_and_gradients(loss, scores), ranks.contexts());
  ranks.update();
}

void train(const Options& options, const TensorProgramOptions& own) {
  // Data: bytes in host memory.
  const DatasetPair data = load_dataset(options.data, options.data_dir);

  // The devices, each with a stream on which its work happens in order. `stream` is device 0's.
  const Devices devices = open_devices(options.device_ids(), options.device_options());
  const std::vector<Stream> streams = create_streams(devices, "compute");
  const Stream stream = streams[0];
  const HostAllocator pinned = [&](size_t bytes) { return devices[0]->allocate_host(bytes); };
  const std::unique_ptr<SingleProcessWorld> world = make_single_process_world(pointers_to(devices));

  // Network in ranks, each with parameters and an optimizer.
  const Model model = make_model(options.model_options(data.train));  // for its loss
  TensorSplit network = split_network(options.model_options(data.train), own, streams, *world);
  network.initialize(options.initializer(), options.seed);
  if (!options.load.empty()) {
    load_weights(options.load, [&](const auto& state) { network.load_full_state(state); });
  }
  TrainingRanks ranks(network, data.train, options.optimizer_rule());
  AsOneNetwork for_evaluation(network);

  // What brings the batches in and carries the losses out.
  DataLoader train_loader(data.train, options.train_loader(data.train, pinned));
  DataLoader test_loader(data.test, options.test_loader(pinned));
  const LearningRateSchedule schedule = options.schedule(train_loader.batches_per_epoch());
  Feeder feeder(stream, data.train);  // these two for the evaluation
  Context context(stream);
  const Tensor loss = ranks.loss();
  TrainingLog log("tensor-split", options, stream, pointers_to(devices), data.train.count());
  log.start(data.train, data.test, network.parameter_count());
  const auto evaluate_all = [&] {
    return evaluate(for_evaluation, *model.loss, test_loader, data.test.count(), feeder, context);
  };

  for (int64_t epoch = 0; epoch < options.epochs && !log.finished(); ++epoch) {
    log.begin_epoch(epoch);
    train_loader.begin_epoch(epoch);
    while (!log.finished()) {
      const std::optional<HostBatch> batch = train_loader.next();
      if (!batch) break;
      ranks.feed(*batch, {.step = log.steps(),
                          .learning_rate = Real(schedule.at(log.steps())),
                          .loss_weight = Real(1) / Real(batch->size)});
      train_step(network, *model.loss, ranks);
      log.step(*batch, loss, ranks.healths());
    }
    log.end_epoch();
    log.evaluated(evaluate_all());
  }
  if (options.epochs == 0) log.evaluated(evaluate_all());

  if (!options.save.empty()) save_weights(options.save, network.full_state());
  network.report(log);
  log.finish(ranks.flops());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::TensorProgramOptions own;
  return lockstep::run_program(
      {.name = "tensor-split",
       .summary = "Stage 03: a network split inside its layers (tensor parallelism).",
       .add_options = [&](lockstep::OptionParser& parser) { own.add_to(parser); },
       .baseline = "01-single-gpu"},
      argc, argv, [&](const lockstep::Options& options) { lockstep::train(options, own); });
}
