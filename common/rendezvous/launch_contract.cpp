#include "common/rendezvous/launch_contract.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/core/error.h"
#include "common/core/parse.h"

namespace lockstep {
namespace {

constexpr int kMost = std::numeric_limits<int>::max();
constexpr int kMostWorldSize = 100'000;        // no machine has so many GPUs: it is a typing error
constexpr const char* kDefaultPort = "29500";  // torch.distributed's
constexpr std::string_view kTcp = "tcp://";
constexpr int kApart =
    6181;  // ports between the steps of a Slurm job: others have the next numbers

/// The variables in which a launcher says which rank a process is.
struct Family {
  const char *launcher, *rank, *world_size, *local_rank, *local_world_size;
};
constexpr Family kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Family kOpenMpi{"OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                          "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
// MPICH, Intel MPI and their kind, whose mpiexec is called Hydra.
constexpr Family kHydra{"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr Family kSlurm{"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                        "SLURM_STEP_TASKS_PER_NODE"};

/// How other launchers number each copy that they start, in variables of their own.
struct ForeignRank {
  const char *variable, *launcher;
};
constexpr ForeignRank kForeignRanks[] = {
    {"PMIX_RANK", "PMIx"},      {"PMI_ID", "PMI"},       {"MV2_COMM_WORLD_RANK", "MVAPICH"},
    {"PALS_RANKID", "PALS"},    {"ALPS_APP_PE", "ALPS"}, {"JSM_NAMESPACE_RANK", "jsrun"},
    {"FLUX_TASK_RANK", "Flux"}, {"MP_CHILD", "POE"},
};

class Reader {
 public:
  explicit Reader(const LaunchInput& input)
      : input_(input), tcp_(input.init_method.starts_with(kTcp)), names_(family()) {
    const size_t end = input.init_method.find("://");
    require(tcp_ || input.init_method == "env://",
            "--init-method {}: No rendezvous handler for {}://; give env:// or tcp://HOST:PORT",
            input.init_method, input.init_method.substr(0, end));
  }

  /// A program of one process does not ask for the port.
  void refuse_port_of_kubernetes() const {
    const std::string port = text("MASTER_PORT").value_or("");
    require(tcp_ || !port.starts_with(kTcp),
            "MASTER_PORT={}: found an address, expected a port number; Kubernetes sets it for a "
            "service called master: unset it, or give MASTER_PORT and MASTER_ADDR of rank 0",
            port);
  }

  /// True if nothing says that this process is one of several.
  bool is_bare() const {
    if (tcp_ || input_.rank || input_.world_size || input_.local_rank) return false;
    if (any_of({"MASTER_ADDR", "MASTER_PORT"})) return false;
    if (&names_ != &kTorchrun) return text(names_.world_size).value_or("") == "1";
    if (any_of({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})) return false;
    refuse_foreign_rank();
    return true;
  }

  std::string sign_of_several() const {
    if (const auto size = text(names_.world_size); size && text(names_.rank)) {
      return *size == "1" ? "" : fmt::format("{}={}", names_.world_size, *size);
    }
    const ForeignRank* foreign = foreign_rank();
    return foreign == nullptr ? ""
                              : fmt::format("{}={}", foreign->variable, *text(foreign->variable));
  }

  LaunchContract contract() const {
    LaunchContract told;
    told.launcher = names_.launcher;
    if (!text(names_.rank) && !input_.rank) fail_missing(names_.rank, "--rank");
    if (!text(names_.world_size) && !input_.world_size) {
      fail_missing(names_.world_size, "--world-size");
    }
    told.world_size =
        *agreed(names_.world_size, "--world-size", input_.world_size, 1, kMostWorldSize);
    told.rank = *agreed(names_.rank, "--rank", input_.rank, 0, told.world_size - 1,
                        fmt::format(", since {} is {}", names_.world_size, told.world_size));
    read_place_on_host(told);
    told.master = tcp_ ? parse_address(input_.init_method.substr(kTcp.size()), "--init-method")
                       : address(told);
    require(told.master.port != 0 || told.world_size == 1,
            "{}=0: expected 1 to {}: the system chooses the port only for a job of one rank, the "
            "{} of this one could not know it",
            tcp_ ? "--init-method: the port" : "MASTER_PORT", kLargestPort, told.world_size);
    // torchrun writes "none" where there is no id. The restart count is not part of the id:
    // torchrun counts on each host separately.
    const std::string id = text("TORCHELASTIC_RUN_ID").value_or("");
    if (id != "none") told.run_id = id;
    return told;
  }

 private:
  std::optional<std::string> text(const char* name) const {
    const char* value = input_.variable(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
  }

  bool any_of(std::initializer_list<const char*> names) const {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return text(name); });
  }
  const Family& family() const {
    // A launcher passes on what the shell has exported; nobody exports a launcher's own names.
    if (!text(kTorchrun.rank)) {
      if (text(kOpenMpi.rank)) return kOpenMpi;
      // Slurm's own plug-in sets PMI's names too, but leaves Hydra's local ones out.
      if (text(kHydra.rank) && (text(kHydra.local_rank) || !is_slurm_task())) return kHydra;
    }
    if (any_of({kTorchrun.rank, kTorchrun.world_size})) return kTorchrun;
    if (text(kOpenMpi.world_size)) return kOpenMpi;
    if (is_slurm_task()) return kSlurm;
    return text(kHydra.world_size) ? kHydra : kTorchrun;
  }

  /// One of the processes that srun started. A batch script has a task's variables, too, but not
  /// those of a step.
  bool is_slurm_task() const { return text(kSlurm.rank) && text("SLURM_STEP_NUM_TASKS"); }

  const ForeignRank* foreign_rank() const {
    const auto* const found = std::ranges::find_if(
        kForeignRanks, [&](const ForeignRank& each) { return text(each.variable).has_value(); });
    return found == std::end(kForeignRanks) ? nullptr : found;
  }

  void refuse_foreign_rank() const {
    const ForeignRank* const found = foreign_rank();
    if (found == nullptr) return;
    const auto& [variable, launcher] = *found;
    fail<BadInput>(
        "{}={}: {} started this process as one of several, and says so in variables that are "
        "not known here; expected RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each of "
        "them: start it with ./lockstep launch or torchrun, or unset {} to start it alone",
        variable, *text(variable), launcher, variable);
  }

  /// The value of the variable or the option, in range; if both are given they must agree; nullopt
  /// if neither is.
  std::optional<int> agreed(const char* variable, const char* option, std::optional<int> given,
                            int least, int most, const std::string& why = "") const {
    if (given) parse_whole(std::to_string(*given), option, least, most, why);
    const auto found = text(variable);
    if (!found) return given;
    const int value = parse_whole(*found, variable, least, most, why);
    require(!given || *given == value,
            "{}={} and {}={} contradict each other: expected the same; leave one of them out",
            variable, value, option, given.value_or(0));
    return value;
  }

  void read_place_on_host(LaunchContract& told) const {
    told.local_world_size = ranks_on_host(told.world_size);
    const int most = told.local_world_size.value_or(told.world_size);
    told.local_rank = agreed(names_.local_rank, "--local-rank", input_.local_rank, 0, most - 1,
                             fmt::format(": there are {} ranks {}", most,
                                         told.local_world_size ? "on this host" : "in all"));
  }

  /// As the launcher says it. What a Slurm job was asked for per node (SLURM_NTASKS_PER_NODE) is no
  /// fact of its steps; each step has its own counts, node by node.
  std::optional<int> ranks_on_host(int world_size) const {
    const auto told = text(names_.local_world_size);
    const auto node = text("SLURM_NODEID");
    const std::string why = fmt::format(", since {} is {}", names_.world_size, world_size);
    if (&names_ != &kSlurm) return agreed(names_.local_world_size, "", {}, 1, world_size, why);
    if (!told || !node) return std::nullopt;
    const int tasks =
        tasks_on_node(*told, parse_whole(*node, "SLURM_NODEID", 0, kMost), names_.local_world_size);
    return parse_whole(std::to_string(tasks), names_.local_world_size, 1, world_size, why);
  }

  Address address(const LaunchContract& told) const {
    const auto host = text("MASTER_ADDR"), port = text("MASTER_PORT");
    if (&names_ == &kSlurm && (!host || !port)) return slurm_address(told);
    for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
      if (text(name)) continue;
      if (&names_ == &kTorchrun) fail_missing(name, "--init-method tcp://HOST:PORT");
      fail<BadInput>("{} started this rank {} of {} without {}; start it with: {}", names_.launcher,
                     told.rank, told.world_size, name, command(told));
    }
    return {without_brackets(*host), taken_by_torchrun() ? beside(told_port()) : told_port()};
  }

