// Stage 02: DataParallel.
//
// The training program of stage 01, with the network wrapped: each batch is divided over all
// devices, and device 0 gathers the scores, computes the loss, and updates the weights. Compare
// with
//   diff 01-single-gpu/main.cpp 02-dataparallel/main.cpp

#include "02-dataparallel/data_parallel.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/training/evaluate.h"
#include "common/training/feeder.h"
#include "common/training/program.h"
#include "common/training/training_log.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

struct DataParallelOptions : Options {
  void add_to(OptionParser& parser) override {
    Options::add_to(parser);
    parser.add_former("--reduce",
                      "DataParallel makes its own copies and sums; for a library's reduction "
                      "start 04-ddp --all-reduce library");
  }
};

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

  // The devices, each with a stream on which its work happens in order. `stream` is device 0's.
  const Devices devices = open_devices(options.device_ids(), options.device_options());
  const std::vector<Stream> streams = create_streams(devices, "compute");
  const Stream stream = streams[0];
  const HostAllocator pinned = [&](size_t bytes) { return devices[0]->allocate_host(bytes); };

  // Network, parameters, optimizer.
  Model model = make_model(options.model_options(data.train));
  const FlatParameters parameters(*model.network, stream, options.precision);
  initialize(parameters, options.init, options.seed);
  if (!options.load.empty()) load_weights(options.load, *model.network);
  const Optimizer optimizer(parameters, options.optimizer_rule());
  const auto make_replica = [&] { return make_model(options.model_options(data.train)).network; };
  DataParallel& parallel = model.wrap<DataParallel>(parameters, make_replica, streams);

  // What brings the batches in and carries the losses out.
  DataLoader train_loader(data.train, options.train_loader(data.train, pinned));
  DataLoader test_loader(data.test, options.test_loader(pinned));
  const LearningRateSchedule schedule = options.schedule(train_loader.batches_per_epoch());
  Feeder feeder(stream, data.train);
  Context context(stream, options.precision, optimizer.loss_scale());
  const Tensor loss = parameters.loss();
  TrainingLog log("02-dataparallel", options, stream, pointers_to(devices), data.train.count());
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
      train_step(model, optimizer, feeder, fed, context, loss);
      log.step(*batch, loss, {optimizer.health()});
    }
    log.end_epoch();
    log.evaluated(evaluate_all());
  }
  if (options.epochs == 0) log.evaluated(evaluate_all());

  if (!options.save.empty()) save_weights(options.save, *model.network);
  parallel.report(log);
  log.finish(context.flops());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::DataParallelOptions options;
  return lockstep::run_program(
      {.name = "02-dataparallel",
       .summary = "Stage 02: one process, many devices (nn.DataParallel).",
       .baseline = "01-single-gpu",
       .emulate = [](size_t devices) { return "chunk:" + std::to_string(devices); }},
      options, argc, argv, [&] { lockstep::train(options); });
}
