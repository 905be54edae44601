// Stage 02: DataParallel.
//
// The training program of stage 01, with the network wrapped: each batch is divided over all
// devices, and device 0 gathers the scores, computes the loss, and updates the weights. Compare
// with
//   diff 01-single-gpu/main.cpp 02-dataparallel/main.cpp

#include "02-dataparallel/data_parallel.h"
#include "common/app/evaluate.h"
#include "common/app/feeder.h"
#include "common/app/program.h"
#include "common/app/training_log.h"
#include "common/app/weights_file.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"
#include "common/nn/sgd.h"

namespace lockstep {
namespace {

/// One optimizer step: the devices compute the gradients of their parts of the batch, device 0 adds
/// them up and moves the weights. Writes the batch's mean loss into `loss`, [1].
void train_step(Model& model, const Sgd& optimizer, Feeder& feeder, Context& context,
                PhaseTimer& phases, HostBatch batch, StepState facts, const Tensor& loss) {
  const DeviceBatch& part = feeder.feed(batch, {0, 1, batch.size}, facts, context);
  phases.start();
  optimizer.zero_gradients();
  context.kernels().fill(context.stream(), 0, loss);
  const Tensor scores = model.network->forward(feeder.normalize(part, context), context);
  model.loss->forward(scores, part.labels, loss, context);
  const Tensor scores_gradient = model.loss->backward(part.labels, context);
  phases.end("loss");
  model.network->backward(scores_gradient, context);
  optimizer.step(context.state(), loss);
  phases.end("step");
  phases.stop();
  feeder.retire(std::move(batch));
}

void train(const Options& options, ReduceMode mode) {
  // Data: bytes in host memory.
  const DatasetPair data = load_dataset(options.data, options.data_dir);

  // The devices, each with a stream on which its work happens in order. `stream` is device 0's.
  const Devices devices = open_devices(options.device_ids(), options.device_options());
  const std::vector<Stream> streams = create_streams(devices, "compute");
  const Stream stream = streams[0];
  const HostAllocator pinned = [&](size_t bytes) { return devices[0]->allocate_host(bytes); };
  const std::unique_ptr<LocalWorld> world = make_local_world(pointers_to(devices));

  // Network, parameters, optimizer.
  Model model = make_model(options.model_options(data.train));
  const FlatParameters parameters(*model.network, stream);
  initialize(parameters, options.initializer(), options.seed);
  if (!options.load.empty()) load_weights(options.load, *model.network);
  const Sgd optimizer(parameters, options.sgd_rule());
  const auto replica = [&] { return make_model(options.model_options(data.train)).network; };
  auto wrapped = std::make_unique<DataParallel>(std::move(model.network), parameters, replica,
                                                streams, *world, mode);
  DataParallel& parallel = *wrapped;
  model.network = std::move(wrapped);

  // What brings the batches in and carries the losses out.
  DataLoader train_loader(data.train, options.train_loader(data.train, pinned));
  DataLoader test_loader(data.test, options.test_loader(pinned));
  const int64_t steps_per_epoch = train_loader.batches_per_epoch();
  const LearningRateSchedule schedule = options.schedule(steps_per_epoch);
  Feeder feeder(stream, data.train);
  Context context(stream);
  const Tensor loss = Tensor::empty(stream, {1});
  TrainingLog log("02-dataparallel", options, stream, pointers_to(devices), data.train.count());
  log.start(data.train, data.test, parameters.count());

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
      train_step(model, optimizer, feeder, context, parallel.phases(), std::move(*batch), facts,
                 loss);
      log.step(index, size, loss, {optimizer.health()});
    }
    log.end_epoch();
    log.evaluated(evaluate(model, test_loader, data.test.count(), feeder, context));
  }
  if (options.epochs == 0) {
    log.evaluated(evaluate(model, test_loader, data.test.count(), feeder, context));
  }

  if (!options.save.empty()) save_weights(options.save, *model.network);
  parallel.report(log);
  log.finish(context.flops());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  std::string reduce = "manual";
  return lockstep::run_program(
      {.name = "02-dataparallel",
       .summary = "Stage 02: one process, many devices (nn.DataParallel).",
       .add_options =
           [&](lockstep::OptionParser& parser) {
             parser.add("--reduce", reduce, "weights and gradients by: manual or library");
           },
       .baseline = "01-single-gpu",
       .emulate = [](size_t devices) { return "chunk:" + std::to_string(devices); }},
      argc, argv, [&](const lockstep::Options& options) {
        lockstep::train(options, lockstep::parse_reduce_mode(reduce));
      });
}
