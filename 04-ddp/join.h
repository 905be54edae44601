#pragma once
// Ranks with different numbers of batches.

#include <cstdint>

#include "common/comm/communicator.h"
#include "common/rendezvous/agreement.h"

namespace lockstep {

/// Throws BadInput, on all ranks, with both numbers, if two ranks are about to run different
/// numbers of steps. One of them would wait in a collective that the others never call.
void require_even_inputs(int64_t batches, const ExchangeTexts& exchange);

/// Lets ranks run out of samples at different times. A rank with none left takes part in the
/// others' steps without samples, or all ranks end at the same step. Mirrors
/// torch.distributed.algorithms.Join and its throw_on_early_termination, but a step's gradient
/// stays the mean over all of its samples (PyTorch divides by the number of ranks).
///
///   while (const int64_t n = join.samples_of_step(mine)) { ... loss_weight = W / n ... }
class Join {
 public:
  enum class EarlyEnd { take_part, throw_on_all_ranks };

  Join(Communicator& comm, Stream stream, EarlyEnd early_end = EarlyEnd::take_part)
      : comm_(comm), stream_(stream), early_end_(early_end) {}

  /// Returns the number of samples that all ranks together have for the next step; 0 when all have
  /// run out. All ranks call it before every step. Waits for the slowest rank. With
  /// throw_on_all_ranks throws BadInput when only some have run out.
  int64_t samples_of_step(int64_t mine);

 private:
  Communicator& comm_;
  Stream stream_;
  EarlyEnd early_end_;
  int64_t step_ = 0;
};

}  // namespace lockstep