  int told_port() const {
    return parse_whole(*text("MASTER_PORT"), "MASTER_PORT", 0, kLargestPort);
  }

  /// Slurm names the hosts of a step, rank 0's first. The numbers of the job and of the step give a
  /// port that other jobs and steps on that host are not likely to have.
  Address slurm_address(const LaunchContract& told) const {
    const std::string host =
        text("MASTER_ADDR").value_or(first_host(text("SLURM_STEP_NODELIST").value_or("")));
    const auto job = text("SLURM_JOB_ID");
    require(!host.empty() && (job || text("MASTER_PORT")),
            "Slurm started this rank {} of {} without {}; start it with: "
            "MASTER_ADDR=HOST MASTER_PORT={} srun --ntasks={} {}; HOST is rank 0's host",
            told.rank, told.world_size, host.empty() ? "SLURM_STEP_NODELIST" : "SLURM_JOB_ID",
            kDefaultPort, told.world_size, input_.program);
    if (text("MASTER_PORT")) return {without_brackets(host), told_port()};
    const int64_t number = parse_whole(*job, "SLURM_JOB_ID", 0, kMost);
    return {without_brackets(host), 20'000 + int((number + kApart * slurm_step()) % 10'000)};
  }

  /// The last four digits: the shell of salloc is a step, too, of a number beyond an int's.
  int slurm_step() const {
    const std::string step = text("SLURM_STEP_ID").value_or("0");
    return parse_whole(step.substr(step.size() - std::min<size_t>(step.size(), 4)), "SLURM_STEP_ID",
                       0, 9999);
  }

