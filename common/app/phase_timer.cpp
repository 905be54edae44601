#include "common/app/phase_timer.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/io/json.h"

namespace lockstep {

void PhaseTimer::start() {
  running_ = true;
  marks_.push_back({nullptr, stream_.record()});
}

void PhaseTimer::end(const char* name) {
  if (!running_) return;
  marks_.push_back({name, stream_.record()});
  take(most_marks_);
}

void PhaseTimer::take(size_t keep) {
  while (marks_.size() > std::max<size_t>(1, keep)) {
    const Mark from = marks_.front();
    marks_.pop_front();
    const Mark& to = marks_.front();
    // Where a stream records very many events at once, some times are lost: better than the run.
    if (to.phase == nullptr || !from.event.has_time()) continue;
    const auto known = std::find_if(totals_.begin(), totals_.end(),
                                    [&](const auto& total) { return total.first == to.phase; });
    const double seconds = to.event.seconds_since(from.event);
    if (known == totals_.end()) {
      totals_.emplace_back(to.phase, seconds);
    } else {
      known->second += seconds;
    }
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
