#include "common/training/rank_program.h"

#include <cstdio>
#include <filesystem>

#include "common/core/error.h"
#include "common/core/host.h"
#include "common/core/text.h"
#include "common/io/json.h"
#include "common/kernels/devices.h"
#include "common/launch/launcher.h"
#include "common/options/report.h"
#include "common/options/standard_streams.h"
#include "common/system/process.h"
#include "common/training/weights_file.h"

namespace lockstep {

std::optional<int> start_ranks(const Options& options, const RankOptions& rank_options) {
  if (rank_options.started_as_rank()) return {};
  const int count = static_cast<int>(options.device_ids().size());
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
                     const RankOptions& rank_options, const std::string& devices,
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
  all.update({{"precision", sizeof(Real) == 4 ? "float32" : "float64"},
              {"training_samples", data.train.count()},
              {"test_samples", data.test.count()}});
  return all;
}

nlohmann::json shared_settings(const OptionTable& options, const DatasetPair& data) {
  return run_settings(options, {Role::all_runs, Role::all_ranks}, data);
}

nlohmann::json settings_of_parts(const OptionTable& all, const Options& options,
                                 const DatasetPair& data) {
  nlohmann::json settings = shared_settings(all, data);
  settings["loads_weights"] = !options.load.empty();
  settings["saves_weights"] = !options.save.empty();
  return settings;
}

void require_same_settings(ProcessGroup& group, const nlohmann::json& mine) {
  NamedValues facts;
  for (const auto& [name, value] : mine.items()) facts.emplace_back(name, value.dump());
  group.require_same(facts, "start all ranks with the same options and data");
}

void require_same_settings(ProcessGroup& group, const OptionTable& options,
                           const DatasetPair& data) {
  require_same_settings(group, shared_settings(options, data));
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
