#include "common/training/verdict.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/file.h"
#include "common/io/json.h"
#include "common/io/safetensors.h"
#include "common/system/child_process.h"

namespace lockstep {

// --- Weights and speeds --------------------------------------------------------------------------

namespace {

struct Weight {
  std::vector<int64_t> shape;
  std::vector<double> values;
};
/// The parameters of a file by name.
using Weights = std::map<std::string, Weight>;

/// BatchNorm's state that no gradient moves.
bool is_running_statistic(const std::string& name) {
  return name.ends_with("running_mean") || name.ends_with("running_var") ||
         name.ends_with("num_batches_tracked");
}

template <class T>
std::vector<double> as_doubles(const TensorEntry& entry) {
  std::vector<T> values(entry.bytes.size() / sizeof(T));
  std::memcpy(values.data(), entry.bytes.data(), entry.bytes.size());
  return {values.begin(), values.end()};
}

Weights read_parameters(const std::string& path) {
  Weights weights;
  const SafetensorsFile file = load_safetensors(path);
  for (const TensorEntry& entry : file.tensors()) {
    if (is_running_statistic(entry.name)) continue;
    require(entry.dtype == DType::F32 || entry.dtype == DType::F64,
            "{}: tensor {} has dtype {}, expected F32 or F64; compare files that --save wrote",
            path, entry.name, dtype_name(entry.dtype));
    weights[entry.name] = {entry.shape, entry.dtype == DType::F64 ? as_doubles<double>(entry)
                                                                  : as_doubles<float>(entry)};
  }
  return weights;
}

/// Refuses a pair of files that do not hold the same parameters.
void require_same_parameters(const Weights& weights, const std::string& path,
                             const Weights& reference, const std::string& reference_path) {
  constexpr const char* kAdvice = "compare weights of the same --model, --width and --data";
  for (const auto& [name, tensor] : weights) {
    const auto other = reference.find(name);
    require(other != reference.end(), "{}: tensor {} is not in {}; {}", path, name, reference_path,
            kAdvice);
    require(tensor.shape == other->second.shape,
            "{}: tensor {} has shape [{}], expected [{}] as "
            "in {}; {}",
            path, name, fmt::join(tensor.shape, ", "), fmt::join(other->second.shape, ", "),
            reference_path, kAdvice);
  }
  for (const auto& [name, tensor] : reference) {
    require(weights.contains(name), "{}: tensor {} is missing, which {} has; {}", path, name,
            reference_path, kAdvice);
  }
}

/// |a - b| / |b - origin|; without an origin |a - b| / |b|.
double relative_distance(const Weights& a, const Weights& b, const Weights* origin) {
  double apart = 0, length = 0;
  for (const auto& [name, tensor] : b) {
    const std::vector<double>& values = a.at(name).values;
    const double* start = origin == nullptr ? nullptr : origin->at(name).values.data();
    for (size_t i = 0; i < values.size(); ++i) {
      apart += std::pow(values[i] - tensor.values[i], 2);
      length += std::pow(tensor.values[i] - (start == nullptr ? 0 : start[i]), 2);
    }
  }
  return std::sqrt(apart / length);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

/// Samples of a usual step. The batch, unless the whole epoch is one smaller batch.
double samples_per_step(const nlohmann::json& metrics) {
  const auto steps = metrics.at("steps").get<int64_t>(),
             epochs = metrics.at("epochs").get<int64_t>();
  if (steps > epochs) return metrics.at("batch_size").get<double>();
  double seconds = 0;
  for (const double epoch : metrics.at("epoch_seconds")) seconds += epoch;
  return metrics.at("samples_per_second").get<double>() * seconds / double(steps);
}

}  // namespace

double weights_distance(const std::string& path, const std::string& reference) {
  const Weights own = read_parameters(path), other = read_parameters(reference);
  require_same_parameters(own, path, other, reference);
  return relative_distance(own, other, nullptr);
}

double change_distance(const std::string& path, const std::string& reference,
                       const std::string& initial) {
  const Weights own = read_parameters(path), other = read_parameters(reference);
  const Weights origin = read_parameters(initial);
  require_same_parameters(own, path, other, reference);
  require_same_parameters(origin, initial, other, reference);
  return relative_distance(own, other, &origin);
}

WarmSpeed warm_speed(const nlohmann::json& metrics, const std::string& what) try {
  auto seconds = metrics.at("step_seconds").get<std::vector<double>>();
  require(seconds.size() >= 2,
          "{}: step_seconds has {} entries, expected at least 2 to leave the first one out; train "
          "more steps",
          what, seconds.size());
  const auto cold = static_cast<std::ptrdiff_t>((seconds.size() + 9) / 10);
  seconds.erase(seconds.begin(), seconds.begin() + cold);
  const double step = median(std::move(seconds));
  const WarmSpeed speed{step, samples_per_step(metrics) / step};
  require(step > 0 && std::isfinite(speed.samples_per_second) && speed.samples_per_second > 0,
          "{}: a step took {} s, which gives {} samples/s, expected positive numbers; run it again",
          what, step, speed.samples_per_second);
  return speed;
} catch (const nlohmann::json::exception& error) {
  fail<BadInput>("{}: {}; expected what --metrics of a stage writes", what, error.what());
}

SpeedUp speed_up(const WarmSpeed& own, const WarmSpeed& reference, size_t devices) {
  const double factor = reference.step_seconds / own.step_seconds;
  return {.factor = factor, .efficiency = factor / double(devices)};
}

// --- The comparison ------------------------------------------------------------------------------

namespace {

/// A child failed; this process then fails, too, with the same status.
class ChildFailed : public Error {
 public:
  ChildFailed(const std::string& text, int status) : Error(text), status_(status) {}
  int exit_status() const override { return status_; }
  [[noreturn]] void throw_within(const std::string& place) const override {
    throw ChildFailed(place + ": " + what(), status_);
  }

