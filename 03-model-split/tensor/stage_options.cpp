#include "03-model-split/tensor/stage_options.h"

#include "common/core/error.h"
#include "common/io/json.h"

namespace lockstep {

void TensorProgramOptions::add_to(OptionParser& parser) {
  Options::add_to(parser);
  ranks.add_to(parser);
  parser.begin_group("Network");
  parser.add("--layers", layers, "to be split: auto (all that divide), or by name (conv2,fc1)");
}

TensorSplit& split_network(Model& model, const Dataset& images, SplitRanks& ranks,
                           ProcessGroup& group, const TensorProgramOptions& options) {
  group.together([&] {
    std::optional<TensorSplit::Names> names;
    if (options.layers != TensorSplit::Names{"auto"}) names = options.layers;
    auto split = std::make_unique<TensorSplit>(options.model_options(images), ranks, names);
    require(ranks.world_size() == 1 || !split->split_names().empty(),
            "--layers auto: no layer of this network divides by {} devices; give another number",
            ranks.world_size());
    model.network = std::move(split);
  });
  return static_cast<TensorSplit&>(*model.network);
}

void require_same_settings(ProcessGroup& group, const TensorProgramOptions& options,
                           const DatasetPair& data) {
  require_same_settings(group, settings_of_parts(table_of(options), options, data));
}

}  // namespace lockstep
