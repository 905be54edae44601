#pragma once
// DDP in its shortest form, as users of Horovod write it: equal weights at the start, and one
// all-reduce per parameter after every backward.

#include "04-ddp/replica.h"

namespace lockstep {

/// Gives every rank rank 0's weights, one parameter after another. Mirrors
/// hvd.broadcast_parameters.
void broadcast_parameters(const FlatParameters& parameters, Communicator& comm);

/// Produces the same gradients as DistributedDataParallel, without buckets and without overlap.
/// Nothing is sent before backward has ended, and every parameter costs the latency of a message.
class ManualDdp final : public Replica {
 public:
  ManualDdp(std::unique_ptr<Module> module, const FlatParameters& parameters, Communicator& comm,
            Stream communication, AllReduceKind kind, Compression compress = Compression::none);

  AnyTensor backward(const AnyTensor& dy, Context& context) override;
};

}  // namespace lockstep
