#include "common/options/options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/core/error.h"
#include "common/io/json.h"
#include "common/kernels/devices.h"
#include "common/options/option_parser.h"

namespace lockstep {
namespace {

constexpr double kLarge = 1e12;

void add_data_options(OptionParser& parser, Options& o) {
  parser.begin_group("Data");
  parser.add("--data", o.data, "fashion-mnist, mnist, cifar10, synthetic, synthetic:TRAIN:TEST");
  parser.add("--data-dir", o.data_dir, {"folder of the data set's files", Role::per_rank});
  parser.add("--order", o.order,
             "order of the samples: as PyTorch's DataLoader or DistributedSampler, or the file's");
  parser.add_flag("--drop-last", o.drop_last,
                  "leave out the last batch of an epoch if it is short");
  parser.add("--workers", o.workers,
             {"loader threads; 0: the main thread makes the batches", Role::per_rank}, {0, 256});
  parser.add("--prefetch-factor", o.prefetch_factor,
             {"batches that each worker makes ahead", Role::per_rank}, {1, 1024});
  parser.add("--loader-timeout", o.loader_timeout,
             {"seconds to wait for a batch; 0: for ever", Role::per_rank}, {0, 86400});
}

void add_network_options(OptionParser& parser, Options& o) {
  parser.begin_group("Network");
  parser.add("--model", o.model, "network");
  parser.add("--width", o.width,
             "resnet18: channels of the first block; mlp: a quarter of its features", {1, 1024});
  parser.add("--depth", o.depth, "mlp: linear layers, the last of them to the classes", {1, 1024});
  parser.add_flag("--dropout,!--no-dropout", o.dropout, "dropout in the seed networks");
  parser.add("--init", o.init, "first weights: as PyTorch's, or normal with std 0.01");
  parser.add(
      "--precision", o.precision,
      "type of the numbers in layers; bf16 and fp16: not in a build with -Dprecision=double");
  parser.add("--growth-interval", o.growth_interval,
             "fp16: double the scale of the loss after so many steps without overflow",
             {1, 1000000000});
  parser.add("--load", o.load, {"start from the weights of this safetensors file", Role::per_rank});
}

void add_training_options(OptionParser& parser, Options& o) {
  parser.begin_group("Training");
  parser.add("--epochs", o.epochs,
             {"passes over the training set; 0 with --load: evaluate only", Role::all_ranks},
             {0, 100000});
  parser.add("--max-steps", o.max_steps,
             {"stop after this many steps; 0: no limit", Role::all_ranks}, {0, 1000000000});
  parser.add("--batch-size", o.batch_size, "samples of one step, over all devices", {1, 1000000});
  parser.add("--optimizer", o.optimizer, "what updates the weights");
  parser.add("--lr", o.lr, "learning rate; not given: 0.1 for sgd, 0.001 for adam and adamw",
             {0, kLarge});
  parser.add("--scale-lr", o.scale_lr,
             "multiply --lr by batch size / this number; for adam and adamw by the quotient's "
             "square root; 0: off",
             {0, kLarge});
  parser.add(
      "--warmup-epochs", o.warmup_epochs,
      "climb to the learning rate over this many epochs: from 0, or with --scale-lr from --lr",
      {0, 1000});
  parser.add("--lr-step", o.lr_step,
             "multiply the rate by --lr-gamma every so many epochs; 0: never", {0, 100000});
  parser.add("--lr-gamma", o.lr_gamma, "see --lr-step", {0, 1});
  parser.add("--momentum", o.momentum, "sgd's momentum; without --optimizer this chooses sgd",
             {0, 1});
  parser.add(
      "--weight-decay", o.weight_decay,
      "sgd and adam: added to the gradient (L2); adamw: decoupled from it; default 0 for all "
      "three, unlike PyTorch's AdamW (0.01)",
      {0, kLarge});
  parser.add(
      "--betas", o.betas,
      "adam and adamw: share of the average of gradients, and of their squares, that a step keeps",
      {0, 1});
  parser.add("--eps", o.eps, "adam and adamw: added to the root of the squares' average",
             {1e-30, 1});
  parser.add("--seed", o.seed, "seed of the first weights, the order and dropout",
             {0, std::numeric_limits<uint32_t>::max()});
}

void add_device_options(OptionParser& parser, Options& o) {
  parser.begin_group("Devices");
  parser.add("--devices", o.devices,
             {"cpu:0, cuda:0 or a list; sim:8, sim:h100x8: eight devices that are only simulated; "
              "default: all GPUs, else cpu:0,cpu:1",
              Role::per_rank});
  parser.add("--nodes", o.nodes, {"simulated hosts, each with --devices", Role::per_rank},
             {1, 65536});
  parser.add("--threads-per-device", o.threads_per_device,
             {"compute threads of a CPU device", Role::rounding}, {1, 1024});
  parser.add_flag("--bind", o.bind,
                  {"CPU devices of one process: each keeps to its part of the cores, as ranks do",
                   Role::per_rank});
  add_no_bind(parser, o.no_bind);
  parser.add_flag("--tf32", o.tf32, "GPUs: round the inputs of products to 10 bits of mantissa");
  parser.add_flag(
      "--nchw", o.nchw,
      {"GPUs: ask cuDNN first for algorithms that want channels first, to compare layouts",
       Role::per_rank});
  parser.add("--emulate", o.emulate,
             "compute each batch in parts, one after another, as other stages do: none, chunk:D "
             "(stage 02, D devices), micro:M (stage 03, M micro-batches), stride:W (stage 04, W "
             "ranks), micro:MxW (W ranks with M micro-batches each)");
  parser.add_flag("--graph", o.graph, "capture the training step once, then replay it as a whole");
}

void add_output_options(OptionParser& parser, Options& o) {
  parser.begin_group("Output");
  parser.add("--log-interval", o.log_interval, {"steps between two lines", Role::per_rank},
             {1, 1000000000});
  parser.add_output("--save", o.save,
                    {"write the final weights to this safetensors file", Role::per_rank});
  parser.add_output("--metrics", o.metrics,
                    {"write losses, times and memory to this JSON file", Role::report});
  parser.add_output("--trace", o.trace,
                    {"write a timeline for chrome://tracing or ui.perfetto.dev", Role::report},
                    Output::file_of_each_rank);
}

/// Options of some programs only: the reference imitates the other stages, the others are measured
/// against it.
void add_comparison_options(OptionParser& parser, const ProgramInfo& program, CommandLine& line) {
  const bool alone = program.baseline.empty();
  const std::string folder = alone ? "" : "../" + program.baseline + "/";
  if (!program.in_parts) parser.is_elsewhere("--emulate", folder + "reference", "--emulate");
  if (alone) return;
  parser.is_elsewhere("--graph", folder + program.baseline, "--graph");
  parser.begin_group("Output");
  parser.add_flag(
      "--baseline", line.baseline,
      fmt::format("show the speed-up over {}, if the weights are the same", program.baseline));
}

/// PyTorch's default for the other two; its SGD has none.
double default_rate(OptimizerKind kind) { return is_adam(kind) ? 0.001 : 0.1; }

/// Refuses options of another optimizer, and chooses what was not given.
void settle_optimizer(const OptionParser& parser, Options& o) {
  if (parser.given("--momentum") && !parser.given("--optimizer")) o.optimizer = OptimizerKind::sgd;
  if (!parser.given("--lr")) o.lr = default_rate(o.optimizer);
  const bool adam = is_adam(o.optimizer);
  require(!adam || !parser.given("--momentum"),
          "--momentum: is of sgd, not of {}, whose --betas take its place; leave it out",
          name_of(o.optimizer));
  for (const char* name : {"--betas", "--eps"}) {
    require(adam || !parser.given(name),
            "{}: is of adam and adamw, not of sgd; leave it out, or choose --optimizer adam or "
            "adamw",
            name);
  }
}

/// Refuses numbers of 16 bits in the build of the proofs, and where weights are to be equal.
void check_precision(const OptionParser& parser, const Options& o, bool baseline) {
  require(o.precision == Precision::fp16 || !parser.given("--growth-interval"),
          "--growth-interval: {} is for --precision fp16 and has no meaning for {}; leave it out",
          o.growth_interval, name_of(o.precision));
  if (o.precision == Precision::real) return;
  require(sizeof(Real) == sizeof(float),
          "--precision: found {}, expected float64: this build computes in that alone; use one "
          "without -Dprecision=double",
          name_of(o.precision));
  require(!baseline,
          "--baseline: compares weights, which {} rounds differently on one device; leave it out",
          name_of(o.precision));
}

/// Refuses what was typed and would have no effect.
void check_use(const OptionParser& parser, const Options& o, bool baseline) {
  require(o.workers > 0 || !parser.given("--prefetch-factor"),
          "--prefetch-factor: {} needs loader threads; give --workers 1 or more",
          o.prefetch_factor);
  const bool has_width = o.model == ModelKind::resnet18 || o.model == ModelKind::mlp;
  require(has_width || !parser.given("--width"),
          "--width: {} is for --model resnet18 and mlp and has no meaning for {}; leave it out",
          o.width, name_of(o.model));
  require(o.lr_step > 0 || !parser.given("--lr-gamma"),
          "--lr-gamma: {} lowers the rate every --lr-step epochs, and --lr-step 0 never does; give "
          "--lr-step 1 or more",
          o.lr_gamma);
  require(o.model == ModelKind::mlp || !parser.given("--depth"),
          "--depth: {} is for --model mlp and has no meaning for {}; leave it out", o.depth,
          name_of(o.model));
  require(!has_width || !o.dropout,
          "--dropout: {} has no dropout layers; leave it out or choose --model seed",
          name_of(o.model));
  require(!baseline || !o.simulated(),
          "--baseline: compares weights, and simulated devices compute none; leave it out");
  require(!baseline || o.epochs > 0,
          "--baseline: --epochs 0 trains nothing that could be timed; give 1 or more");
}

/// Checks what a range cannot say, before data is read or a device opened.
void check(const Options& o) {
  require(o.betas.size() == 2 && std::ranges::max(o.betas) < 1,
          "--betas: found {}, expected two numbers below 1, for instance 0.9,0.999",
          fmt::join(o.betas, ","));
  if (!o.devices.empty()) parse_devices(o.devices);
  require(o.simulated() || o.nodes == 1,
          "--nodes: {} is for simulated devices; give --devices sim:8, or start ranks on several "
          "hosts by ./lockstep launch --nnodes",
          o.nodes);
  for (const auto& [name, path] : {std::pair("--save", o.save), {"--load", o.load}}) {
    require(!o.simulated() || path.empty(),
            "{}: {} has weights, and simulated devices compute none; leave it out, or give "
            "--devices cpu:0",
            name, path);
  }
  require(!o.bind || !o.no_bind, "--bind and --no-bind: leave one of them out");
  require(o.workers > 0 || o.loader_timeout == 0,
          "--loader-timeout: {} needs loader threads; give --workers 1 or more", o.loader_timeout);
  require(!o.graph || o.emulate.kind == BatchSplit::Kind::whole,
          "--graph: a graph holds one whole batch, --emulate {} divides it; leave one of them out",
          o.emulate.text());
  require(!o.graph || o.model != ModelKind::seed_skip,
          "--graph: a graph repeats one step, --model seed-skip leaves a layer out of every second "
          "step; leave one of them out");
  require_distinct({{"--load", o.load}, {"--metrics", o.metrics}});  // --save may follow --load
  require_distinct({{"--load", o.load}, {"--trace", o.trace}});
}

}  // namespace

void add_no_bind(OptionParser& parser, bool& no_bind) {
  parser.add_flag(
      "--no-bind", no_bind,
      {"ranks on CPU devices: let their threads move between all cores", Role::per_rank});
}

std::optional<CommandLine> parse_command_line(const ProgramInfo& program, Options& options,
                                              int argc, const char* const* argv) {
  CommandLine line;
  options.order = program.order;
  options.model = program.model;
  options.optimizer = program.optimizer;
  options.lr = default_rate(program.optimizer);
  OptionParser parser(program.name, program.summary);
  options.add_to(parser);
  add_comparison_options(parser, program, line);
  if (!parser.parse(argc, argv)) return {};
  check_use(parser, options, line.baseline);
  check_precision(parser, options, line.baseline);
  settle_optimizer(parser, options);
  check(options);
  std::set<std::string> common{"--baseline"};
  for (const OptionRow& row : table_of(Options())) common.insert(row.name);
  line.own_arguments = parser.words_given(common);
  line.options = options;
  return line;
}

void Options::add_to(OptionParser& parser) {
  add_data_options(parser, *this);
  add_network_options(parser, *this);
  add_training_options(parser, *this);
  add_device_options(parser, *this);
  add_output_options(parser, *this);
}

nlohmann::json Options::to_json() const { return reported_settings(table_of(*this)); }

std::vector<std::string> Options::arguments() const {
  // Defaults are left out, since some must not be given (--width for the seed network). But these
  // differ from program to program.
  const std::set<std::string> programs_choose{"--order", "--model", "--optimizer", "--lr"};
  OptionTable defaults = table_of(Options());
  std::erase_if(defaults, [&](const OptionRow& row) { return programs_choose.contains(row.name); });
  return words_unlike(defaults, table_of(*this));
}

OptimizerRule Options::optimizer_rule() const {
  return {.kind = optimizer,
          .momentum = momentum,
          .weight_decay = weight_decay,
          .beta1 = betas.at(0),
          .beta2 = betas.at(1),
          .eps = eps,
          .growth_interval = precision == Precision::fp16 ? growth_interval : 0};
}

ModelOptions Options::model_options(const Dataset& images) const {
  return {.kind = model,
          .width = width,
          .depth = depth,
          .dropout = dropout,
          .seed = static_cast<uint32_t>(seed),
          .height = images.height,
          .width_pixels = images.width,
          .channels = images.channels,
          .classes = images.classes};
}

DataLoaderOptions Options::train_loader(const Dataset& set, const HostAllocator& allocator) const {
  DataLoaderOptions loader = test_loader(allocator);
  loader.sampler = make_order(order, set.count(), seed);
  loader.drop_last = drop_last;
  return loader;
}

DataLoaderOptions Options::test_loader(const HostAllocator& allocator) const {
  DataLoaderOptions loader{.batch_size = batch_size,
                           .num_workers = workers,
                           .persistent_workers = workers > 0,
                           .timeout_seconds = loader_timeout,
                           .seed = static_cast<uint64_t>(seed),
                           .allocator = allocator};
  if (workers > 0) loader.prefetch_factor = prefetch_factor;
  return loader;
}

int64_t Options::smallest_batch(int64_t samples) const {
  const int64_t rest = samples % batch_size;
  return drop_last || rest == 0 ? std::min(batch_size, samples) : rest;
}

LearningRateSchedule Options::schedule(int64_t steps_per_epoch) const {
  // Linear for SGD: Goyal et al., arXiv 1706.02677, section 2.1. Adam's steps are as long as the
  // rate, however large the gradient: Malladi et al., arXiv 2205.10287.
  const double ratio = scale_lr > 0 ? double(batch_size) / scale_lr : 1;
  const double target = lr * (is_adam(optimizer) ? std::sqrt(ratio) : ratio);
  return {.base = target,
          .warmup_from = scale_lr > 0 ? lr : 0,
          .warmup_steps = static_cast<int64_t>(warmup_epochs * double(steps_per_epoch)),
          .decay_steps = lr_step * steps_per_epoch,
          .gamma = lr_gamma};
}

SimulatedRanks Options::simulated_ranks() const {
  const auto per_host = int(device_ids().size());
  return {.world_size = nodes * per_host, .per_host = per_host};
}

std::vector<DeviceId> Options::device_ids() const {
  return devices.empty() ? default_devices(2) : parse_devices(devices);
}

}  // namespace lockstep
