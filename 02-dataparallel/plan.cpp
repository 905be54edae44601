// Prints a step of nn.DataParallel as a plan, for `lockstep show`: its phases, and the bytes that
// device 0 hands out and takes in.

#include "common/app/plan.h"

#include "common/core/error.h"
#include "common/data/batch_parts.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"

namespace lockstep {
namespace {

struct PlanOptions {
  int devices = 2;
  int64_t batch_size = 64;
  std::string model = "seed";
};

/// Bytes of what is copied.
struct Sizes {
  int64_t image, scores, weights, gradients;  // one sample's; the whole network's
};

Sizes sizes_of(const ModelOptions& options) {
  const Devices devices = open_devices(parse_devices("cpu:0"), {});
  const Stream stream = devices[0]->create_stream("sizes");
  const Model model = make_model(options);
  const FlatParameters parameters(*model.network, stream);
  const int64_t real = sizeof(Real);
  return {
      options.channels * options.height * options.width_pixels * real, options.classes * real,
      int64_t(parameters.values().bytes() + parameters.buffer_values().bytes() + sizeof(StepState)),
      int64_t(parameters.gradients().bytes())};
}

/// Writes the phases of one step down, in the order in which the host enqueues them. A forward of
/// device 0's part takes four units, a backward eight, a copy one.
class StepWriter {
 public:
  StepWriter(Plan& plan, const std::vector<BatchPart>& parts)
      : plan_(plan), parts_(parts), last_(parts.size()) {}

  /// Device 0 copies something to or from each of the others: after what they did last, or, for
  /// what is the same for all, after nothing of theirs.
  void copies(const std::string& name, const std::string& text,
              const std::function<int64_t(const BatchPart&)>& bytes) {
    for (size_t r = 1; r < parts_.size(); ++r) {
      const std::vector<size_t> after = last_[r] ? std::vector{*last_[r]} : std::vector<size_t>{};
      last_[r] = plan_.add({.lane = 0,
                            .name = fmt::format("{} {}", name, r),
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

Plan make_plan(const PlanOptions& options) {
  const Sizes sizes = sizes_of({.kind = parse_model(options.model)});
  const std::vector<BatchPart> parts =
      BatchSplit{BatchSplit::Kind::chunk, options.devices}.divide(options.batch_size);
  std::vector<PlannedLane> lanes;
  for (int r = 0; r < options.devices; ++r) lanes.push_back({"device " + std::to_string(r)});
  Plan plan(
      fmt::format("nn.DataParallel: {} devices, batch of {}", options.devices, options.batch_size),
      "units", "KiB that this device has copied", lanes);
  StepWriter step(plan, parts);
  step.copies("scatter", "samples to device {}",
              [&](const BatchPart& part) { return part.count * sizes.image; });
  step.copies("replicate", "weights to device {}", [&](const BatchPart&) { return sizes.weights; });
  step.everywhere("forward", 4);
  const auto scores = [&](const BatchPart& part) { return part.count * sizes.scores; };
  step.copies("gather", "scores from device {}", scores);
  step.alone("loss", "the loss of all scores, and its gradient");
  step.copies("scatter", "gradients of the scores to device {}", scores);
  step.everywhere("backward", 8);
  step.copies("reduce", "gradients from device {}, added up",
              [&](const BatchPart&) { return sizes.gradients; });
  step.alone("update", "the optimizer's step, on device 0 alone");
  return plan;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::PlanOptions options;
  lockstep::OptionParser parser("data-parallel-plan", "Prints a step of nn.DataParallel as JSON.");
  parser.add("--devices", options.devices, "how many devices", {1, 64});
  parser.add("--batch-size", options.batch_size, "samples of a batch", {1, 1 << 20});
  parser.add("--model", options.model, "seed, seed-bn, seed-skip, mlp or resnet18");
  return lockstep::print_plan(argc, argv, parser, [&] { return lockstep::make_plan(options); });
}
