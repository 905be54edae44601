#include <algorithm>

#include "03-model-split/pipeline/pipeline.h"
#include "common/io/json.h"
#include "common/training/counted.h"

namespace lockstep {

std::vector<HealthTensor> Pipeline::healths() const {
  std::vector<HealthTensor> all;
  for (const Stage& stage : stages_) all.push_back(stage.optimizer.health());
  return all;
}

std::vector<int> Pipeline::live() const {
  std::vector<int> all;
  for (const Worker& worker : workers_) all.push_back(worker.most_live);
  return all;
}

double Pipeline::flops() const {
  double all = 0;
  for (const Stage& stage : stages_) {
    for (const Flight& micro_batch : stage.flights) all += micro_batch.context.flops();
  }
  return all;
}

int64_t Pipeline::bytes_moved() const {
  int64_t bytes = 0;
  for (const auto* channels : {&activations_, &gradients_, &losses_}) {
    for (const Channel& channel : *channels) bytes += channel.bytes_sent();
  }
  return bytes;
}

double Pipeline::measured_bubble() {
  double waited = 0, all = 0;
  for (Worker& worker : workers_) {
    for (const auto& [phase, seconds] : worker.phases.totals()) {
      all += seconds;
      if (phase == "wait") waited += seconds;
    }
  }
  return all == 0 ? 0 : waited / all;
}

void Pipeline::restart_clocks() {
  for (Worker& worker : workers_) worker.phases.restart();
}

void Pipeline::report(TrainingLog& log) {
  const int64_t steps = std::max<int64_t>(1, log.steps());
  const int devices = int(workers_.size()), chunks = int(network_->chunks());
  const double predicted = predicted_bubble(devices, options_.micro_batches, chunks);
  nlohmann::json all = nlohmann::json::array();
  for (int d = 0; d < devices; ++d) {
    Worker& worker = workers_[d];
    const std::vector<size_t> stages = network_->stages_on(size_t(d));
    const int expected =
        predicted_live(options_.schedule, devices, options_.micro_batches, d, chunks);
    size_t bytes = 0;
    for (const size_t s : stages) bytes += stages_[s].network.parameters->values().bytes();
    all.push_back({{"layers", network_->layers_text(stages)},
                   {"phase_seconds", worker.phases.seconds_json(steps)},
                   {"live", worker.most_live},
                   {"predicted_live", expected},
                   {"parameter_bytes", bytes}});
    log.note(network_->numbers_text(stages), network_->layers_text(stages), "stages", all);
    log.note("  ms per step", worker.phases.milliseconds_text(steps));
    log.note("  live", fmt::format("{} micro-batch{}{} (at most {})", worker.most_live,
                                   worker.most_live == 1 ? "" : "es",
                                   chunks == 1 ? "" : ", counted per stage", expected));
  }
  log.note("bubble",
           fmt::format("{:.1f} % of the time, {} = {:.1f} %", 100 * measured_bubble(),
                       bubble_formula(chunks), 100 * predicted),
           "bubble", {{"measured", measured_bubble()}, {"predicted", predicted}});
  const double moved = double(bytes_moved()) / double(steps);
  const double expected = double(bytes_predicted()) / double(steps);
  const char* const where = "the copies that are enqueued";
  log.note("moved per step",
           fmt::format("{:.1f} KiB, counted in {}; by sizes {:.1f} ({})", moved / 1024, where,
                       expected / 1024, beside_formula(moved, expected)),
           "bytes_moved",
           {{"per_step", moved}, {"predicted_per_step", expected}, {"counted_in", where}});
}

}  // namespace lockstep
