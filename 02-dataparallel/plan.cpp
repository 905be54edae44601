// Prints a step of nn.DataParallel as a plan, for `lockstep show`: its phases, and the bytes that
// device 0 hands out and takes in.

#include "common/training/plan.h"

#include <charconv>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/data/batch_parts.h"
#include "common/kernels/step_state.h"
#include "common/nn/models.h"

namespace lockstep {
namespace {

struct PlanOptions {
  std::string devices = "2";
  int64_t batch_size = 64;
  ModelKind model = ModelKind::seed;
};

/// Bytes of what is copied.
struct Sizes {
  int64_t image, scores, weights, gradients;  // one sample's; the whole network's
};

/// Counted from the shapes: nothing is allocated.
Sizes sizes_of(const ModelOptions& options) {
  const Model model = make_model(options);
  int64_t learnt = 0, running = 0;
  for (const Parameter* p : model.network->parameters()) {
    learnt += aligned(p->shape.elements());
  }
  for (const ModelBuffer* b : model.network->buffers()) {
    running += aligned(b->shape.elements());
  }
  const int64_t real = sizeof(Real);
  return {options.channels * options.height * options.width_pixels * real, options.classes * real,
          (learnt + running) * real + int64_t(sizeof(StepState)), learnt * real};
}

/// "3", or the list that the stage itself takes: "cpu:0,cpu:1,cpu:2".
int count_devices(const std::string& text) {
  constexpr int kMost = 64;  // lanes that one can still tell apart
  int count = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, count);
  if (error == std::errc::invalid_argument) {
    count = int(parse_devices(text).size());
  } else if (stopped != end || error != std::errc()) {
    count = 0;
  }
  require(count >= 1 && count <= kMost,
          "--devices: '{}', expected a number from 1 to {}, or a list such as cpu:0,cpu:1", text,
          kMost);
  return count;
}

/// What device 0 copies in a step, in KiB, by the formula of the lesson.
double predicted_copies(const Sizes& sizes, const std::vector<BatchPart>& parts) {
  int64_t bytes = 0;
  for (size_t r = 1; r < parts.size(); ++r) {
    bytes += sizes.weights + sizes.gradients + parts[r].count * (sizes.image + 2 * sizes.scores);
  }
  return double(bytes) / 1024;
}

/// Writes the phases of one step down, in the order in which the host enqueues them. A forward of
/// device 0's part takes four units, a backward eight, a copy one.
class StepWriter {
 public:
  StepWriter(Plan& plan, const std::vector<BatchPart>& parts)
      : plan_(plan), parts_(parts), last_(parts.size()) {}

  /// Device 0 copies something to or from each of the others: after what they did last, or, for
  /// what is the same for all, after nothing of theirs.
  void copies(char letter, const std::string& text,
              const std::function<int64_t(const BatchPart&)>& bytes) {
    for (size_t r = 1; r < parts_.size(); ++r) {
      const std::vector<size_t> after = last_[r] ? std::vector{*last_[r]} : std::vector<size_t>{};
      last_[r] = plan_.add({.lane = 0,
                            .name = fmt::format("{}{}", letter, r),
                            .kind = "messages",
                            .text = fmt::format(fmt::runtime(text), r),
                            .length = 1,
                            .after = after,
                            .takes = double(bytes(parts_[r])) / 1024});
    }
  }
  /// All devices do this at the same time, each on its part of the batch.
  void everywhere(const std::string& kind, double units) {
    for (size_t r = 0; r < parts_.size(); ++r) {
      const std::vector<size_t> after = last_[r] ? std::vector{*last_[r]} : std::vector<size_t>{};
      last_[r] = plan_.add({.lane = r,
                            .name = kind,
                            .kind = kind,
                            .text = fmt::format("{} of {} samples", kind, parts_[r].count),
                            .length = units * double(parts_[r].count) / double(parts_[0].count),
                            .after = after});
    }
  }
  void alone(const std::string& name, const std::string& text) {
    last_[0] = plan_.add({.lane = 0, .name = name, .kind = "other", .text = text, .length = 1});
  }

 private:
  Plan& plan_;
  const std::vector<BatchPart>& parts_;
  std::vector<std::optional<size_t>> last_;  // per device: what it must have before it goes on
};

void add_step(StepWriter step, const Sizes& sizes) {
  const auto scores = [&](const BatchPart& part) { return part.count * sizes.scores; };
  step.copies('S', "scatter: samples to device {}",
              [&](const BatchPart& part) { return part.count * sizes.image; });
  step.copies('R', "replicate: weights to device {}",
              [&](const BatchPart&) { return sizes.weights; });
  step.everywhere("forward", 4);
  step.copies('G', "gather: scores from device {}", scores);
  step.alone("loss", "the loss of all scores, and its gradient");
  step.copies('S', "scatter: gradients of the scores to device {}", scores);
  step.everywhere("backward", 8);
  step.copies('A', "reduce: gradients from device {}, added up",
              [&](const BatchPart&) { return sizes.gradients; });
  step.alone("update", "the optimizer's step, on device 0 alone");
}

Plan make_plan(const PlanOptions& options) {
  const Sizes sizes = sizes_of({.kind = options.model});
  const int devices = count_devices(options.devices);
  const std::vector<BatchPart> parts =
      BatchSplit{BatchSplit::Kind::chunk, devices}.divide(options.batch_size);
  std::vector<PlannedLane> lanes;
  for (int r = 0; r < devices; ++r) lanes.push_back({"device " + std::to_string(r), 0.0});
  lanes[0].predicted_most = predicted_copies(sizes, parts);
  Plan plan(fmt::format("nn.DataParallel: {} devices, batch of {}", devices, options.batch_size),
            "units", "KiB that this device has copied", lanes);
  plan.set_note(
      "S1: scatter to device 1, R1: replicate, G1: gather, A1: reduce (its gradients are added "
      "up). "
      "The formula: for each further device weights and gradients, and for each of its samples the "
      "image and twice the scores. A unit is a quarter of device 0's forward.");
  add_step(StepWriter(plan, parts), sizes);
  return plan;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::PlanOptions options;
  lockstep::OptionParser parser("plan", "Prints a step of nn.DataParallel as JSON.");
  parser.add("--devices", options.devices, "how many devices, or a list as the stage takes it");
  parser.add("--batch-size", options.batch_size, "samples of a batch", {1, 1 << 20});
  parser.add("--model", options.model, "network");
  return lockstep::print_plan(argc, argv, parser, [&] { return lockstep::make_plan(options); });
}
