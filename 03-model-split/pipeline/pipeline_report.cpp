#include <algorithm>

#include "03-model-split/pipeline/pipeline.h"
#include "common/io/json.h"

namespace lockstep {

void Pipeline::report(TrainingLog& log) {
  const int64_t steps = std::max<int64_t>(1, log.steps());
  const int stages = static_cast<int>(workers_.size());
  const double predicted = predicted_bubble(stages, options_.micro_batches);
  nlohmann::json all = nlohmann::json::array();
  for (int s = 0; s < stages; ++s) {
    Worker& worker = workers_[s];
    const int expected = predicted_live(options_.schedule, stages, options_.micro_batches, s);
    all.push_back({{"layers", network_->layers_text(s)},
                   {"phase_seconds", worker.phases.seconds_json(steps)},
                   {"live", worker.most_live},
                   {"predicted_live", expected},
                   {"parameter_bytes", worker.stage.parameters->values().bytes()}});
    log.note(fmt::format("stage {}", s), network_->layers_text(s), "stages", all);
    log.note("  ms per step", worker.phases.milliseconds_text(steps));
    log.note("  live", fmt::format("{} micro-batch{} (at most {})", worker.most_live,
                                   worker.most_live == 1 ? "" : "es", expected));
  }
  log.note("bubble",
           fmt::format("{:.1f} % of the time, (p-1)/(m+p-1) = {:.1f} %", 100 * measured_bubble(),
                       100 * predicted),
           "bubble", {{"measured", measured_bubble()}, {"predicted", predicted}});
}

}  // namespace lockstep
