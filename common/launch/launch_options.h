#pragma once
// The options that the user of the launcher can choose, named and spelt like torchrun's.

#include <optional>
#include <string>
#include <vector>

namespace lockstep {

struct LaunchOptions {
  int nproc_per_node = 1;  // ranks on this node
  int nnodes = 1;
  int node_rank = 0;           // this node's number, 0 to nnodes - 1
  std::string master_addr;     // the host of rank 0; empty: this one
  int master_port = 0;         // where rank 0 listens; 0: a free port, chosen anew at every start
  bool standalone = false;     // one node; needs neither address nor port
  int max_restarts = 0;        // how often all ranks are started again after a failure
  std::string redirect;        // the folder of the ranks' output; empty: none
  bool prefix = false;         // "[rank 1] " before every line of output
  double grace_seconds = 0.5;  // between SIGTERM and SIGKILL

  int world_size() const { return nproc_per_node * nnodes; }
};

/// Refuses options that are out of range or contradict each other. Throws BadInput.
void check_launch_options(const LaunchOptions& options);

struct LaunchLine {
  LaunchOptions options;
  std::vector<std::string> program;  // with its arguments
};

/// Parses the command line of the launcher. Options end at the first word that is not an option,
/// the name of the program: everything after it belongs to the program. Returns nothing if the line
/// asked for help, which was printed. Throws BadInput for unknown options or a missing program.
std::optional<LaunchLine> parse_launch_line(int argc, const char* const* argv);

}  // namespace lockstep
