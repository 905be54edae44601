#pragma once
// This program's own options, and the network that they ask for.

#include <string>
#include <vector>

#include "03-model-split/tensor/tensor_split.h"
#include "common/options/rank_options.h"
#include "common/training/rank_program.h"

namespace lockstep {

struct TensorProgramOptions : Options {
  RankOptions ranks;
  std::vector<std::string> layers{"auto"};  // or their names

  void add_to(OptionParser& parser);
};

/// Replaces the model's network by this rank's share of it, split inside the layers that the
/// options name. Throws BadInput, on all ranks, where it cannot be split in this way.
TensorSplit& split_network(Model& model, const Dataset& images, SplitRanks& ranks,
                           ProcessGroup& group, const TensorProgramOptions& options);

/// As lockstep::require_same_settings(), and whether weights are loaded and saved.
void require_same_settings(ProcessGroup& group, const TensorProgramOptions& options,
                           const DatasetPair& data);

}  // namespace lockstep
