// Stage 07: a mesh of ranks.
//
// The training program of stage 06. The ranks are a grid with an axis for each way of dividing the
// work: other samples (data), parts of the weights (shard), parts of the layers (tensor), other
// layers (pipeline). Each message goes along some axes. The step itself is stage 06's. Compare with
//   diff 06-fully-sharded/main.cpp 07-mesh/main.cpp

#include "05-syncbn-checkpoint/sync_batchnorm.h"
#include "07-mesh/mesh_checkpointer.h"
#include "07-mesh/stage_options.h"
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

void train(const MeshStageOptions& options) {
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

  // The mesh, and in it the ranks that have other samples than this one.
  DeviceMesh mesh(options.mesh, group, *device, *comm);
  Communicator& samples = mesh.along(kSampleAxes);

  // Network, parameters, optimizer.
  Model model = make_model(options.model_options(data.train));
  MeshParallel parallel = parallelize(model, data.train, mesh, stream, communication, options);
  const auto synchronised = synchronise(model, samples, communication, options);
  parallel.initialize(options.init, options.seed);
  load_weights(group, *comm, options.load, parallel);
  const Optimizer optimizer = parallel.optimizer(options.optimizer_rule());
  const ClipByNorm clip = parallel.clip_by_norm(options.step.clip_norm);

  // What brings the batches in and carries the losses out.
  ShardLoader train_loader(data.train, options, *device, group, samples, options.step.sharding());
  DataLoader test_loader(data.test, evaluation_loader(data.test, options, *device, group, samples));
  const LearningRateSchedule schedule = options.schedule(train_loader.batches_per_epoch());
  Feeder feeder(stream, data.train);
  Context context(stream, options.precision, optimizer.loss_scale());
  const Tensor loss = parallel.loss();
  TrainingLog log("07-mesh", options, stream, {device.get()}, data.train.count(),
                  LogPeers::of(group, parallel.own_health()));
  log.start(data.train, data.test, parallel.count(), mesh_line(options, mesh));

  const auto evaluate_all = [&] {
    parallel.broadcast_buffers();  // running statistics: all measure the same network
    return evaluate(model, test_loader, data.test.count(), feeder, context, samples);
  };

  // Where training goes on, and when it is saved.
  MeshCheckpointer checkpoints(parallel, optimizer, options.saving, *comm, group,
                               train_loader.batches_per_epoch(), [&] { log.settle(); });
  TrainingState state = checkpoints.resume(first_state(table_of(options), data, group, schedule));
  log.resume(state.steps, state.epoch);

  for (int64_t epoch = state.epoch; epoch < options.epochs && !log.finished(); ++epoch) {
    log.begin_epoch(epoch, state.first_batch(epoch));
    train_loader.begin_epoch(epoch, state.first_batch(epoch));
    while (!log.finished()) {
      const std::optional<HostBatch> batch = train_loader.next();
      if (!batch) break;
      context.begin_step({.step = log.steps(),
                          .learning_rate = Real(schedule.at(log.steps())),
                          .loss_weight = loss_weight(*batch, samples.world_size())});
      const auto parts = feeder.feed(*batch, context).divide(options.step.accumulation());
      train_step(model, optimizer, clip, feeder, parts, context, loss);
      parallel.gather_parameters();  // the shards that the other ranks have updated
      log.step(*batch, loss, parallel.healths(optimizer.health(), context));
      state.count_step(schedule.at(log.steps()));  // the rate of the next one
      checkpoints.after_step(state);
    }
    log.end_epoch();
    log.evaluated(evaluate_all());
    checkpoints.after_epoch(state, log.accuracy());
  }
  if (!log.has_evaluation()) log.evaluated(evaluate_all());

  save_weights(group, options.save, parallel);
  report(parallel, mesh, optimizer, synchronised.get(), options, log);
  log.finish(context.flops());
  checkpoints.finish();
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::MeshStageOptions options;
  return lockstep::run_program(
      {.name = "07-mesh",
       .summary = "Stage 07: a mesh of ranks: data, shard, tensor and pipeline.",
       .baseline = "01-single-gpu",
       .emulate = [&](size_t devices) { return options.emulation(devices); },
       .order = lockstep::OrderKind::sampler,
       .model = lockstep::ModelKind::mlp,
       .optimizer = lockstep::OptimizerKind::adamw,
       .start_ranks = [&] { return start_ranks(options, options.ranks); }},
      options, argc, argv, [&] { lockstep::train(options); });
}
