#pragma once
// The options that all programs share that train. A program adds its own to the same parser.

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/core/device.h"
#include "common/data/batch_parts.h"
#include "common/data/dataset.h"
#include "common/data/loader.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/options/option_parser.h"
#include "common/rendezvous/simulated_ranks.h"

namespace lockstep {

struct Options {
  std::string data = "fashion-mnist";
  std::string data_dir;
  ModelKind model = ModelKind::seed;
  int64_t width = 64;
  int64_t depth = 5;
  Initializer init = Initializer::kaiming_uniform;
  int64_t epochs = 1;
  int64_t max_steps = 0;  // 0: no limit
  int64_t batch_size = 64;
  double lr = 0.1;
  double scale_lr = 0;  // 0: off, else the batch size that lr is meant for
  double warmup_epochs = 0;
  int64_t lr_step = 0;  // epochs; 0: constant
  double lr_gamma = 0.1;
  OptimizerKind optimizer = OptimizerKind::sgd;
  double momentum = 0;
  double weight_decay = 0;
  std::vector<double> betas{0.9, 0.999};
  double eps = 1e-8;
  int64_t seed = 1;
  OrderKind order = OrderKind::loader;
  BatchSplit emulate{};
  bool dropout = false;
  Precision precision = Precision::real;
  int64_t growth_interval = 2000;
  std::string devices;  // empty: default_devices()
  int nodes = 1;        // simulated hosts
  int threads_per_device = 1;
  bool graph = false, tf32 = false, nchw = false, bind = false, no_bind = false;
  int workers = 1;
  int prefetch_factor = 2;
  double loader_timeout = 0;
  bool drop_last = false;
  int64_t log_interval = 100;
  std::string metrics, trace, save, load;

  friend bool operator==(const Options&, const Options&) = default;

  virtual ~Options() = default;

  /// Describes every option, once: --help, the functions below, the comparison of ranks and
  /// checkpoints all use this description. A program with more options describes its own, too.
  virtual void add_to(OptionParser& parser);
  /// Whether a rank has a part of the network: all ranks then read and write whole weights.
  virtual bool splits_network() const { return false; }
  /// The ranks of a simulated job of several processes: one for each device.
  virtual SimulatedRanks simulated_ranks() const;

  /// The common options with their present values, for --metrics (reported_settings()); not the
  /// options that a program has besides.
  nlohmann::json to_json() const;
  /// The common options as a command line: a program that parses it gets these options. A program's
  /// own options are in CommandLine::own_arguments.
  std::vector<std::string> arguments() const;

  // The options in the form that the parts of a program need.
  ModelOptions model_options(const Dataset& images) const;
  DataLoaderOptions train_loader(const Dataset& set, const HostAllocator& allocator) const;
  DataLoaderOptions test_loader(const HostAllocator& allocator) const;
  /// The samples of the smallest batch of an epoch of `samples`.
  int64_t smallest_batch(int64_t samples) const;
  LearningRateSchedule schedule(int64_t steps_per_epoch) const;
  OptimizerRule optimizer_rule() const;
  /// Whether nothing is computed: the devices do not exist.
  bool simulated() const { return devices.starts_with("sim:"); }
  /// The devices named, or the defaults of this machine.
  std::vector<DeviceId> device_ids() const;
  DeviceOptions device_options() const {
    return {.threads = threads_per_device,
            .trace = !trace.empty(),
            .tf32 = tf32,
            .nchw = nchw,
            .bind = bind};
  }
};

/// Describes --no-bind alone, for programs that have few options.
void add_no_bind(OptionParser& parser, bool& no_bind);

/// The facts about a program that the frame of every main() needs.
struct ProgramInfo {
  std::string name;     // "02-dataparallel"
  std::string summary;  // the first line of --help
  /// The program that this one must agree with ("01-single-gpu"); --baseline compares their speeds.
  /// Empty: this is that program, or the reference next to it. These two have --graph instead of
  /// --baseline.
  std::string baseline{};
  /// Takes each batch in parts: 01-single-gpu/reference, with the option --emulate.
  bool in_parts = false;
  /// For programs whose batch normalisation sees only a part of the batch. The value of --emulate
  /// with which the reference computes the same, given the number of devices in use (2: "chunk:2").
  /// Called when the command line has been parsed. Empty: normalisation is over the whole batch.
  std::function<std::string(size_t devices)> emulate{};
  // Defaults of --order, --model and --optimizer; --momentum, which is of sgd, chooses that one.
  OrderKind order = OrderKind::loader;
  ModelKind model = ModelKind::seed;
  OptimizerKind optimizer = OptimizerKind::sgd;
  /// If the program runs as several processes: starts them and returns their exit status. In one of
  /// these processes, returns nothing.
  std::function<std::optional<int>()> start_ranks{};
};

struct CommandLine {
  Options options;
  std::vector<std::string> own_arguments;  // the program's own options, with the values as typed
  bool baseline = false;                   // --baseline was given
};

/// Parses the command line of a program into `options`. Returns nothing after a request for help,
/// which prints names, defaults and ranges of all options below the summary. Throws BadInput for
/// unknown options and values out of range, and if an output file could not be written at the
/// end.
std::optional<CommandLine> parse_command_line(const ProgramInfo& program, Options& options,
                                              int argc, const char* const* argv);

}  // namespace lockstep
