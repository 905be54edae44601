#include "common/training/phase_timer.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/io/json.h"

namespace lockstep {

void PhaseTimer::start() {
  running_ = true;
  marks_.push_back({nullptr, stream_.record_time()});
}

void PhaseTimer::end(const char* name) {
  if (!running_) return;
  marks_.push_back({name, stream_.record_time()});
  while (marks_.size() > 1 && marks_[1].event.done()) take_first();
}

void PhaseTimer::settle() {
  while (marks_.size() > 1) take_first();
}

/// Adds the time between the first two marks to their phase's total. Waits for the second mark.
void PhaseTimer::take_first() {
  const Mark from = std::move(marks_.front());
  marks_.pop_front();
  const Mark& to = marks_.front();
  if (to.phase == nullptr) return;  // between two series
  const double seconds = to.event.seconds_since(from.event);
  const auto known = std::find_if(totals_.begin(), totals_.end(),
                                  [&](const auto& total) { return total.first == to.phase; });
  if (known == totals_.end()) {
    totals_.emplace_back(to.phase, seconds);
  } else {
    known->second += seconds;
  }
}

const std::vector<std::pair<std::string, double>>& PhaseTimer::totals() {
  settle();
  return totals_;
}

double PhaseTimer::total(std::string_view name) {
  for (const auto& [phase, seconds] : totals()) {
    if (phase == name) return seconds;
  }
  return 0;
}

void PhaseTimer::restart() {
  settle();
  totals_.clear();
}

std::string PhaseTimer::milliseconds_text(int64_t steps) {
  std::string text;
  for (const auto& [phase, seconds] : totals()) {
    text +=
        fmt::format("{}{} {:.2f}", text.empty() ? "" : ", ", phase, 1e3 * seconds / double(steps));
  }
  return text;
}

nlohmann::json PhaseTimer::seconds_json(int64_t steps) {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [phase, seconds] : totals()) json[phase] = seconds / double(steps);
  return json;
}

}  // namespace lockstep
