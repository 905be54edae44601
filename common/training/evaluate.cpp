#include "common/training/evaluate.h"

#include "common/core/device.h"

namespace lockstep {

Evaluation evaluate(Model& model, DataLoader& loader, int64_t samples, Feeder& feeder,
                    Context& context) {
  return evaluate(*model.network, *model.loss, loader, samples, feeder, context);
}

Evaluation evaluate(Module& network, Loss& criterion, DataLoader& loader, int64_t samples,
                    Feeder& feeder, Context& context, int64_t least_passes) {
  if (!context.stream().device().computes()) return {};
  const PassFacts before = context.facts;
  context.facts = {.training = false};
  const Stream stream = context.stream();
  Tensor loss = context.empty({1});
  const CountTensor correct = context.pool().take<int64_t>({1});
  context.kernels().fill(stream, 0, loss);
  context.kernels().fill_count(stream, 0, correct);

  context.begin_step({.loss_weight = Real(1) / Real(samples)});
  int64_t passes = 0;
  const auto pass = [&](const HostBatch& batch) {
    const DeviceBatch& fed = feeder.feed(batch, context);
    const AnyTensor scores = network.forward(feeder.normalize(fed, context), context);
    criterion.forward(scores, fed.labels, loss, context);
    context.kernels().count_correct(stream, scores, fed.labels, correct);
    ++passes;
  };
  loader.begin_epoch(0);
  while (const std::optional<HostBatch> batch = loader.next()) pass(*batch);
  while (passes < least_passes) pass(HostBatch());
  context.facts = before;
  return {.loss = double(loss.to_host()[0]), .correct = correct.to_host()[0], .samples = samples};
}

Evaluation evaluate(Model& model, DataLoader& loader, int64_t samples, Feeder& feeder,
                    Context& context, Communicator& comm) {
  const Stream stream = context.stream();
  if (!stream.device().computes()) return {};
  const auto most = CountTensor::from_host(stream, {1}, {loader.batches_per_epoch()});
  comm.broadcast(stream, most, 0);
  const Evaluation part =
      evaluate(*model.network, *model.loss, loader, samples, feeder, context, most.to_host()[0]);
  const auto loss = BasicTensor<double>::from_host(stream, {1}, {part.loss});
  const auto correct = CountTensor::from_host(stream, {1}, {part.correct});
  comm.all_reduce(stream, loss);
  comm.all_reduce(stream, correct);
  return {.loss = loss.to_host()[0], .correct = correct.to_host()[0], .samples = samples};
}

}  // namespace lockstep
