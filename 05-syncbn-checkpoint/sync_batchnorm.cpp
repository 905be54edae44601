#include "05-syncbn-checkpoint/sync_batchnorm.h"

namespace lockstep {

/// Calls work(stream) with the communication stream, behind what `passes` has to do so far and
/// before what it does next.
template <class Work>
void SyncBatchNorm::communicate(const BatchNorm2d& layer, Stream passes, Work work) {
  const CallLabel label(ranks_, layer.name());
  communication_.wait(passes.record());
  work(communication_);
  passes.wait(communication_.record());
}

Rows SyncBatchNorm::merge(const Tensor& statistics, int64_t rows, const BatchNorm2d& layer,
                          Context& context) {
  if (ranks_.world_size() == 1) return rows_of(rows);
  const int64_t count = statistics.elements();
  const Tensor gathered = context.empty({ranks_.world_size(), count});
  communicate(layer, context.stream(),
              [&](Stream stream) { ranks_.all_gather(stream, statistics, gathered); });
  context.kernels().batch_norm_merge(context.stream(), gathered, statistics);
  if (rows > 1) return Rows::several;
  return rows_of(int64_t(statistics.range(count - 1, {1}).to_host()[0]));
}

void SyncBatchNorm::merge_sums(const Tensor& sums, const BatchNorm2d& layer, Context& context) {
  if (ranks_.world_size() == 1) return;
  communicate(layer, context.stream(), [&](Stream stream) { ranks_.all_reduce(stream, sums); });
}

int convert_sync_batchnorm(Module& network, Communicator& ranks, Stream communication) {
  const auto synchronised = std::make_shared<SyncBatchNorm>(ranks, communication);
  const std::vector<BatchNorm2d*> layers = batch_norms(network);
  for (BatchNorm2d* layer : layers) layer->set_statistics(synchronised);
  return static_cast<int>(layers.size());
}

}  // namespace lockstep
