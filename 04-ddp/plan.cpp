// Prints a step of DistributedDataParallel as a plan, for `lockstep show`: forward and backward,
// layer by layer, and the buckets' all-reduces beside backward. All ranks do the same, so one is
// shown. Sizes come from the shapes alone: nothing is allocated, however wide the network is.

#include "common/training/plan.h"

#include <numeric>
#include <ranges>

#include "04-ddp/stage_options.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/nn/models.h"

namespace lockstep {
namespace {

struct PlanOptions {
  PlannedNetwork network;
  BucketOptions buckets;
  double units_per_mib = 0;  // 0: all together a third of backward
};

constexpr size_t kCompute = 0, kCommunication = 1;

/// "block1.0.conv1" of "block1.0.conv1.weight"
std::string layer_of(const Parameter& parameter) {
  return parameter.name.substr(0, parameter.name.rfind('.'));
}

/// What a layer's forward and backward do, as a bar of the plan.
PlannedWork work_of(const std::string& layer, const std::string& kind, double length) {
  return {.lane = kCompute,
          .name = layer,
          .kind = kind,
          .text = kind + " of " + layer,
          .length = length};
}

/// Half a unit per layer: a forward does about half the work of a backward.
void add_forward(Plan& plan, const std::vector<Parameter*>& parameters) {
  std::string before;
  for (const Parameter* parameter : parameters) {
    const std::string layer = layer_of(*parameter);
    if (layer != before) plan.add(work_of(layer, "forward", 0.5));
    before = layer;
  }
}

/// Backward, a unit per layer. Returns the place of each parameter's layer in the plan.
std::vector<size_t> add_backward(Plan& plan, const std::vector<Parameter*>& in_order) {
  std::vector<size_t> places;
  std::string before;
  for (const Parameter* parameter : in_order) {
    const std::string layer = layer_of(*parameter);
    places.push_back(layer == before ? places.back() : plan.add(work_of(layer, "backward", 1)));
    before = layer;
  }
  return places;
}

Plan make_plan(const PlanOptions& options) {
  const Model model = options.network.make();
  const std::vector<Parameter*> parameters = model.network->parameters();
  const std::vector<Parameter*> in_order(parameters.rbegin(), parameters.rend());
  std::vector<int64_t> bytes;
  for (const Parameter* parameter : in_order) {
    bytes.push_back(parameter->shape.elements() * int64_t(sizeof(Real)));
  }
  const std::vector<Bucket> buckets = make_buckets(bytes, options.buckets.caps());

  Plan plan(fmt::format("DistributedDataParallel: {}, {} bucket{}", name_of(options.network.model),
                        buckets.size(), buckets.size() == 1 ? "" : "s"),
            "layers' backwards", "MiB under way", {{"compute"}, {"communication"}});
  plan.set_note("The unit is a layer's backward; a forward takes half of it.");
  add_forward(plan, parameters);
  const std::vector<size_t> places = add_backward(plan, in_order);
  const double all = mebibytes(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}));
  const double backward = plan.end() * 2 / 3;
  const double pace = options.units_per_mib > 0 ? options.units_per_mib : backward / 3 / all;
  std::vector<size_t> reduced;
  for (size_t i = 0; i < buckets.size(); ++i) {
    const double size = mebibytes(buckets[i].bytes);
    reduced.push_back(plan.add({.lane = kCommunication,
                                .name = fmt::format("bucket {}", i),
                                .kind = "messages",
                                .text = fmt::format("all-reduce of bucket {}, {:.2f} MiB", i, size),
                                .length = size * pace,
                                .after = {places[buckets[i].parameters.back()]},
                                .takes = size,
                                .gives = size}));
  }
  plan.add({.lane = kCompute,
            .name = "update",
            .kind = "other",
            .text = "the optimizer's step",
            .length = 1,
            .after = reduced});
  return plan;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::PlanOptions options;
  lockstep::OptionParser parser("plan", "Prints a step of DistributedDataParallel as JSON.");
  options.network.add_to(parser);
  options.buckets.add_to(parser);
  parser.add(
      "--units-per-mib", options.units_per_mib,
      "how long a MiB's all-reduce takes, in layers' backwards; 0: all of them together a third "
      "of backward",
      {0, 1e6});
  return lockstep::print_plan(argc, argv, parser, [&] { return lockstep::make_plan(options); });
}
