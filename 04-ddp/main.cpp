// Stage 04: DistributedDataParallel.
//
// The training program of stage 01, run by one process per device. Every process has the whole
// network and its own part of each batch; during backward the gradients become the average over all
// of them, so all make the same update. Compare with
//   diff 01-single-gpu/main.cpp 04-ddp/main.cpp

#include "04-ddp/stage_options.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/training/evaluate.h"
#include "common/training/feeder.h"
#include "common/training/program.h"
#include "common/training/training_log.h"

namespace lockstep {
namespace {

/// One optimizer step over this rank's part of a batch, which has been fed: its micro-batches (one,
/// unless --accumulate asks for more) add up their gradients. The last backward averages them over
/// the ranks; what follows on this stream waits for that. Leaves the global batch's mean loss in
/// `loss`, [1].
void train_step(Model& model, const Optimizer& optimizer, const ClipByNorm& clip,
                const Feeder& feeder, const std::vector<DeviceBatch>& micro_batches,
                Context& context, const Tensor& loss) {
  optimizer.zero_gradients();  // and the loss: both add up
  for (const DeviceBatch& part : micro_batches) {
    context.facts.last_contribution = &part == &micro_batches.back();  // else no_sync
    context.facts.first_sample = part.first;                           // for dropout's masks
    const AnyTensor images = feeder.normalize(part, context);
    const AnyTensor scores = model.network->forward(images, context);
    model.loss->forward(scores, part.labels, loss, context);
    model.network->backward(model.loss->backward(part.labels, context), context);
  }
  optimizer.step(context.state(), loss, clip);
}

void train(const DdpStageOptions& options) {
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

  // Network, parameters, optimizer.
  Model model = make_model(options.model_options(data.train));
  const FlatParameters parameters(*model.network, stream, options.precision);
  initialize(parameters, options.init, options.seed);
  load_weights(group, options.load, *model.network);
  const ClipByNorm clip(parameters, options.step.clip_norm);
  Replica& parallel = wrap_in_replica(model, parameters, group, *comm, communication, options);
  const Optimizer optimizer(parameters, options.optimizer_rule());

  // What brings the batches in and carries the losses out.
  ShardLoader train_loader(data.train, options, *device, group, *comm, options.step.sharding());
  DataLoader test_loader(data.test, evaluation_loader(data.test, options, *device, group, *comm));
  const LearningRateSchedule schedule = options.schedule(train_loader.batches_per_epoch());
  Feeder feeder(stream, data.train);
  Context context(stream, options.precision, optimizer.loss_scale());
  const Tensor loss = parameters.loss();
  TrainingLog log("04-ddp", options, stream, {device.get()}, data.train.count(),
                  LogPeers::of(group, parallel.own_health()));
  log.start(data.train, data.test, parameters.count(), batch_line(options, options.step, group));

  const auto evaluate_all = [&] {
    parallel.broadcast_buffers();  // running statistics: all measure the same network
    return evaluate(model, test_loader, data.test.count(), feeder, context, *comm);
  };
  for (int64_t epoch = 0; epoch < options.epochs && !log.finished(); ++epoch) {
    log.begin_epoch(epoch);
    train_loader.begin_epoch(epoch);
    while (!log.finished()) {
      const std::optional<HostBatch> batch = train_loader.next();
      if (!batch) break;
      context.begin_step({.step = log.steps(),
                          .learning_rate = Real(schedule.at(log.steps())),
                          .loss_weight = loss_weight(*batch, group.world_size())});
      const auto parts = feeder.feed(*batch, context).divide(options.step.accumulation());
      train_step(model, optimizer, clip, feeder, parts, context, loss);
      log.step(*batch, loss, {optimizer.health()});
    }
    log.end_epoch();
    log.evaluated(evaluate_all());
  }
  if (options.epochs == 0) log.evaluated(evaluate_all());

  save_weights(group, options.save, parallel.inner());
  report(parallel, parameters, group.world_size(), log);
  log.finish(context.flops());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::DdpStageOptions options;
  return lockstep::run_program(
      {.name = "04-ddp",
       .summary = "Stage 04: one process per device (DistributedDataParallel).",
       .baseline = "01-single-gpu",
       .emulate = [&](size_t devices) { return options.step.emulation(devices); },
       .order = lockstep::OrderKind::sampler,
       .start_ranks = [&] { return start_ranks(options, options.ranks); }},
      options, argc, argv, [&] { lockstep::train(options); });
}