  /// torchrun listens on MASTER_PORT itself, for PyTorch's own store: ours is at the next port.
  bool taken_by_torchrun() const {
    return text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  }
  static int beside(int port) { return port < kLargestPort ? port + 1 : port - 1; }

  /// What to type so that MPI's launcher passes the address on.
  std::string command(const LaunchContract& told) const {
    const bool one_host = told.local_world_size == told.world_size;
    const std::string host = text("MASTER_ADDR").value_or(one_host ? "127.0.0.1" : "$(hostname)");
    const std::string port = text("MASTER_PORT").value_or(kDefaultPort);
    const bool open_mpi = &names_ == &kOpenMpi;
    return fmt::format(fmt::runtime(open_mpi ? "mpirun -n {} -x MASTER_ADDR={} -x MASTER_PORT={} {}"
                                             : "mpiexec.hydra -n {} -genv MASTER_ADDR {} "
                                               "-genv MASTER_PORT {} {}"),
                       told.world_size, host, port, input_.program);
  }

  [[noreturn]] void fail_missing(const char* variable, const char* option) const {
    if (tcp_) {
      fail<BadInput>(
          "{} rendezvous: neither {} is given nor {} set; give both --rank and "
          "--world-size",
          input_.init_method, option, variable);
    }
    fail<BadInput>(
        "env:// rendezvous: environment variable {} expected, but not set; set RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT (./lockstep launch and torchrun do), or none of them to start "
        "without a launcher",
        variable);
  }

  const LaunchInput& input_;
  bool tcp_;
  const Family& names_;
};

}  // namespace

void LaunchContract::find_place(const std::vector<std::string>& hosts) {
  const auto mine = hosts.begin() + rank;
  const int beside = int(std::ranges::count(hosts, *mine));
  if (!local_world_size) local_world_size = std::max(beside, local_rank.value_or(0) + 1);
  // Hosts of one name are filled one after another.
  if (!local_rank) local_rank = int(std::count(hosts.begin(), mine, *mine)) % *local_world_size;
}

std::string sign_of_several(const std::function<const char*(const char* name)>& variable) {
  const LaunchInput input{.variable = variable};
  return Reader(input).sign_of_several();
}

std::optional<LaunchContract> read_launch_contract(const LaunchInput& input) {
  const Reader reader(input);
  reader.refuse_port_of_kubernetes();
  if (reader.is_bare()) return std::nullopt;
  return reader.contract();
}

// --- Slurm's lists -------------------------------------------------------------------------------

std::string first_host(std::string_view list) {
  const size_t end = std::min(list.find_first_of("[,"), list.size());
  const std::string host(list.substr(0, end));
  list.remove_prefix(end);
  if (!list.starts_with('[')) return host;
  const size_t close = std::min(list.find(']'), list.size() - 1);
  const std::string_view number = list.substr(1, list.find_first_of("-,]") - 1);
  return fmt::format("{}{}{}", host, number, first_host(list.substr(close + 1)));
}

int tasks_on_node(std::string_view list, int node, const std::string& name) {
  const std::string of_list = fmt::format(" in '{}', as in 2(x3),1", list);
  int nodes = 0;
  for (std::string_view rest = list; !rest.empty();) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    const bool repeated = item.ends_with(')');
    const size_t end = repeated ? item.find("(x") : item.size();
    require(end != item.npos, "{}={}: '{}' is no number of tasks; expected 2(x3),1 or the like",
            name, list, item);
    const int tasks = parse_whole(item.substr(0, end), name, 1, kMost, of_list);
    const int64_t times =
        repeated ? parse_whole(item.substr(end + 2, item.size() - end - 3), name, 1, kMost, of_list)
                 : 1;
    if (node - nodes < times) return tasks;
    nodes += int(times);
  }
  fail<BadInput>("{}={}: found {} nodes, and this is node {}, counted from 0", name, list, nodes,
                 node);
}

}  // namespace lockstep
