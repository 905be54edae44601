#include "common/app/options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "common/core/error.h"
#include "common/kernels/devices.h"

namespace lockstep {
namespace {

constexpr double kLarge = 1e12;

/// The validator of a number within [low, high]. CLI::Range would let NaN pass, which compares as
/// neither too small nor too large, and negative numbers where the option is unsigned.
template <class T>
CLI::Validator in_range(T low, T high) {
  const std::string range = fmt::format("{} to {}", low, high);
  return CLI::Validator(
      [=](const std::string& text) {
        T value;
        const bool number = CLI::detail::lexical_cast(text, value);
        return number && value >= low && value <= high
                   ? std::string()
                   : fmt::format("'{}' is not a number in the range {}", text, range);
      },
      "in " + range);
}

void add_model_options(CLI::App& app, Options& o) {
  app.add_option("--data", o.data,
                 "fashion-mnist, mnist, cifar10, synthetic, synthetic:TRAIN:TEST");
  app.add_option("--data-dir", o.data_dir, "folder of the data set's files");
  app.add_option("--model", o.model, "network: seed, seed-bn or resnet18");
  app.add_option("--width", o.width, "resnet18: channels of the first block")
      ->check(in_range(int64_t{1}, int64_t{1024}));
  app.add_flag("--dropout,!--no-dropout", o.dropout, "dropout in the seed networks");
  app.add_option("--init", o.init,
                 "first weights: kaiming (PyTorch's default) or normal (std 0.01)");
  app.add_option("--seed", o.seed, "of the first weights, the order and dropout")
      ->check(in_range(int64_t{0}, int64_t{std::numeric_limits<uint32_t>::max()}));
  app.add_option("--load", o.load, "start from the weights of this safetensors file");
  app.add_option("--save", o.save, "write the final weights to this safetensors file");
}

void add_training_options(CLI::App& app, Options& o) {
  app.add_option("--epochs", o.epochs, "0 with --load: evaluate only")
      ->check(in_range(int64_t{0}, int64_t{100000}));
  app.add_option("--max-steps", o.max_steps, "stop after this many steps; 0: no limit")
      ->check(in_range(int64_t{0}, int64_t{1000000000}));
  app.add_option("--batch-size", o.batch_size, "samples of one step, over all devices")
      ->check(in_range(int64_t{1}, int64_t{1000000}));
  app.add_option("--lr", o.lr, "learning rate")->check(in_range(0.0, kLarge));
  app.add_option("--scale-lr", o.scale_lr, "multiply --lr by batch size / this number; 0: off")
      ->check(in_range(0.0, kLarge));
  app.add_option(
         "--warmup-epochs", o.warmup_epochs,
         "climb to the learning rate over this many epochs: from 0, or with --scale-lr from --lr")
      ->check(in_range(0.0, 1000.0));
  app.add_option("--lr-step", o.lr_step,
                 "multiply the rate by --lr-gamma every so many epochs; 0: never")
      ->check(in_range(int64_t{0}, int64_t{100000}));
  app.add_option("--lr-gamma", o.lr_gamma, "see --lr-step")->check(in_range(0.0, 1.0));
  app.add_option("--momentum", o.momentum, "of SGD")->check(in_range(0.0, 1.0));
  app.add_option("--weight-decay", o.weight_decay, "of SGD")->check(in_range(0.0, kLarge));
  app.add_option("--order", o.order, "of the samples, as PyTorch's: loader, sampler or file");
  app.add_flag("--drop-last", o.drop_last, "leave out the last batch of an epoch if it is short");
}

void add_machine_options(CLI::App& app, Options& o) {
  app.add_option("--devices", o.devices,
                 "cpu:0, cuda:0 or a list; default: all GPUs, else cpu:0,cpu:1");
  app.add_option("--threads-per-device", o.threads_per_device, "compute threads of a CPU device")
      ->check(in_range(1, 1024));
  app.add_flag("--tf32", o.tf32, "GPUs: round the inputs of products to 10 bits of mantissa");
  app.add_option("--workers", o.workers, "loader threads; 0: the main thread makes the batches")
      ->check(in_range(0, 256));
  app.add_option("--prefetch-factor", o.prefetch_factor, "batches that each worker makes ahead")
      ->check(in_range(1, 1024));
  app.add_option("--loader-timeout", o.loader_timeout, "seconds to wait for a batch; 0: for ever")
      ->check(in_range(0.0, 86400.0));
  app.add_option("--log-interval", o.log_interval, "steps between two lines")
      ->check(in_range(int64_t{1}, int64_t{1000000000}));
  app.add_option("--metrics", o.metrics, "write losses, times and memory to this JSON file");
  app.add_option("--trace", o.trace, "write a timeline for chrome://tracing or ui.perfetto.dev");
}

/// What a stage has alone: the reference plays the others, the others are measured against it.
void add_comparison_options(CLI::App& app, const StageInfo& stage, CommandLine& line) {
  if (stage.baseline.empty()) {
    app.add_option("--emulate", line.options.emulate,
                   "take the parts of each batch one after another, as if on several devices: "
                   "none, chunk:D, stride:W or micro:M");
    app.add_flag("--graph", line.options.graph,
                 "capture the training step once, then replay it as a whole");
  } else {
    app.add_flag(
        "--baseline", line.baseline,
        fmt::format("show the speed-up over {}, if the weights are the same", stage.baseline));
  }
}

/// An option as words of a command line, if it was given.
void append_option(const CLI::Option& option, std::vector<std::string>& words) {
  if (option.count() == 0) return;
  const bool flag = option.get_expected_max() == 0;
  if (!flag) words.push_back(option.get_name());
  for (const std::string& value : option.results()) {
    words.push_back(flag ? option.get_name() + "=" + value : value);
  }
}

/// Refuses what was typed and would have no effect.
void check_use(const CLI::App& app, const CommandLine& line) {
  const Options& o = line.options;
  require(o.workers > 0 || app.count("--prefetch-factor") == 0,
          "--prefetch-factor: {} needs loader threads; give --workers 1 or more",
          o.prefetch_factor);
  const bool resnet = parse_model(o.model) == ModelKind::resnet18;
  require(resnet || app.count("--width") == 0,
          "--width: {} is for --model resnet18 and has no meaning for {}; leave it out", o.width,
          o.model);
  require(!resnet || !o.dropout,
          "--dropout: resnet18 has no dropout layers; leave it out or choose --model seed");
  require(!line.baseline || o.epochs > 0,
          "--baseline: --epochs 0 trains nothing that could be timed; give 1 or more");
}

/// Checks what a range cannot say, before data is read or a device opened.
void check(const Options& o) {
  parse_model(o.model);
  parse_initializer(o.init);
  parse_order(o.order);
  parse_split(o.emulate);
  if (!o.devices.empty()) parse_devices(o.devices);
  require(o.workers > 0 || o.loader_timeout == 0,
          "--loader-timeout: {} needs loader threads; give --workers 1 or more", o.loader_timeout);
  require(!o.graph || parse_split(o.emulate).kind == BatchSplit::Kind::whole,
          "--graph: a graph holds one whole batch, --emulate {} divides it; leave one of them out",
          o.emulate);
  require_writable("--metrics", o.metrics);
  require_writable("--trace", o.trace);
  require_writable("--save", o.save);
}

}  // namespace

void require_writable(const char* option, const std::string& path) {
  if (path.empty()) return;
  const std::filesystem::path target(path);
  const std::filesystem::path folder =
      target.has_parent_path() ? target.parent_path() : std::filesystem::path(".");
  require(std::filesystem::is_directory(folder) && access(folder.c_str(), W_OK) == 0,
          "{} {}: the folder {} does not exist or cannot be written; create it first", option, path,
          folder.string());
  require(!std::filesystem::exists(target) || std::filesystem::is_regular_file(target),
          "{} {}: this exists and is not a regular file; name a file", option, path);
}

std::optional<CommandLine> parse_command_line(const StageInfo& stage, int argc,
                                              const char* const* argv) {
  CommandLine line;
  CLI::App app(stage.summary, stage.name);
  app.option_defaults()->always_capture_default();
  add_model_options(app, line.options);
  add_training_options(app, line.options);
  add_machine_options(app, line.options);
  add_comparison_options(app, stage, line);
  const size_t common = app.get_options().size();
  if (stage.add_options) stage.add_options(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return {};
  } catch (const CLI::ParseError& error) {
    fail<BadInput>("{}; --help lists all options and their defaults", error.what());
  }
  check_use(app, line);
  check(line.options);
  const std::vector<CLI::Option*> all = app.get_options();
  for (size_t i = common; i < all.size(); ++i) append_option(*all[i], line.stage_arguments);
  return line;
}

nlohmann::json Options::to_json() const {
  return {{"data", data},
          {"data_dir", data_dir},
          {"model", model},
          {"width", width},
          {"init", init},
          {"epochs", epochs},
          {"max_steps", max_steps},
          {"batch_size", batch_size},
          {"lr", lr},
          {"scale_lr", scale_lr},
          {"warmup_epochs", warmup_epochs},
          {"lr_step", lr_step},
          {"lr_gamma", lr_gamma},
          {"momentum", momentum},
          {"weight_decay", weight_decay},
          {"seed", seed},
          {"order", order},
          {"emulate", emulate},
          {"dropout", dropout},
          {"devices", devices},
          {"threads_per_device", threads_per_device},
          {"graph", graph},
          {"tf32", tf32},
          {"workers", workers},
          {"prefetch_factor", prefetch_factor},
          {"loader_timeout", loader_timeout},
          {"drop_last", drop_last},
          {"log_interval", log_interval},
          {"load", load},
          {"save", save}};
}

std::vector<std::string> Options::arguments() const {
  nlohmann::json values = to_json();
  values.update({{"metrics", metrics}, {"trace", trace}});
  const nlohmann::json defaults = Options().to_json();
  std::vector<std::string> words;
  for (const auto& [key, value] : values.items()) {
    // Defaults go unsaid, since some may not be said (--width for the seed network). But stages
    // differ in their default order.
    if (value == defaults.value(key, nlohmann::json("")) && key != "order") continue;
    std::string name = "--" + key;
    std::replace(name.begin(), name.end(), '_', '-');
    words.push_back(name);
    if (!value.is_boolean())
      words.push_back(value.is_string() ? value.get<std::string>() : value.dump());
  }
  return words;
}

ModelOptions Options::model_options(const Dataset& images) const {
  return {.kind = parse_model(model),
          .width = width,
          .dropout = dropout,
          .seed = static_cast<uint32_t>(seed),
          .height = images.height,
          .width_pixels = images.width,
          .channels = images.channels,
          .classes = images.classes};
}

DataLoaderOptions Options::train_loader(const Dataset& set, const HostAllocator& allocator) const {
  DataLoaderOptions loader = test_loader(allocator);
  loader.sampler = make_order(parse_order(order), set.count(), seed);
  loader.drop_last = drop_last;
  return loader;
}

DataLoaderOptions Options::test_loader(const HostAllocator& allocator) const {
  DataLoaderOptions loader{.batch_size = batch_size,
                           .num_workers = workers,
                           .persistent_workers = workers > 0,
                           .timeout_seconds = loader_timeout,
                           .seed = seed,
                           .allocator = allocator};
  if (workers > 0) loader.prefetch_factor = prefetch_factor;
  return loader;
}

int64_t Options::smallest_batch(int64_t samples) const {
  const int64_t rest = samples % batch_size;
  return drop_last || rest == 0 ? std::min(batch_size, samples) : rest;
}

LearningRateSchedule Options::schedule(int64_t steps_per_epoch) const {
  const double target = scale_lr > 0 ? lr * double(batch_size) / scale_lr : lr;
  return {.base = target,
          .warmup_from = scale_lr > 0 ? lr : 0,
          .warmup_steps = static_cast<int64_t>(warmup_epochs * double(steps_per_epoch)),
          .decay_steps = lr_step * steps_per_epoch,
          .gamma = lr_gamma};
}

std::vector<DeviceId> Options::device_ids() const {
  return devices.empty() ? default_devices(2) : parse_devices(devices);
}

}  // namespace lockstep
