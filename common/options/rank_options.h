#pragma once
// Options of a program that is one rank of several.

#include <optional>
#include <string>

#include "common/comm/backend_choice.h"
#include "common/comm/process_group.h"
#include "common/core/text.h"
#include "common/options/options.h"

namespace lockstep {

struct RankOptions {
  Backend backend = Backend::automatic;
  std::string init_method = "env://";               // or tcp://HOST:PORT
  int rank = -1, world_size = -1, local_rank = -1;  // -1: not given
  double timeout = 300;                             // seconds
  std::string flight{};                             // where ranks leave their last calls; or empty
  std::optional<SimulatedRanks> simulated{};        // set by start_ranks()
  PlaceOf place_of{};                               // of a mesh: ProcessGroupOptions

  void add_to(OptionParser& parser);

  /// Whether a launcher, or an option, says which rank this process is.
  bool started_as_rank() const;
  /// The options that init_process_group() takes.
  ProcessGroupOptions group_options() const;
};

}  // namespace lockstep
