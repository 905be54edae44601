#include "common/comm/process/launch_contract.h"

#include <algorithm>
#include <limits>

#include "common/core/error.h"

namespace lockstep {
namespace {

constexpr int kMost = std::numeric_limits<int>::max();
constexpr int kMostRanks = 100'000;            // no machine has so many GPUs: a number typed wrong
constexpr const char* kDefaultPort = "29500";  // torch.distributed's
constexpr std::string_view kTcp = "tcp://";

/// The names under which a launcher tells who a process is.
struct Family {
  const char *launcher, *rank, *world_size, *local_rank, *local_world_size;
};
constexpr Family kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Family kOpenMpi{"OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                          "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Family kSlurm{"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
                        "SLURM_NTASKS_PER_NODE"};

class Reader {
 public:
  explicit Reader(const LaunchInput& input)
      : input_(input),
        tcp_(input.init_method.starts_with(kTcp)),
        set_(any_set()),
        names_(family()) {
    const size_t end = input.init_method.find("://");
    require(tcp_ || input.init_method == "env://",
            "--init-method {}: No rendezvous handler for {}://; give env:// or tcp://HOST:PORT",
            input.init_method, input.init_method.substr(0, end));
  }

  bool is_bare() const {
    return !set_ && !tcp_ && !input_.rank && !input_.world_size && !input_.local_rank;
  }

  LaunchContract contract() const {
    LaunchContract told;
    told.launcher = names_.launcher;
    if (!text(names_.rank) && !input_.rank) fail_missing(names_.rank, "--rank");
    if (!text(names_.world_size) && !input_.world_size) {
      fail_missing(names_.world_size, "--world-size");
    }
    told.world_size = *agreed(names_.world_size, "--world-size", input_.world_size, 1, kMostRanks);
    told.rank = *agreed(names_.rank, "--rank", input_.rank, 0, told.world_size - 1,
                        fmt::format(", since {} is {}", names_.world_size, told.world_size));
    read_place_on_host(told);
    told.master = tcp_ ? parse_address(input_.init_method.substr(kTcp.size()), "--init-method")
                       : address(told);
    require(told.master.port != 0 || told.world_size == 1,
            "{}=0: expected 1 to {}: the system chooses the port only for a job of one rank, the "
            "{} of this one could not know it",
            tcp_ ? "--init-method: the port" : "MASTER_PORT", kLargestPort, told.world_size);
    // "none" is what torchrun says for none. The restart count does not belong to the id: torchrun
    // counts on each host by itself.
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
  bool any_set() const {
    return any_of({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                   "MASTER_PORT", kOpenMpi.rank, kOpenMpi.world_size, kSlurm.rank});
  }
  const Family& family() const {
    // mpirun hands on what the shell has exported; nobody exports mpirun's own names.
    if (text(kOpenMpi.rank) && !text(kTorchrun.rank)) return kOpenMpi;
    if (any_of({kTorchrun.rank, kTorchrun.world_size})) return kTorchrun;
    if (text(kOpenMpi.world_size)) return kOpenMpi;
    return text(kSlurm.rank) ? kSlurm : kTorchrun;
  }

  /// What the variable and the option say, in range and not against each other; nullopt if neither
  /// says anything.
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
    // Slurm's is an upper limit, which a small job does not reach.
    const bool limit = &names_ == &kSlurm;
    const auto ranks = agreed(names_.local_world_size, "", {}, 1, limit ? kMost : told.world_size,
                              fmt::format(", since {} is {}", names_.world_size, told.world_size));
    told.local_world_size = std::min(ranks.value_or(told.world_size), told.world_size);
    const auto rank =
        agreed(names_.local_rank, "--local-rank", input_.local_rank, 0, told.local_world_size - 1,
               fmt::format(": there are {} ranks on this host", told.local_world_size));
    told.local_rank = rank.value_or(told.rank % told.local_world_size);
  }

  Address address(const LaunchContract& told) const {
    for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
      if (text(name)) continue;
      if (&names_ == &kTorchrun) fail_missing(name, "--init-method tcp://HOST:PORT");
      fail<BadInput>("{} started this rank {} of {} without {}; start it with: {}", names_.launcher,
                     told.rank, told.world_size, name, command(told));
    }
    const int port = parse_whole(*text("MASTER_PORT"), "MASTER_PORT", 0, kLargestPort);
    return {without_brackets(*text("MASTER_ADDR")), taken_by_torchrun() ? beside(port) : port};
  }

  /// torchrun listens on MASTER_PORT itself, for a store of PyTorch's: ours is at the next port.
  bool taken_by_torchrun() const {
    return text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  }
  static int beside(int port) { return port < kLargestPort ? port + 1 : port - 1; }

  std::string command(const LaunchContract& told) const {
    const std::string port = text("MASTER_PORT").value_or(kDefaultPort);
    if (&names_ == &kOpenMpi) {
      const bool one_host = told.local_world_size == told.world_size;
      const std::string host = text("MASTER_ADDR").value_or(one_host ? "127.0.0.1" : "$(hostname)");
      return fmt::format("mpirun -n {} -x MASTER_ADDR={} -x MASTER_PORT={} {}", told.world_size,
                         host, port, input_.program);
    }
    const std::string first = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)";
    const std::string host = text("MASTER_ADDR").value_or(first);
    return fmt::format("srun --ntasks={} --export=ALL,MASTER_ADDR={},MASTER_PORT={} {}",
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
  bool set_;
  const Family& names_;
};

}  // namespace

std::optional<LaunchContract> read_launch_contract(const LaunchInput& input) {
  const Reader reader(input);
  if (reader.is_bare()) return std::nullopt;
  return reader.contract();
}

}  // namespace lockstep
