// Stage 03: a network on several devices, split inside its layers.
//
// The training program of stage 01, run by one process per device (a rank; stage 04 explains how
// they find each other). Every rank has a part of the wide layers, all of the others, and every
// batch. What is whole stays the same on all ranks, bit by bit: it is computed from the same
// numbers in the same order. The step is stage 01's; the network is another. Compare with
//   diff 01-single-gpu/main.cpp 03-model-split/tensor/main.cpp

#include "03-model-split/tensor/tensor_split.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/training/evaluate.h"
#include "common/training/feeder.h"
#include "common/training/program.h"
#include "common/training/training_log.h"

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

void train(const TensorProgramOptions& options) {
  // The process group: who am I, and where are the others?
  ProcessGroup group = init_process_group(options.ranks.group_options());

  // Data: bytes in host memory.
  const DatasetPair data = load_dataset(group, options);
  require_same_settings(group, options, data);

  // This rank's device, and the streams on which everything happens in order.
  const std::unique_ptr<Device> device = open_device_of_rank(options, group);
  const std::unique_ptr<Communicator> comm = group.connect(*device);
  const Stream stream = device->create_stream("compute");
  const Stream communication = device->create_stream("communication");
  const HostAllocator pinned = [&](size_t bytes) { return device->allocate_host(bytes); };

  // Network, split over the ranks; parameters, optimizer.
  SplitRanks ranks(*comm, communication);
  Model model = make_model(options.model_options(data.train));
  TensorSplit& split = split_network(model, data.train, ranks, group, options);
  const FlatParameters parameters(split, stream, options.precision);
  split.initialize(options.init, options.seed);
  load_weights(group, options.load, split);
  const Optimizer optimizer = split.optimizer(parameters, options.optimizer_rule());

  // What brings the batches in and carries the losses out.
  const auto train_loader = group.together([&] {
    return std::make_unique<DataLoader>(data.train, options.train_loader(data.train, pinned));
  });
  DataLoader test_loader(data.test, options.test_loader(pinned));
  const LearningRateSchedule schedule = options.schedule(train_loader->batches_per_epoch());
  Feeder feeder(stream, data.train);
  Context context(stream, options.precision, optimizer.loss_scale());
  const Tensor loss = parameters.loss();
  TrainingLog log("tensor-split", options, stream, {device.get()}, data.train.count(),
                  LogPeers::of(group, optimizer.health()));
  log.start(data.train, data.test, split.parameter_count(), ranks_text(group));
  const auto evaluate_all = [&] {
    return evaluate(model, test_loader, data.test.count(), feeder, context);
  };

  for (int64_t epoch = 0; epoch < options.epochs && !log.finished(); ++epoch) {
    log.begin_epoch(epoch);
    train_loader->begin_epoch(epoch);
    while (!log.finished()) {
      const std::optional<HostBatch> batch = train_loader->next();
      if (!batch) break;
      context.begin_step({.step = log.steps(),
                          .learning_rate = Real(schedule.at(log.steps())),
                          .loss_weight = Real(1) / Real(batch->size)});
      const DeviceBatch& fed = feeder.feed(*batch, context);
      train_step(model, optimizer, feeder, fed, context, loss);
      log.step(*batch, loss, ranks.healths(optimizer.health(), context));
    }
    log.end_epoch();
    log.evaluated(evaluate_all());
  }
  if (options.epochs == 0) log.evaluated(evaluate_all());

  save_weights(group, options.save, split);
  report(split, log);
  log.finish(context.flops());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::TensorProgramOptions options;
  return lockstep::run_program(
      {.name = "tensor-split",
       .summary = "Stage 03: a network split inside its layers (tensor parallelism).",
       .baseline = "01-single-gpu",
       .start_ranks = [&] { return start_ranks(options, options.ranks); }},
      options, argc, argv, [&] { lockstep::train(options); });
}
