// Stage 01: one device.
//
// A training program from top to bottom: read the data, build the network, and for every batch
// forward, loss, backward, update. The later stages are this file with changes: compare with
//   diff 01-single-gpu/main.cpp 02-dataparallel/main.cpp

#include "common/app/evaluate.h"
#include "common/app/feeder.h"
#include "common/app/program.h"
#include "common/app/step_graph.h"
#include "common/app/training_log.h"
#include "common/app/weights_file.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"
#include "common/nn/sgd.h"

namespace lockstep {
namespace {

/// One optimizer step: the parts of the batch (one, unless --emulate divides it) add up their
/// gradients, then the weights move. Writes the batch's mean loss into `loss`, [1].
void train_step(Model& model, const Sgd& optimizer, Feeder& feeder, Context& context,
                StepGraph& graph, HostBatch batch, const BatchSplit& split, StepState facts,
                const Tensor& loss) {
  const std::vector<BatchPart> parts = split.divide(batch.size);
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool first = i == 0, last = i + 1 == parts.size();
    // Replicas keep their own running statistics, of which the first one's count; micro-batches
    // share one set.
    context.facts.update_running = first || split.kind == BatchSplit::Kind::micro;
    context.facts.last_contribution = last;

    const DeviceBatch& part = feeder.feed(batch, parts[i], facts, context);
    graph.run(parts[i].count, [&] {
      if (first) optimizer.zero_gradients();
      if (first) context.kernels().fill(context.stream(), 0, loss);
      const Tensor scores = model.network->forward(feeder.normalize(part, context), context);
      model.loss->forward(scores, part.labels, loss, context);
      const Tensor scores_gradient = model.loss->backward(part.labels, context);
      model.network->backward(scores_gradient, context);
      if (last) optimizer.step(context.state(), loss);
    });
  }
  feeder.retire(std::move(batch));
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
  const FlatParameters parameters(*model.network, stream);
  initialize(parameters, options.initializer(), options.seed);
  if (!options.load.empty()) load_weights(options.load, *model.network);
  const Sgd optimizer(parameters, options.sgd_rule());

  // What brings the batches in and carries the losses out.
  DataLoader train_loader(data.train, options.train_loader(data.train, pinned));
  DataLoader test_loader(data.test, options.test_loader(pinned));
  const int64_t steps_per_epoch = train_loader.batches_per_epoch();
  const LearningRateSchedule schedule = options.schedule(steps_per_epoch);
  const BatchSplit split = parse_split(options.emulate);
  Feeder feeder(stream, data.train);
  Context context(stream);
  StepGraph graph(context, options.graph, options.batch_size);
  const Tensor loss = Tensor::empty(stream, {1});
  TrainingLog log("01-single-gpu", options, stream, {device.get()}, data.train.count());
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
      train_step(model, optimizer, feeder, context, graph, std::move(*batch), split, facts, loss);
      log.step(index, size, loss, {optimizer.health()});
    }
    log.end_epoch();
    log.evaluated(evaluate(model, test_loader, data.test.count(), feeder, context));
  }
  if (options.epochs == 0) {
    log.evaluated(evaluate(model, test_loader, data.test.count(), feeder, context));
  }

  if (!options.save.empty()) save_weights(options.save, *model.network);
  log.finish(context.flops());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::run_program(
      {.name = "01-single-gpu", .summary = "Stage 01: training on one device."}, argc, argv,
      lockstep::train);
}
