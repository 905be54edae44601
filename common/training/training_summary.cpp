// What a training run says about itself at its end: the summary, and --metrics.

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "common/core/text.h"
#include "common/io/json.h"
#include "common/system/process.h"
#include "common/training/training_log.h"

namespace lockstep {
namespace {

double mebibytes(int64_t bytes) { return double(bytes) / 1048576.0; }

}  // namespace

double TrainingLog::samples_per_second() const {
  const double seconds = std::accumulate(epoch_seconds_.begin(), epoch_seconds_.end(), 0.0);
  return seconds > 0 ? double(samples_trained_) / seconds : 0;
}

/// Peak bytes while training; of the whole run where nothing was trained.
int64_t TrainingLog::training_peak(size_t device) const {
  return epoch_seconds_.empty() ? devices_[device]->memory().peak() : training_peaks_[device];
}

/// Seconds, per step, that each rank came to the collectives behind the first. They end on all
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
  nlohmann::json names = nlohmann::json::array(), memory = names, without_core = names;
  for (const DeviceRecord& device : records_) {
    names.push_back(device.name);
    memory.push_back(device.peak_bytes);
    without_core.push_back(device.share_without_core);
  }
  nlohmann::json accuracy = nlohmann::json::array(), test_loss = nlohmann::json::array();
  for (const Evaluation& e : evaluations_) {
    accuracy.push_back(e.accuracy());
    test_loss.push_back(e.loss);
  }
  nlohmann::json all = {{"stage", stage_},
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
                        {"share_without_core", without_core},
                        {"noticed_without_core", kNoticedWithoutCore},
                        {"peak_rss_bytes", rss_bytes_}};
  if (peers_.in_collectives) all["lateness_seconds"] = lateness();
  all.update(*noted_);
  return all;
}

void TrainingLog::print_summary() const {
  const auto row = [](const char* name, const std::string& value) {
    print_clean("  {:<20}{}\n", name, value);
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
    row("first step after", fmt::format("{:.2f} s", startup_seconds_));
  }
  if (!evaluations_.empty()) {
    row("test accuracy", fmt::format("{:.2f} %", 100 * accuracy()));
  }
  for (const DeviceRecord& device : records_) {
    row(("peak memory " + device.name).c_str(),
        fmt::format("{:.1f} MiB", mebibytes(device.peak_bytes)));
  }
  for (const auto& [name, text] : notes_) row(name.c_str(), text);
  row("process", fmt::format("{:.1f} MiB", mebibytes(rss_bytes_)));
  const std::string missing = text_of_missing_cores(names, without_core);
  if (!missing.empty()) print_clean("{}\n", missing);
}

}  // namespace lockstep
