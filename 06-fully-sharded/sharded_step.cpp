#include "06-fully-sharded/sharded_step.h"

#include <utility>

#include "06-fully-sharded/shards.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

UpdatedRange shard_in(const UpdatedRange& whole, const Communicator& comm) {
  const int64_t length = whole.values.elements();
  require(length % comm.world_size() == 0, "{}: {} numbers, expected equal shards for {} ranks",
          comm.who(), length, comm.world_size());
  const FlatRange mine = shard_of(length, comm.rank(), comm.world_size());
  return {whole.values.range(mine.first, {mine.count}),
          whole.gradients.range(mine.first, {mine.count})};
}

}  // namespace

ShardedStep::ShardedStep(UpdatedRange whole, Communicator& comm, const OptimizerRule& rule)
    : whole_(std::move(whole)),
      shard_(shard_in(whole_, comm)),
      comm_(comm),
      optimizer_(whole_.values.home(), {shard_}, rule) {}

void ShardedStep::operator()(const StepStateTensor& state, const Tensor& loss) const {
  // [task 06.2] sharded optimizer step
  const Stream stream = whole_.values.home();
  comm_.reduce_scatter(stream, whole_.gradients, shard_.gradients, Reduction::average);
  optimizer_.step(state, loss);
  comm_.all_gather(stream, shard_.values, whole_.values);
  // [end 06.2]
}

}  // namespace lockstep
