// The reference: what stage 01 computes when it takes a batch in parts, as other stages do.
//
// Where replicas or micro-batches each normalise their own part of a batch, a network with batch
// normalisation trains differently from stage 01's. With --emulate this program takes the same
// parts one after another, on one device. The tests, and --baseline's proof, compare the other
// stages with it.

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

/// One optimizer step: the parts of the batch add up their gradients, then the weights move. Leaves
/// the batch's mean loss in `loss`, [1].
void train_step(Model& model, const Optimizer& optimizer, Feeder& feeder, Context& context,
                StepGraph& graph, const HostBatch& batch, const BatchSplit& split,
                const Tensor& loss) {
  const std::vector<BatchPart> parts = split.divide(batch.size);
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool first = i == 0, last = i + 1 == parts.size();
    // Each replica has its own running statistics, and only the first replica's count;
    // micro-batches share one set.
    context.facts.update_running = first || split.kind == BatchSplit::Kind::micro;
    context.facts.last_contribution = last;

    const DeviceBatch& part = feeder.feed(batch, parts[i], context);
    graph.run(parts[i].count, [&] {
      if (first) optimizer.zero_gradients();
      const AnyTensor scores = model.network->forward(feeder.normalize(part, context), context);
      model.loss->forward(scores, part.labels, loss, context);
      model.network->backward(model.loss->backward(part.labels, context), context);
      if (last) optimizer.step(context.state(), loss);
    });
  }
  feeder.retire(batch);
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
  TrainingLog log("reference", options, stream, {device.get()}, data.train.count());
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
      train_step(model, optimizer, feeder, context, graph, *batch, options.emulate, loss);
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
      {.name = "reference",
       .summary = "Stage 01's training, with each batch in parts as other stages have it.",
       .in_parts = true},
      options, argc, argv, [&] { lockstep::train(options); });
}
