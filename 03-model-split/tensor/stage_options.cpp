#include "03-model-split/tensor/stage_options.h"

#include "common/core/error.h"

namespace lockstep {

void TensorProgramOptions::add_to(OptionParser& parser) {
  parser.begin_group("Network");
  parser.add("--layers", layers, "to be split: auto (all that divide), or by name (conv2,fc1)");
}

TensorSplit split_network(const ModelOptions& network, const TensorProgramOptions& own,
                          const std::vector<Stream>& streams, SingleProcessWorld& world) {
  std::optional<TensorSplit::Names> names;
  if (own.layers != TensorSplit::Names{"auto"}) names = own.layers;
  TensorSplit split(network, streams, world, names);
  require(world.world_size() == 1 || !split.split_names().empty(),
          "--layers auto: no layer of this network divides by {} devices; give another number",
          world.world_size());
  return split;
}

}  // namespace lockstep
