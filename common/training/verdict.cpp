#include "common/training/verdict.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/file.h"
#include "common/io/json.h"
#include "common/system/child_process.h"
#include "common/training/verdict_figures.h"

namespace lockstep {
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

/// How far this stage's weights were from the reference's.
struct Proof {
  std::string measure;
  double value, limit;
  size_t devices;                                 // that this stage ran on
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
  if (o.optimizer != OptimizerKind::sgd) {
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
  std::vector<std::string> stage_arguments;
};

class Comparison {
 public:
  Comparison(const StageInfo& stage, const CommandLine& line);
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

  const StageInfo& stage_;
  const Options& options_;
  Program own_, reference_;
  Program in_parts_;      // the reference where parts of the batch count
  ChildRunner children_;  // before the folder: a held signal takes effect when the folder is gone
  TemporaryFolder folder_;
};

Comparison::Comparison(const StageInfo& stage, const CommandLine& line)
    : stage_(stage),
      options_(line.options),
      own_{stage.name, std::filesystem::read_symlink("/proc/self/exe"), line.stage_arguments},
      reference_{stage.baseline,
                 own_.path.parent_path().parent_path() / stage.baseline / stage.baseline,
                 {}},
      in_parts_{"reference", reference_.path.parent_path() / "reference", {}} {
  require_built(reference_);
  if (stage.emulate && has_batch_norm(options_.model)) {
    stage.emulate(1);  // throws if the options alone rule it out
    require_built(in_parts_);
  }
}

void Comparison::require_built(const Program& program) const {
  if (::access(program.path.c_str(), X_OK) == 0) return;
  fail<EnvironmentError>("--baseline: {} cannot be run: {}; {} is compared with it, so build it",
                         program.path.string(), std::strerror(errno), stage_.name);
}

ChildResult Comparison::start(const Program& program, const Options& options, ChildOutput output) {
  std::vector<std::string> argv{program.path};
  for (const auto& words : {options.arguments(), program.stage_arguments}) {
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

  if (stage_.emulate && has_batch_norm(options.model)) {
    options.emulate = BatchSplit::from(stage_.emulate(devices));
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

int run_with_baseline(const StageInfo& stage, const CommandLine& line) try {
  return Comparison(stage, line).run();
} catch (...) {
  throw;  // an exception that nobody catches would unwind nothing and leave the files
}

}  // namespace lockstep
