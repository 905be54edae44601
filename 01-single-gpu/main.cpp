// Stage 01: one device.
//
// A training program from top to bottom: read the data, build the network, and for every batch
// forward, loss, backward, update. The later stages are this file with changes: compare with
//   diff 01-single-gpu/main.cpp 02-dataparallel/main.cpp

#include "common/kernels/devices.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/training/evaluate.h"
#include "common/training/feeder.h"
#include "common/training/program.h"
#include "common/training/step_graph.h"
#include "common/training/training_log.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

/// One optimizer step over a batch that has been fed. Leaves its mean loss in `loss`, [1].
void train_step(Model& model, const Optimizer& optimizer, const Feeder& feeder,
                const DeviceBatch& batch, Context& context, const Tensor& loss) {
  const AnyTensor images = feeder.normalize(batch, context);
  optimizer.zero_gradients();  // and the loss: both add up
  const AnyTensor scores = model.network->forward(images, context);
  model.loss->forward(scores, batch.labels, loss, context);
  model.network->backward(model.loss->backward(batch.labels, context), context);
  optimizer.step(context.state(), loss);
}

void train(const Options& options) {
  // Data: bytes in host memory.
  const DatasetPair data = load_dataset(options.data, options.data_dir);

  // The device, and the stream on which everything happens in order.
  const DeviceId id = options.device_ids().front();
  const std::unique_ptr<Device> device = open_device(id, options.device_options());
  const Stream stream = device->create_stream("compute");
  const HostAllocator pinned = [&](size_t bytes) { return device->allocate_host(bytes); };

  // Network, parameters, optimizer.
  Model model = make_model(options.model_options(data.train));
  const FlatParameters parameters(*model.network, stream, options.precision);
  initialize(parameters, options.init, options.seed);
  if (!options.load.empty()) load_weights(options.load, *model.network);
  const Optimizer optimizer(parameters, options.optimizer_rule());

  // What brings the batches in and carries the losses out.
  DataLoader train_loader(data.train, options.train_loader(data.train, pinned));
  DataLoader test_loader(data.test, options.test_loader(pinned));
  const LearningRateSchedule schedule = options.schedule(train_loader.batches_per_epoch());
  Feeder feeder(stream, data.train);
  Context context(stream, options.precision, optimizer.loss_scale());
  StepGraph graph(context, options.graph, options.batch_size);
  const Tensor loss = parameters.loss();
  TrainingLog log("01-single-gpu", options, stream, {device.get()}, data.train.count());
  log.start(data.train, data.test, parameters.count());
  const auto evaluate_all = [&] {
    return evaluate(model, test_loader, data.test.count(), feeder, context);
  };

  for (int64_t epoch = 0; epoch < options.epochs && !log.finished(); ++epoch) {
    log.begin_epoch(epoch);
    train_loader.begin_epoch(epoch);
    while (!log.finished()) {
      const std::optional<HostBatch> batch = train_loader.next();
      if (!batch) break;
      context.begin_step({.step = log.steps(),
                          .learning_rate = Real(schedule.at(log.steps())),
                          .loss_weight = Real(1) / Real(batch->size)});
      const DeviceBatch& fed = feeder.feed(*batch, context);
      graph.run(batch->size, [&] { train_step(model, optimizer, feeder, fed, context, loss); });
      log.step(*batch, loss, {optimizer.health()});
    }
    log.end_epoch();
    log.evaluated(evaluate_all());
  }
  if (options.epochs == 0) log.evaluated(evaluate_all());

  if (!options.save.empty()) save_weights(options.save, *model.network);
  log.finish(context.flops());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::Options options;
  return lockstep::run_program(
      {.name = "01-single-gpu", .summary = "Stage 01: training on one device."}, options, argc,
      argv, [&] { lockstep::train(options); });
}
