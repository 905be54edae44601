#pragma once
// The launcher's contract with this process: its rank, the world size, and where rank 0 waits.
//
// torchrun's variables are the usual ones (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
// MASTER_ADDR, MASTER_PORT); `lockstep launch` sets the same. OpenMPI, MPICH (Intel MPI's mpiexec
// is the same program, Hydra) and Slurm number the ranks in variables of their own. MPI's launchers
// leave the address to the user; Slurm names the hosts.

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/rendezvous/job_key.h"
#include "common/rendezvous/socket.h"

namespace lockstep {

/// The places where read_launch_contract() looks.
struct LaunchInput {
  /// An environment variable's value; nullptr if it is not set. Empty counts as not set.
  std::function<const char*(const char* name)> variable;
  /// env:// (address from MASTER_ADDR and MASTER_PORT) or tcp://HOST:PORT.
  std::string init_method = "env://";
  /// Options of the command line. An option that contradicts the environment is an error.
  std::optional<int> rank{}, world_size{};
  /// --local_rank, or --local-rank: given by old launchers instead of LOCAL_RANK.
  std::optional<int> local_rank{};
  /// The program and its options as typed, for the commands that errors propose.
  std::string program = "PROGRAM OPTIONS...";
};

struct LaunchContract {
  int rank = 0, world_size = 1;
  /// This rank among the ranks of its host; none if the launcher does not say (see find_place()).
  std::optional<int> local_rank{}, local_world_size{};
  /// The address of rank 0's store; port 0 only if world_size is 1. Under torchrun the port is the
  /// one after MASTER_PORT, because torchrun itself listens on MASTER_PORT.
  Address master{};
  std::string launcher;  // "torchrun", "OpenMPI", "MPICH" or "Slurm": whose variables gave the rank
  /// TORCHELASTIC_RUN_ID, which distinguishes jobs on one address; "" if not given.
  std::string run_id;
  /// The job's key; not read with the rest (read_job_key).
  JobKey key{};

  /// Fills in this rank's place on its host, if the launcher did not say it. `hosts` are the names
  /// of all ranks' hosts, by rank.
  void find_place(const std::vector<std::string>& hosts);
};

/// The variable, with its value, by which a launcher says that this program is one of several
/// processes ("WORLD_SIZE=2", "PMIX_RANK=0"). Returns "" where none does. Throws nothing.
std::string sign_of_several(const std::function<const char*(const char* name)>& variable);

/// Reads the contract; nullopt for a bare start. Then nothing at all is set or given, or MPI's
/// launcher or Slurm started only one process and no address is set. Throws BadInput at once,
/// naming variable, value and what is expected. Causes: a variable that is missing while others are
/// set, is not a number or is out of range. Further causes: an option that contradicts its
/// variable; an unknown scheme; the sign of a launcher that is not known here. If OpenMPI or MPICH
/// leave the address out, the error says the command to type.
///
/// The variables of a Slurm allocation alone are a bare start: a batch script has them, including
/// SLURM_PROCID, and so does the shell of salloc. Only the processes of srun belong to a step.
std::optional<LaunchContract> read_launch_contract(const LaunchInput& input);

// Slurm's short forms of lists.

/// The first host of a list as Slurm writes it: "node007" of "node[007-009,12],login".
std::string first_host(std::string_view list);

/// The number of tasks on node `node`, counted from 0, of a list as Slurm writes it. Example: 2 for
/// nodes 0 to 2 of "2(x3),1", 1 for node 3. `name` is the variable that holds the list. Throws
/// BadInput if the list has no such node, or is not such a list.
int tasks_on_node(std::string_view list, int node, const std::string& name);

}  // namespace lockstep
