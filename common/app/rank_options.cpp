#include "common/app/rank_options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "common/app/cores.h"
#include "common/app/weights_file.h"
#include "common/cli/report.h"
#include "common/cli/standard_streams.h"
#include "common/comm/process/backend_choice.h"
#include "common/core/error.h"
#include "common/kernels/devices.h"
#include "common/launch/launcher.h"

namespace lockstep {
namespace {

std::optional<int> if_given(int number) {
  return number < 0 ? std::nullopt : std::optional<int>(number);
}

/// A word of a command as a shell wants it.
std::string quoted(const std::string& word) {
  const auto harmless = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::strchr("_./:=,+@%-", c) != nullptr;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), harmless)) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

/// The command line for people, and for errors that propose one.
std::string typed() {
  std::vector<std::string> words = own_command_line();
  std::transform(words.begin(), words.end(), words.begin(), quoted);
  return fmt::format("{}", fmt::join(words, " "));
}

}  // namespace

std::vector<std::string> own_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

void RankOptions::add_to(OptionParser& parser) {
  parser.add("--backend", backend, "what connects the ranks: nccl, gloo, tcp (our own), or auto");
  parser.add("--init-method", init_method,
             "where rank 0 is: env:// (MASTER_ADDR and MASTER_PORT) or tcp://HOST:PORT");
  parser.add("--rank", rank, "this process's rank, where no launcher says it");
  parser.add("--world-size", world_size, "number of ranks, where no launcher says it");
  parser.add("--local_rank,--local-rank", local_rank,
             "rank among those of this host, where no launcher says it");
  parser.add_flag("--no-bind", no_bind, "let ranks on CPU devices move between all cores");
  parser.add("--timeout", timeout, "seconds until a silent rank is given up", {0.1, 86400});
  parser.check_afterwards([this, &parser] {
    check_backend_name(process_group().backend);
    for (const auto& [name, value] :
         {std::pair("--rank", rank), {"--world-size", world_size}, {"--local-rank", local_rank}}) {
      require(value >= 0 || !parser.given(name), "{}: found {}, expected 0 or more", name, value);
    }
    require(!parser.given("--baseline") || !read_launch_contract(launch_input()),
            "--baseline: compares whole runs, and this process is one rank of a run; start it "
            "without a launcher");
  });
}

LaunchInput RankOptions::launch_input() const {
  return {.variable = [](const char* name) -> const char* { return std::getenv(name); },
          .init_method = init_method,
          .rank = if_given(rank),
          .world_size = if_given(world_size),
          .local_rank = if_given(local_rank),
          .program = typed()};
}

std::optional<int> RankOptions::start_ranks(const Options& options) const {
  if (read_launch_contract(launch_input())) return {};
  const int count = static_cast<int>(options.device_ids().size());
  fmt::print("no launcher: starting {} local rank{}\n", count, count == 1 ? "" : "s");
  std::fflush(stdout);
  std::vector<std::string> program = own_command_line();
  program[0] = std::filesystem::read_symlink("/proc/self/exe");
  LaunchOptions launcher;
  launcher.nproc_per_node = count;
  launcher.standalone = true;
  return launch(launcher, program);
}

ProcessGroupOptions RankOptions::process_group() const {
  return {.backend = backend == "auto" ? "" : backend,
          .init_method = init_method,
          .rank = if_given(rank),
          .world_size = if_given(world_size),
          .local_rank = if_given(local_rank),
          .timeout_seconds = timeout,
          .program = typed()};
}

int run_ranks(OptionParser& parser, int argc, const char* const* argv, const RankOptions& ranks,
              const std::string& devices, const std::function<void(ProcessGroup&)>& work) {
  hold_standard_streams();
  report_uncaught_errors();
  bool goes_on = false;
  said_once([&] { goes_on = parser.parse(argc, argv); });
  if (!goes_on) return 0;
  Options options;
  options.devices = devices;
  if (const std::optional<int> status = ranks.start_ranks(options)) return *status;
  work(init_process_group(ranks.process_group()));
  destroy_process_group();
  require_printed();
  return 0;
}

std::unique_ptr<Device> open_device_of_rank(const Options& options, const RankOptions& ranks,
                                            ProcessGroup& group) {
  return together(group, [&] {
    const DeviceId id =
        group.device_of(options.devices.empty() ? default_devices(group.local_world_size())
                                                : parse_devices(options.devices));
    if (id.kind == DeviceId::Kind::cpu && !ranks.no_bind) {
      bind_to_share_of_cores(group.local_rank(), group.local_world_size(),
                             options.threads_per_device);
    }
    return open_device(id, options.device_options());
  });
}

DatasetPair load_dataset(ProcessGroup& group, const Options& options) {
  return together(group, [&] { return load_dataset(options.data, options.data_dir); });
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
