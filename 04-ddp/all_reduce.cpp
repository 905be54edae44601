#include "04-ddp/all_reduce.h"

#include "common/core/error.h"
#include "common/kernels/kernels.h"

namespace lockstep {

void AllReduce::operator()(const Tensor& x) {
  const CallPurpose purpose(comm_, Purpose::gradients);
  switch (kind_) {
    case AllReduceKind::ring:
      return ring(x);
    case AllReduceKind::naive:
      return naive(x);
    case AllReduceKind::library:
      return comm_.all_reduce(stream_, x);
  }
}

/// Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69 (2009): a reduce-scatter,
/// then an all-gather, of W-1 steps each. In every step every rank sends one part to its right and
/// receives one from its left, in one group, so all connections are busy in both directions.
void AllReduce::ring(const Tensor& x) {
  // [task 04.1] ring all-reduce
  const int me = comm_.rank(), world_size = comm_.world_size();
  const int right = (me + 1) % world_size, left = (me + world_size - 1) % world_size;
  // Reduce-scatter: part p starts at rank p + 1, and every rank on its way adds its own part. After
  // W-1 steps it has come to rank p, complete.
  for (int step = 0; step < world_size - 1; ++step) {
    const ScopedRange range(stream_, "reduce-scatter");  // its name in traces
    const Tensor mine = part(x, me - step - 2);
    const Tensor received = scratch(mine.elements());
    comm_.open_group();
    send(part(x, me - step - 1), right);
    receive(received, left);
    comm_.close_group();
    stream_.kernels().add(stream_, received, mine);
  }
  // All-gather: part p starts at rank p and moves around in the same direction.
  for (int step = 0; step < world_size - 1; ++step) {
    const ScopedRange range(stream_, "all-gather");
    comm_.open_group();
    send(part(x, me - step), right);
    receive(part(x, me - step - 1), left);
    comm_.close_group();
  }
  // [end 04.1]
}

void AllReduce::naive(const Tensor& x) {
  const int world_size = comm_.world_size();
  if (comm_.rank() > 0) {
    send(x, 0);
    return receive(x, 0);
  }
  for (int other = 1; other < world_size; ++other) {
    const Tensor received = scratch(x.elements());
    receive(received, other);
    stream_.kernels().add(stream_, received, x);
  }
  for (int other = 1; other < world_size; ++other) send(x, other);
}

// --- What both are made of -----------------------------------------------------------------------

Tensor AllReduce::part(const Tensor& x, int number) const {
  const RingPart part = ring_part(x.elements(), number, comm_.world_size());
  return x.range(part.first, {part.count});
}

Tensor AllReduce::scratch(int64_t count) {
  if (!scratch_.defined() || scratch_.elements() < count)
    scratch_ = Tensor::empty(stream_, {count});
  return scratch_.range(0, {count});
}

}  // namespace lockstep
