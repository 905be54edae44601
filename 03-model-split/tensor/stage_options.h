#pragma once
// This program's own options, and the network that they ask for.

#include <string>
#include <vector>

#include "03-model-split/tensor/tensor_split.h"
#include "common/options/options.h"

namespace lockstep {

struct TensorProgramOptions {
  std::vector<std::string> layers{"auto"};  // or their names

  void add_to(OptionParser& parser);
};

/// The network, split inside the layers that the options name, one rank on each stream. `world`
/// must outlive it. Throws BadInput where the network cannot be split in this way.
TensorSplit split_network(const ModelOptions& network, const TensorProgramOptions& own,
                          const std::vector<Stream>& streams, SingleProcessWorld& world);

}  // namespace lockstep
