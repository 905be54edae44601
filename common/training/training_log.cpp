#include "common/training/training_log.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/json.h"
#include "common/kernels/devices.h"
#include "common/options/output_paths.h"
#include "common/system/process.h"
#include "common/training/trace.h"

namespace lockstep {
namespace {

nlohmann::json names_of(const std::vector<Device*>& devices) {
  nlohmann::json names = nlohmann::json::array();
  for (const Device* device : devices) names.push_back(device->name());
  return names;
}

/// A text of each kind of simulated ranks.
std::vector<std::string> exchange_kinds(ProcessGroup& group, const std::string& mine) {
  const SimulatedRanks& ranks = *group.simulated();
  const std::vector<std::string> all = group.exchange(mine);
  std::vector<std::string> texts;
  for (int kind = 0; kind < ranks.kinds; ++kind) {
    texts.push_back(all.at(size_t(ranks.first_of(kind))));
  }
  return texts;
}

}  // namespace

ProgressBar::ProgressBar(int64_t samples, bool wanted)
    : samples_(samples), terminal_(wanted && isatty(STDOUT_FILENO) == 1) {}

void ProgressBar::show(int64_t samples_done, double seconds) {
  const double share = double(samples_done) / double(samples_);
  const int percent = static_cast<int>(100 * share);
  if (!terminal_ || percent == shown_percent_) return;
  shown_percent_ = percent;
  constexpr int kWidth = 40;
  const int filled = static_cast<int>(share * kWidth);
  fmt::print("\r[{:=<{}}{: <{}}] {:3}% {:.0f} samples/s ", "", filled, "", kWidth - filled, percent,
             double(samples_done) / seconds);
  std::fflush(stdout);
}

void ProgressBar::clear() {
  if (terminal_) fmt::print("\r{: <72}\r", "");
  shown_percent_ = -1;
}

LogPeers LogPeers::of(ProcessGroup& group, const HealthTensor& own_health) {
  const auto together = [&group](const auto& work) { group.together(work); };
  if (group.simulated()) {
    return {.rank = group.rank(),
            .exchange = [&group](const auto& mine) { return exchange_kinds(group, mine); },
            .own_health = own_health,
            .together = together,
            .alike = group.simulated()->alike(),
            .place = group.place()};
  }
  return {.rank = group.rank(),
          .exchange = group.exchanger(),
          .own_health = own_health,
          .together = together,
          .in_collectives = [&group] { return group.flight().seconds_in_collectives(); },
          .place = group.place()};
}

TrainingLog::TrainingLog(std::string program, const Options& options, Stream stream,
                         std::vector<Device*> devices, int64_t samples, LogPeers peers)
    : program_(std::move(program)),
      options_(options),
      devices_(std::move(devices)),
      peers_(std::move(peers)),
      cores_(devices_),
      training_peaks_(devices_.size(), 0),
      workspaces_(devices_.size(), 0),
      samples_(samples),
      progress_(samples, peers_.rank == 0),
      reports_(stream),
      noted_(std::make_unique<nlohmann::json>(nlohmann::json::object())) {}

TrainingLog::~TrainingLog() = default;

/// Every rank's `mine`, by rank.
std::vector<nlohmann::json> TrainingLog::exchange(const nlohmann::json& mine) const {
  if (!peers_.exchange) return {mine};
  std::vector<nlohmann::json> all;
  for (const std::string& text : peers_.exchange(mine.dump())) {
    all.push_back(parse_json(text));
  }
  return all;
}

/// For work of all ranks that may fail.
void TrainingLog::together(const std::function<void()>& work) const {
  peers_.together ? peers_.together(work) : work();
}

void TrainingLog::start(const Dataset& train, const Dataset& test, int64_t parameters,
                        const std::string& line) {
  std::vector<std::string> names;
  for (const nlohmann::json& rank : exchange(names_of(devices_))) {
    for (const nlohmann::json& name : rank) names.push_back(name);
  }
  if (!prints()) return;
  print_clean("{}: {} on {}{}, {}", program_, name_of(options_.model),
              peers_.alike > 1 ? fmt::format("{} x ", peers_.alike) : "", fmt::join(names, ","),
              devices_.front()->description());
  const std::string reason = simulated() ? "" : why_no_gpu();
  print_clean("{}\n", reason.empty() ? "" : fmt::format(" (no GPU: {})", reason));
  print_clean("{}: {} training and {} test images of {}x{}x{}; {} parameters\n\n", train.name,
              train.count(), test.count(), train.height, train.width, train.channels, parameters);
  if (!line.empty()) say(line);
  if (simulated()) say("simulated: times, bytes and memory; no losses, no evaluation");
  if (options_.lr_step > 0 && options_.warmup_epochs >= double(options_.lr_step)) {
    warn(fmt::format(
        "--warmup-epochs {:g} ends where --lr-step {} has lowered the rate already: it climbs "
        "to the learning rate and drops there at once, to {:g} of it; give a longer --lr-step",
        options_.warmup_epochs, options_.lr_step,
        std::pow(options_.lr_gamma,
                 std::floor(options_.warmup_epochs / double(options_.lr_step)))));
  }
}

void TrainingLog::say(const std::string& line) const {
  if (prints()) print_clean("{}\n\n", line);
}

void TrainingLog::resume(int64_t steps, int64_t epochs) {
  steps_ = earlier_steps_ = steps;
  if (finished()) {
    say(fmt::format("Nothing is left to train: --max-steps is {}", options_.max_steps));
  } else if (epochs > 0 && epochs >= options_.epochs) {
    say(fmt::format("Nothing is left to train: --epochs is {}", options_.epochs));
  }
}

void TrainingLog::begin_epoch(int64_t epoch, int64_t first_batch) {
  epoch_ = epoch;
  if (epoch_seconds_.empty() && !simulated()) startup_seconds_ = seconds_since_start();
  samples_seen_ = first_batch * options_.batch_size;
  for (Device* device : devices_) device->memory().reset_peak();  // the peak before training
  cores_.start();
  epoch_begin_ns_ = devices_.front()->now_ns();
  waited_begin_ = in_collectives();
  reports_.begin_epoch();
}

void TrainingLog::step(const HostBatch& batch, const Tensor& loss,
                       const std::vector<HealthTensor>& healths) {
  devices_.front()->made_batch(batch.size);
  reports_.push(steps_, loss, healths);
  lines_.push_back({samples_seen_, batch.index % options_.log_interval == 0});
  ++steps_;
  samples_seen_ += batch.global_size;
  samples_trained_ += batch.global_size;
  receive(1);
}

void TrainingLog::receive(size_t keep) {
  while (const std::optional<StepReport> report = reports_.take(keep)) {
    step_seconds_.push_back(report->seconds);
    const Line line = lines_.front();
    lines_.pop_front();
    if (report->failed_step >= 0) {
      progress_.clear();
      const std::string who = who_failed();
      together([&] {
        fail<NonFinite>(
            "step {}, {}: the loss ({}) or a gradient is not finite; the weights stayed as they "
            "were before that step and nothing was saved since; lower --lr ({}) or look at the "
            "data, and at --load and --scale-lr where they are given",
            report->failed_step, who, report->loss, options_.lr);
      });
    }
    if (!simulated()) losses_.push_back(report->loss);
    health_ = report->health;
    if (health_.skipped_step == report->step) skipped_steps_.push_back(report->step);
    if (line.print && prints()) {
      progress_.clear();
      print_clean("Train Epoch: {} [{}/{} ({:.0f}%)]\t{}\n", epoch_ + 1, line.samples_before,
                  samples_, 100.0 * double(line.samples_before) / double(samples_),
                  simulated() ? "simulated: no loss" : fmt::format("Loss: {:.6f}", report->loss));
    }
    progress_.show(line.samples_before, seconds_of_epoch());
  }
}

/// "rank 1 (cpu:1)", in a mesh "rank 1 (cpu:1, data 0, tensor 1)".
std::string TrainingLog::name() const {
  return fmt::format("rank {} ({}{}{})", peers_.rank, devices_.front()->name(),
                     peers_.place.empty() ? "" : ", ", peers_.place);
}

/// The ranks whose own numbers were not finite. All ranks call it: a sum is the same on all.
std::string TrainingLog::who_failed() const {
  const std::string me = name();
  if (!peers_.exchange || !peers_.own_health.defined()) return me;
  const bool failed = peers_.own_health.to_host()[0].failed_step >= 0;
  std::vector<std::string> found;
  const std::vector<nlohmann::json> all = exchange({{"name", me}, {"failed", failed}});
  if (all.size() == 1) return me;  // no other rank's numbers are in its sums
  for (const nlohmann::json& rank : all) {
    if (rank.at("failed")) found.push_back(rank.at("name"));
  }
  return found.empty() ? "the sum over all ranks" : listed(found);
}

double TrainingLog::seconds_of_epoch() const {
  return double(devices_.front()->now_ns() - epoch_begin_ns_) * 1e-9;
}

void TrainingLog::end_epoch() {
  receive(0);
  epoch_seconds_.push_back(seconds_of_epoch());
  waited_here_ += in_collectives() - waited_begin_;
  cores_.stop();
  for (size_t i = 0; i < devices_.size(); ++i) {
    training_peaks_[i] = std::max(training_peaks_[i], devices_[i]->memory().peak());
    workspaces_[i] = devices_[i]->workspaces().current();
  }
  progress_.clear();
  std::fflush(stdout);
}

void TrainingLog::evaluated(const Evaluation& e) {
  if (simulated()) return;       // said in start()
  if (!std::isfinite(e.loss)) {  // the last update, or a loaded file, spoilt the weights
    together([&] {
      fail<NonFinite>(
          "after {} steps, {}: the test loss ({}) is not finite; no final weights were saved; "
          "lower "
          "--lr ({}) or look at --load",
          steps_, name(), e.loss, options_.lr);
    });
  }
  evaluations_.push_back(e);
  if (!prints()) return;
  print_clean("\nTest set: Average loss: {:.4f}, Accuracy: {}/{} ({:.2f}%)\n\n", e.loss, e.correct,
              e.samples, 100 * e.accuracy());
}

void TrainingLog::note(std::string row, std::string text) {
  notes_.emplace_back(std::move(row), std::move(text));
}

void TrainingLog::note(std::string row, std::string text, const std::string& key,
                       const nlohmann::json& value) {
  note(std::move(row), std::move(text));
  (*noted_)[key] = value;
}

void TrainingLog::note_copies(int64_t moved, int64_t by_sizes) {
  const double steps = double(std::max<int64_t>(1, steps_));
  const double counted = double(moved) / steps, formula = double(by_sizes) / steps;
  const char* const where = "the copies that are enqueued";
  note("moved per step",
       fmt::format("{:.1f} KiB, counted in {}; by sizes {:.1f} ({})", counted / 1024, where,
                   formula / 1024, beside_formula(counted, formula)),
       "bytes_moved",
       {{"per_step", counted}, {"predicted_per_step", formula}, {"counted_in", where}});
}

void TrainingLog::note_sent(const SentPerStep& sent) {
  note("bytes per step", sent.text(), "bytes_per_step",
       {{"sent", sent.bytes}, {"predicted", sent.predicted}, {"counted_in", sent.counted_in}});
}

std::string SentPerStep::text() const {
  return fmt::format("{:.0f} of {} sent by rank 0, counted in {}; {} {:.0f} ({})", bytes, what,
                     counted_in, formula, predicted, beside_formula(bytes, predicted));
}

std::string beside_formula(double counted, double formula) {
  if (formula == 0) return counted == 0 ? "+0.0 %" : "from nothing";
  return fmt::format("{:+.1f} %", 100 * (counted - formula) / formula);
}

void TrainingLog::finish(double flops) {
  note_precision();
  collect_records(flops);
  together([&] { write_files(); });
  if (prints()) print_summary();
}

/// Collects the records of all ranks, on all ranks.
void TrainingLog::collect_records(double flops) {
  nlohmann::json peaks = nlohmann::json::array();
  for (size_t i = 0; i < devices_.size(); ++i) peaks.push_back(training_peak(i));
  const nlohmann::json mine = {{"names", names_of(devices_)},
                               {"peaks", peaks},
                               {"workspaces", workspaces_},
                               {"without_core", cores_.shares_without_core()},
                               {"flops", flops},
                               {"waited", waited_here_},
                               {"rss", peak_rss_bytes()}};
  for (const nlohmann::json& rank : exchange(mine)) {
    for (size_t i = 0; i < rank.at("names").size(); ++i) {
      records_.push_back({rank.at("names").at(i), rank.at("peaks").at(i),
                          rank.at("workspaces").at(i), rank.at("without_core").at(i)});
    }
    flops_ += peers_.alike * rank.at("flops").get<double>();
    waited_.push_back(rank.at("waited"));
    rss_bytes_ = std::max(rss_bytes_, rank.at("rss").get<int64_t>());
  }
}

void TrainingLog::write_files() const {
  if (!options_.trace.empty()) {
    write_trace(path_of_rank(options_.trace, peers_.rank), devices_,
                size_t(peers_.rank) * devices_.size());
  }
  if (prints() && !options_.metrics.empty()) write_json(options_.metrics, metrics());
}

// --- The summary, and --metrics ------------------------------------------------------------------

double TrainingLog::samples_per_second() const {
  const double seconds = std::accumulate(epoch_seconds_.begin(), epoch_seconds_.end(), 0.0);
  return seconds > 0 ? double(samples_trained_) / seconds : 0;
}

/// Peak bytes while training; of the whole run where nothing was trained.
int64_t TrainingLog::training_peak(size_t device) const {
  return epoch_seconds_.empty() ? devices_[device]->memory().peak() : training_peaks_[device];
}

/// Seconds, per step, that each rank came to the collectives after the first. They end on all
/// ranks at about the same time, so whoever came later was in them for less. No clock is compared.
std::vector<double> TrainingLog::lateness() const {
  const double longest = *std::ranges::max_element(waited_);
  std::vector<double> late;
  for (const double waited : waited_) {
    late.push_back((longest - waited) / double(std::max<int64_t>(own_steps(), 1)));
  }
  return late;
}

nlohmann::json TrainingLog::metrics() const {
  nlohmann::json names = nlohmann::json::array(), memory = names, workspaces = names,
                 without_core = names;
  for (const DeviceRecord& device : records_) {
    names.push_back(device.name);
    memory.push_back(device.peak_bytes);
    workspaces.push_back(device.workspace_bytes);
    without_core.push_back(device.share_without_core);
  }
  nlohmann::json accuracy = nlohmann::json::array(), test_loss = nlohmann::json::array();
  for (const Evaluation& e : evaluations_) {
    accuracy.push_back(e.accuracy());
    test_loss.push_back(e.loss);
  }
  nlohmann::json all = {{"stage", program_},
                        {"config", options_.to_json()},
                        {"devices", names},
                        {"backend", devices_.front()->description()},
                        {"batch_size", options_.batch_size},
                        {"epochs", epoch_seconds_.size()},
                        {"steps", steps_},
                        {"losses", losses_},
                        {"accuracy", accuracy},
                        {"test_loss", test_loss},
                        {"epoch_seconds", epoch_seconds_},
                        {"step_seconds", step_seconds_},
                        {"samples_per_second", samples_per_second()},
                        {"startup_seconds", startup_seconds_},
                        {"training_flops", flops_},
                        {"peak_memory_bytes", memory},
                        {"workspace_bytes", workspaces},
                        {"share_without_core", without_core},
                        {"noticed_without_core", kNoticedWithoutCore},
                        {"peak_rss_bytes", rss_bytes_}};
  if (peers_.in_collectives) all["lateness_seconds"] = lateness();
  if (simulated()) all["simulated_ranks"] = peers_.alike * std::ssize(records_);
  all.update(*noted_);
  return all;
}

/// "bf16, no faster on a CPU, ...", and of fp16 the scale.
void TrainingLog::note_precision() {
  if (options_.precision == Precision::real) return;
  const bool cpu = devices_.front()->id().kind == DeviceId::Kind::cpu;
  note("precision",
       fmt::format("{}{}", name_of(options_.precision),
                   cpu ? ", no faster on a CPU, which computes in float32 and rounds" : ""));
  if (options_.precision == Precision::bf16) return;
  note("loss scale",
       fmt::format("{:g} after {} good steps; {} skipped", health_.scale, health_.good_steps,
                   health_.skipped),
       "loss_scale",
       {{"scale", health_.scale},
        {"good_steps", health_.good_steps},
        {"skipped_steps", skipped_steps_}});
}

void TrainingLog::print_summary() const {
  const auto row = [](const char* name, const std::string& value) {
    print_clean("  {:<19} {}\n", name, value);
  };
  print_clean("Summary\n");
  std::vector<std::string> names;
  std::vector<double> without_core;
  for (const DeviceRecord& device : records_) {
    names.push_back(device.name);
    without_core.push_back(device.share_without_core);
  }
  row("devices", fmt::format("{}", fmt::join(names, ",")));
  row("backend", devices_.front()->description());
  row("global batch", fmt::format("{}", options_.batch_size));
  if (!epoch_seconds_.empty()) {
    row("epoch time",
        fmt::format("{:.2f} s (last of {})", epoch_seconds_.back(), epoch_seconds_.size()));
    row("samples/s", fmt::format("{:.0f}", samples_per_second()));
    if (!simulated()) row("first step after", fmt::format("{:.2f} s", startup_seconds_));
  }
  if (!evaluations_.empty()) {
    row("test accuracy", fmt::format("{:.2f} %", 100 * accuracy()));
  }
  const int64_t there_is = devices_.front()->simulated_memory();
  for (const DeviceRecord& device : records_) {
    const bool fits = there_is == 0 || device.peak_bytes <= there_is;
    row(("peak memory " + device.name).c_str(),
        fmt::format(
            "{:.1f} MiB{}", mebibytes(device.peak_bytes),
            fits ? "" : fmt::format(", which does not fit into {:.1f} MiB", mebibytes(there_is))));
  }
  for (const auto& [name, text] : notes_) row(name.c_str(), text);
  if (!simulated()) row("process", fmt::format("{:.1f} MiB", mebibytes(rss_bytes_)));
  const std::string missing = text_of_missing_cores(names, without_core);
  if (!missing.empty()) print_clean("{}\n", missing);
}

}  // namespace lockstep
