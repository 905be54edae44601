#include "05-syncbn-checkpoint/sync_batchnorm.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/io/json.h"
#include "common/training/training_log.h"

namespace lockstep {

template <class Work>
void SyncBatchNorm::communicate(const BatchNorm2d& layer, Context& context, Work work) {
  calls_.run(layer.name(), Purpose::statistics, context, work);
}

Rows SyncBatchNorm::merge(const Tensor& statistics, int64_t rows, const BatchNorm2d& layer,
                          Context& context) {
  if (comm().world_size() == 1) return rows_of(rows);
  const int64_t count = statistics.elements();
  const double others = comm().world_size() - 1, sums = 2 * double(layer.channels());
  bytes_predicted_ += others * (double(count) + 2 * sums / comm().world_size()) * sizeof(Real);
  const Tensor gathered = context.empty({comm().world_size(), count});
  communicate(layer, context,
              [&](Stream stream) { comm().all_gather(stream, statistics, gathered); });
  context.kernels().batch_norm_merge(context.stream(), gathered, statistics);
  if (rows > 1) return Rows::several;
  return rows_of(int64_t(statistics.range(count - 1, {1}).to_host()[0]));
}

void SyncBatchNorm::merge_sums(const Tensor& sums, const BatchNorm2d& layer, Context& context) {
  // [task 05.2] backward's two sums
  if (comm().world_size() == 1) return;
  communicate(layer, context, [&](Stream stream) { comm().all_reduce(stream, sums); });
  // [end 05.2]
}

std::shared_ptr<SyncBatchNorm> convert_sync_batchnorm(Module& network, Communicator& comm,
                                                      Stream communication) {
  const auto synchronised = std::make_shared<SyncBatchNorm>(comm, communication);
  for (BatchNorm2d* layer : batch_norms(network)) {
    layer->set_statistics(synchronised);
    ++synchronised->layers_;
  }
  return synchronised;
}

void report(SyncBatchNorm& synchronised, TrainingLog& log) {
  if (synchronised.layers() == 0) return;
  const double steps = double(std::max<int64_t>(log.own_steps(), 1));
  const double seconds = synchronised.seconds_waited() / steps;
  const Communicator& comm = synchronised.comm();
  const SentPerStep sent{.what = "statistics",
                         .bytes = double(comm.bytes_sent(Purpose::statistics)) / steps,
                         .counted_in = comm.bytes_counted_in(),
                         .formula = "by sizes",
                         .predicted = synchronised.bytes_predicted() / steps};
  log.note("batch norm",
           fmt::format(
               "{} layers, {}, {:.2f} ms per step of waiting within compute", synchronised.layers(),
               comm.world_size() > 1 ? fmt::format("{} ranks normalise together", comm.world_size())
                                     : "each rank normalises by itself",
               1e3 * seconds));
  log.note("  bytes per step", sent.text(), "batch_norm",
           {{"layers", synchronised.layers()},
            {"seconds_per_step", seconds},
            {"bytes_per_step", {{"sent", sent.bytes}, {"predicted", sent.predicted}}}});
}

}  // namespace lockstep
