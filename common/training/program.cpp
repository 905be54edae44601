#include "common/training/program.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "common/core/host.h"
#include "common/core/text.h"
#include "common/io/json.h"
#include "common/kernels/devices.h"
#include "common/launch/launcher.h"
#include "common/options/report.h"
#include "common/rendezvous/launch_contract.h"
#include "common/system/process.h"
#include "common/training/verdict.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

/// Refuses to be one of several copies, which would do the same work and write the same files.
void require_one_process(const std::string& name, int nodes) {
  require(nodes == 1, "--nodes: {} is one process, on one host; leave it out", name);
  const auto variable = [](const char* word) -> const char* { return std::getenv(word); };
  const std::string told = sign_of_several(variable);
  require(
      told.empty(),
      "{} is one process, which uses all of --devices, but {} says that it was started as one of "
      "several; start it without a launcher, or unset that variable",
      name, told);
}

/// Ranks of several kinds are a thread each. What is thrown in one of them ends the process.
void train_each_kind(const Options& options, const std::function<void()>& train) {
  std::vector<std::jthread> others;
  const int kinds = options.simulated() ? options.simulated_ranks().kinds : 1;
  for (int kind = 1; kind < kinds; ++kind) others.emplace_back(train);
  train();
}

}  // namespace

int run_program(const ProgramInfo& program, Options& options, int argc, const char* const* argv,
                const std::function<void()>& train) {
  hold_standard_streams();
  report_uncaught_errors();  // instead of a catch: see its comment
  std::optional<CommandLine> line;
  said_once([&] {
    line = parse_command_line(program, options, argc, argv);
    if (line && !program.start_ranks) require_one_process(program.name, options.nodes);
  });
  std::optional<int> status;  // nothing: this process trains
  if (!line) {
    status = 0;
  } else if (line->baseline) {
    status = run_with_baseline(program, *line);
  } else if (program.start_ranks) {
    status = program.start_ranks();
  }
  if (!status) train_each_kind(options, train);
  require_printed();
  return status.value_or(0);
}

// --- One rank of several -------------------------------------------------------------------------

std::optional<int> start_ranks(const Options& options, RankOptions& rank_options) {
  const bool started = rank_options.started_as_rank();
  if (started && !options.simulated()) return {};
  const int count = static_cast<int>(options.device_ids().size());
  if (options.simulated()) {
    require(!started,
            "--devices {}: simulated ranks are all in one process, and a launcher has started "
            "several; start it without one",
            options.devices);
    rank_options.simulated = options.simulated_ranks();
    return {};
  }
  print_clean("no launcher: starting {} local rank{}\n", count, count == 1 ? "" : "s");
  std::fflush(stdout);
  std::vector<std::string> program = own_command_line();
  program[0] = std::filesystem::read_symlink("/proc/self/exe");
  LaunchOptions launcher;
  launcher.nproc_per_node = count;
  launcher.standalone = true;
  return launch(launcher, program);
}

int run_rank_program(OptionParser& parser, int argc, const char* const* argv,
                     RankOptions& rank_options, const std::string& devices,
                     const std::function<void(ProcessGroup&)>& work) {
  hold_standard_streams();
  report_uncaught_errors();
  bool goes_on = false;
  said_once([&] { goes_on = parser.parse(argc, argv); });
  if (!goes_on) return 0;
  Options options;
  options.devices = devices;
  if (const std::optional<int> status = start_ranks(options, rank_options)) return *status;
  {
    ProcessGroup group = init_process_group(rank_options.group_options());
    work(group);
  }
  require_printed();
  return 0;
}

std::unique_ptr<Device> open_device_of_rank(const Options& options, ProcessGroup& group) {
  return group.together([&] {
    const DeviceId id =
        group.device_of(options.devices.empty() ? default_devices(group.local_world_size())
                                                : parse_devices(options.devices));
    if (id.kind == DeviceId::Kind::cpu && !options.no_bind) {
      keep_to(
          share_of_cores(group.local_rank(), group.local_world_size(), options.threads_per_device));
    }
    return open_device(id, options.device_options());
  });
}

std::string ranks_text(const ProcessGroup& group) {
  const std::string trust = group.trust();
  return fmt::format("{} rank{} over {}{}", group.world_size(), group.world_size() == 1 ? "" : "s",
                     group.backend_and_why(), trust.empty() ? "" : ", " + trust);
}

nlohmann::json run_settings(const OptionTable& options, std::initializer_list<Role> roles,
                            const DatasetPair& data) {
  nlohmann::json all = settings_of(options, roles);
  all.update({{"training_samples", data.train.count()}, {"test_samples", data.test.count()}});
  return all;
}

nlohmann::json shared_settings(const OptionTable& options, const DatasetPair& data) {
  return run_settings(options, {Role::all_runs, Role::all_ranks}, data);
}

void require_same_settings(ProcessGroup& group, const OptionTable& options, const DatasetPair& data,
                           bool splits_network) {
  nlohmann::json mine = shared_settings(options, data);
  for (const OptionRow& row : options) {
    if (!splits_network || (row.name != "--load" && row.name != "--save")) continue;
    mine[row.setting_name + "s_weights"] = row.value != OptionValue(std::string());
  }
  NamedValues facts;
  for (const auto& [name, value] : mine.items()) facts.emplace_back(name, value.dump());
  group.require_same(facts, "start all ranks with the same options and data");
}

DatasetPair load_dataset(ProcessGroup& group, const Options& options) {
  return group.together([&] { return load_dataset(options.data, options.data_dir); });
}

void load_weights(ProcessGroup& group, const std::string& path, Module& network) {
  group.together([&] {
    if (!path.empty() && group.rank() == 0) load_weights(path, network);
  });
}

void save_weights(ProcessGroup& group, const std::string& path, Module& network) {
  group.together([&] {
    if (!path.empty() && group.rank() == 0) save_weights(path, network);
  });
}

}  // namespace lockstep