 private:
  int status_;
};

/// How far this program's weights were from the reference's.
struct Proof {
  std::string measure;
  double value, limit;
  size_t devices;                                 // that this program ran on
  bool agrees() const { return value <= limit; }  // NaN does not
};

void print_row(const std::string& name, const std::string& value) {
  print_clean("  {:<19} {}\n", name, value);
}

nlohmann::json read_metrics(const std::string& path, const std::string& who) {
  try {
    const std::vector<std::byte> bytes = read_file(path);
    return parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (const std::exception& error) {
    fail<BadInput>(
        "--baseline: {} ended well, but not with the metrics that were expected: {}; "
        "something is wrong in it",
        who, error.what());
  }
}

/// How many devices the run of `who` used, by its metrics.
size_t device_count(const nlohmann::json& metrics, const std::string& who) {
  const bool listed = metrics.contains("devices") && metrics.at("devices").is_array();
  const size_t count = listed ? metrics.at("devices").size() : 0;
  require(count > 0,
          "--baseline: the metrics of {} list no devices, expected one per replica; "
          "something is wrong in it",
          who);
  return count;
}

/// Takes the last line off `text`, without its "error: ".
std::string take_last_line(std::string& text) {
  text.erase(text.find_last_not_of('\n') + 1);
  const size_t begin = text.rfind('\n') + 1;
  const std::string line = text.substr(begin);
  text.erase(begin);
  return line.starts_with("error: ") ? line.substr(7) : line;
}

/// What a proof trains: steps in which rounding errors do not grow.
Options proof_options(Options o) {
  o.lr = 0.01;
  o.momentum = o.weight_decay = o.warmup_epochs = o.scale_lr = 0;
  o.lr_step = 0;
  o.lr_gamma = Options().lr_gamma;  // it may not be given without steps
  if (is_adam(o.optimizer)) {
    o.lr = 1e-4;
    o.betas = Options().betas;
    o.eps = 1e-3;
    o.weight_decay = 0.01;  // all that tells AdamW from Adam
  }
  o.epochs = 1;
  o.max_steps = o.model == ModelKind::resnet18 ? 1 : 10;
  o.trace.clear();
  return o;
}

/// One of the two compared programs.
struct Program {
  std::string name;
  std::filesystem::path path;
  std::vector<std::string> own_arguments;
};

class Comparison {
 public:
  Comparison(const ProgramInfo& info, const CommandLine& line);
  int run();

 private:
  std::string file_of(const Program& program, const char* kind) const {
    return folder_ / (program.name + "." + kind);
  }
  void require_built(const Program& program) const;
  ChildResult start(const Program& program, const Options& options, ChildOutput output);
  void run_quietly(const Program& program, const Options& options);
  Proof prove();
  void require_agreement(const Proof& proof) const;
  nlohmann::json time_reference();
  int time_own();
  void conclude(const Proof& proof, const nlohmann::json& reference) const;

  const ProgramInfo& info_;
  const Options& options_;
  Program own_, reference_;
  Program in_parts_;      // the reference where parts of the batch count
  ChildRunner children_;  // before the folder: a held signal takes effect when the folder is gone
  TemporaryFolder folder_;
};

Comparison::Comparison(const ProgramInfo& info, const CommandLine& line)
    : info_(info),
      options_(line.options),
      own_{info.name, std::filesystem::read_symlink("/proc/self/exe"), line.own_arguments},
      reference_{
          info.baseline, own_.path.parent_path().parent_path() / info.baseline / info.baseline, {}},
      in_parts_{"reference", reference_.path.parent_path() / "reference", {}} {
  require_built(reference_);
  if (info.emulate && has_batch_norm(options_.model)) {
    info.emulate(1);  // throws if the options alone rule it out
    require_built(in_parts_);
  }
}

void Comparison::require_built(const Program& program) const {
  if (::access(program.path.c_str(), X_OK) == 0) return;
  fail<EnvironmentError>("--baseline: {} cannot be run: {}; {} is compared with it, so build it",
                         program.path.string(), std::strerror(errno), info_.name);
}

ChildResult Comparison::start(const Program& program, const Options& options, ChildOutput output) {
  std::vector<std::string> argv{program.path};
  for (const auto& words : {options.arguments(), program.own_arguments}) {
    argv.insert(argv.end(), words.begin(), words.end());
  }
  ChildResult result = children_.run(argv, output);
  if (result.signal == SIGPIPE) children_.end_by(SIGPIPE);  // our own output has no reader either
  if (result.signal != 0) {
    throw ChildFailed(
        fmt::format("--baseline: {} was killed by signal {} ({}), expected it to end well; no "
                    "speed-up is reported; run it without --baseline",
                    program.name, result.signal, ::strsignal(result.signal)),
        1);
  }
  return result;
}

void Comparison::run_quietly(const Program& program, const Options& options) {
  ChildResult result = start(program, options, ChildOutput::quiet);
  const std::string reason = result.ok() ? "" : take_last_line(result.errors);
  fmt::print(stderr, "{}", printable(result.errors));  // warnings
  if (!result.ok()) {
    throw ChildFailed(fmt::format("--baseline: {} ended with status {}: {}", program.name,
                                  result.status, reason.empty() ? "it gave no reason" : reason),
                      result.status);
  }
}

Proof Comparison::prove() {
  Options options = proof_options(options_);
  print_clean("Baseline: steps of {} and of {} to compare: {}\n", own_.name, reference_.name,
              options.max_steps);
  const std::string own = file_of(own_, "weights"), reference = file_of(reference_, "weights");
  options.save = own;
  options.metrics = file_of(own_, "proof-metrics");  // not where the timed run writes
  run_quietly(own_, options);
  const size_t devices = device_count(read_metrics(options.metrics, own_.name), own_.name);

  if (info_.emulate && has_batch_norm(options.model)) {
    options.emulate = BatchSplit::from(info_.emulate(devices));
  }
  const Program& other = options.emulate == BatchSplit() ? reference_ : in_parts_;
  options.save = reference;
  options.metrics.clear();
  run_quietly(other, options);
  if (options.model != ModelKind::resnet18) {
    return {"|w - w_ref| / |w_ref|", weights_distance(own, reference), 1e-5, devices};
  }
  const std::string initial = folder_ / "initial.weights";
  options.epochs = 0;
  options.save = initial;
  run_quietly(other, options);
  return {"|dw - dw_ref| / |dw_ref|", change_distance(own, reference, initial), 0.1, devices};
}

void Comparison::require_agreement(const Proof& proof) const {
  require(
      proof.agrees(),
      "--baseline: the weights of {} are not those of {}: {} = {:.3g}, expected at most {:g}; "
      "something is wrong in {}, so no speed-up is reported; compare the files that both --save "
      "after --max-steps 1",
      own_.name, reference_.name, proof.measure, proof.value, proof.limit, own_.name);
  print_row("proof", fmt::format("{} = {:.2g}, at most {:g}: they agree", proof.measure,
                                 proof.value, proof.limit));
}

nlohmann::json Comparison::time_reference() {
  Options options = options_;
  options.save.clear();
  options.trace.clear();
  options.metrics = file_of(reference_, "metrics");
  print_clean("Baseline: {} alone, to compare times with\n", reference_.name);
  run_quietly(reference_, options);
  nlohmann::json metrics = read_metrics(options.metrics, reference_.name);
  const WarmSpeed speed = warm_speed(metrics, "--baseline: metrics of " + reference_.name);
  print_row("samples/s", fmt::format("{:.0f}", speed.samples_per_second));
  for (const nlohmann::json& accuracy : metrics.value("accuracy", nlohmann::json::array())) {
    print_row("test accuracy", fmt::format("{:.2f} %", 100 * accuracy.get<double>()));
  }
  print_clean("\n");
  return metrics;
}

int Comparison::time_own() {
  Options options = options_;
  options.metrics = file_of(own_, "metrics");
  return start(own_, options, ChildOutput::inherited).status;
}

void Comparison::conclude(const Proof& proof, const nlohmann::json& reference_metrics) const {
  nlohmann::json metrics = read_metrics(file_of(own_, "metrics"), own_.name);
  const WarmSpeed own = warm_speed(metrics, "--baseline: metrics of " + own_.name);
  const WarmSpeed reference = warm_speed(reference_metrics, reference_.name);
  const SpeedUp gain = speed_up(own, reference, proof.devices);
  const auto speed = [](const WarmSpeed& run) {
    return fmt::format("{:.0f} samples/s, {:.3g} ms per step", run.samples_per_second,
                       1e3 * run.step_seconds);
  };
  print_clean("\nBaseline\n");
  print_row("proof",
            fmt::format("{} = {:.2g}, at most {:g}", proof.measure, proof.value, proof.limit));
  print_row(reference_.name, speed(reference));
  print_row(own_.name, fmt::format("{}, devices: {}", speed(own), proof.devices));
  print_row("speed-up", fmt::format("{:.2f}", gain.factor));
  print_row("efficiency", fmt::format("{:.1f} %", 100 * gain.efficiency));
  if (options_.metrics.empty()) return;
  metrics["speedup"] = gain.factor;
  metrics["efficiency"] = gain.efficiency;
  metrics["baseline"] = {{"stage", reference_.name},
                         {"proof", proof.measure},
                         {"proof_value", proof.value},
                         {"proof_limit", proof.limit},
                         {"agrees", proof.agrees()},
                         {"devices", proof.devices},
                         {"reference_samples_per_second", reference.samples_per_second},
                         {"samples_per_second", own.samples_per_second},
                         {"speedup", gain.factor},
                         {"efficiency", gain.efficiency}};
  write_json(options_.metrics, metrics);
}

int Comparison::run() {
  const Proof proof = prove();
  require_agreement(proof);
  const nlohmann::json reference = time_reference();
  const int status = time_own();
  if (status == 0) conclude(proof, reference);
  return status;
}

}  // namespace

int run_with_baseline(const ProgramInfo& info, const CommandLine& line) try {
  return Comparison(info, line).run();
} catch (...) {
  throw;  // an exception that nobody catches would unwind nothing and leave the files
}

}  // namespace lockstep
