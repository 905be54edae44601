#pragma once
// The environment that the launcher gives a rank: torchrun's variables, so that programs run both
// here and under torchrun.

#include <memory>
#include <string>
#include <vector>

#include "common/launch/launch_options.h"
#include "common/system/held_port.h"

namespace lockstep {

/// The facts that all ranks of one start have in common.
struct MeetingPlace {
  std::string address;                   // MASTER_ADDR
  int port = 0;                          // MASTER_PORT
  std::string run_id;                    // the same for all nodes and restarts of a job
  std::string key;                       // of one start on one host, in hex digits; else none
  int restart = 0;                       // how often the ranks were started before
  std::string launcher_pipe;             // where they can report to the launcher (system/rank.h)
  std::string flight_memory;             // where they leave their last calls (flight_recorder.h)
  std::shared_ptr<const HeldPort> held;  // a port chosen here, until the ranks have ended
};

/// The meeting place of the first start. The port is the one in the options, or a free port that is
/// held for rank 0. Throws EnvironmentError.
MeetingPlace first_meeting_place(const LaunchOptions& options);
/// The meeting place of the same job's next start. A port chosen here is chosen anew, because
/// earlier ranks may have left connections on the old one. Throws EnvironmentError.
MeetingPlace next_meeting_place(const LaunchOptions& options, const MeetingPlace& before);

/// The number of a rank among all nodes' ranks.
int global_rank(const LaunchOptions& options, int local_rank);

/// This process's environment with the variables of one rank: "NAME=value" each.
std::vector<std::string> rank_environment(const LaunchOptions& options, const MeetingPlace& meet,
                                          int local_rank);

}  // namespace lockstep
