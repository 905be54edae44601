#pragma once
// Average loss and accuracy over a data set.

#include "common/comm/communicator.h"
#include "common/nn/models.h"
#include "common/training/feeder.h"

namespace lockstep {

struct Evaluation {
  double loss = 0;  // mean per sample
  int64_t correct = 0;
  int64_t samples = 0;
  double accuracy() const { return samples == 0 ? 0 : double(correct) / double(samples); }
};

/// Runs a network in evaluation mode over one epoch of `loader`, whose set has `samples` samples.
/// Makes `least_passes` passes or more, the last ones without samples. Afterwards the context's
/// facts are as before.
Evaluation evaluate(Model& model, DataLoader& loader, int64_t samples, Feeder& feeder,
                    Context& context);
Evaluation evaluate(Module& network, Loss& loss, DataLoader& loader, int64_t samples,
                    Feeder& feeder, Context& context, int64_t least_passes = 0);

/// The same if the loader of each rank has a part of the set, rank 0's the largest. Returns the
/// evaluation of the whole set on all ranks. All ranks make equally many passes, since a network
/// may communicate in a pass.
Evaluation evaluate(Model& model, DataLoader& loader, int64_t samples, Feeder& feeder,
                    Context& context, Communicator& comm);

}  // namespace lockstep
