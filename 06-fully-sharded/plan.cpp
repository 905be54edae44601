// Prints a step of sharded data parallel as a plan, for `lockstep show`: the units' passes, what is
// gathered, reduced and freed beside them. All ranks do the same, so one is shown.

#include "common/training/plan.h"

#include <algorithm>
#include <set>

#include "06-fully-sharded/stage_options.h"
#include "06-fully-sharded/unit.h"
#include "common/nn/models.h"

namespace lockstep {
namespace {

struct PlanOptions {
  ShardingOptions sharding;
  int ranks = 2;
  PlannedNetwork network;
  double units_per_mib = 0;  // 0: all together a third of forward

  bool shares(ShardKind what) const { return sharding.kind >= what; }
};

constexpr size_t kCompute = 0, kCommunication = 1;
constexpr double kMoment = 0.1;  // how wide an allocation, a free and the loss's message are drawn

std::string told(double mebibytes) {
  return mebibytes < 1 ? fmt::format("{:.1f} KiB", 1024 * mebibytes)
                       : fmt::format("{:.2f} MiB", mebibytes);
}

/// A unit as the plan sees it.
struct DrawnUnit {
  std::string name;
  double layers;  // with parameters; a forward takes a unit of time for each
  double size;    // MiB of its padded parameters, and of its gradients
};

DrawnUnit drawn(const Layers& layers, int ranks) {
  std::set<std::string> with_parameters;
  int64_t end = 0;
  for (const auto& layer : layers) {
    for (const Parameter* p : layer->parameters()) {
      with_parameters.insert(p->name.substr(0, p->name.rfind('.')));
      end += aligned(p->shape.elements());
    }
  }
  const int64_t bytes = padded_length(end, ranks) * int64_t(sizeof(Real));
  return {name_of_unit(layers), std::max(1.0, double(with_parameters.size())),
          double(bytes) / (1 << 20)};
}

/// The network's units, divided as the stage divides it.
std::vector<DrawnUnit> units_of(const PlanOptions& options) {
  const Model model = options.network.make();
  std::vector<DrawnUnit> units;
  for (const Layers& of_unit : divide_into_units(
           dynamic_cast<Sequential&>(*model.network).release_layers(), options.sharding.unit)) {
    units.push_back(drawn(of_unit, options.ranks));
  }
  return units;
}

double size_of(const std::vector<DrawnUnit>& units, size_t first, size_t end) {
  double size = 0;
  for (size_t i = first; i < std::min(end, units.size()); ++i) size += units[i].size;
  return size;
}

/// The most that a rank has whole at a time, by a formula: while the backward of a unit runs, its
/// gradients, those of the unit after it, whose reduction may still be under way, and its values
/// with those that are fetched ahead.
double most_whole(const std::vector<DrawnUnit>& units, const PlanOptions& options) {
  const double all = size_of(units, 0, units.size());
  if (!options.shares(ShardKind::gradients)) return 2 * all;
  double most = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    const size_t ahead =
        options.sharding.reshard_after_forward ? std::min(i, size_t(options.sharding.prefetch)) : i;
    const double values =
        options.shares(ShardKind::parameters) ? size_of(units, i - ahead, i + 1) : all;
    most = std::max(most, values + size_of(units, i, i + 2));
  }
  return most;
}

/// Writes one step down, in the order in which the host enqueues it (fully_sharded.cpp, unit.cpp).
class StepWriter {
 public:
  StepWriter(Plan& plan, const std::vector<DrawnUnit>& units, const PlanOptions& options)
      : plan_(plan),
        units_(units),
        options_(options),
        shares_values_(options.shares(ShardKind::parameters)),
        shares_gradients_(options.shares(ShardKind::gradients)),
        gathered_(units.size()),
        reduced_(units.size()),
        whole_(units.size(), !shares_values_) {}

  void forward() {
    for (size_t i = 0; i < units_.size(); ++i) {
      fetch(i, 1);
      compute({.lane = kCompute,
               .name = units_[i].name,
               .kind = "forward",
               .text = "forward of " + units_[i].name,
               .length = units_[i].layers,
               .takes = i == 0 ? always_whole() : 0});
      if (options_.sharding.reshard_after_forward) free_values(i);
    }
  }

  void backward() {
    for (size_t i = units_.size(); i-- > 0;) {
      fetch(i, -1);
      compute({.lane = kCompute,
               .name = units_[i].name,
               .kind = "backward",
               .text = "backward of " + units_[i].name,
               .length = 2 * units_[i].layers,
               .takes = shares_gradients_ ? units_[i].size : 0});
      free_values(i);
      reduced_[i] = options_.shares(ShardKind::optimizer)
                        ? send("reduce", "reduce-scatter of the gradients of", i, 1)
                        : send("reduce", "all-reduce of the gradients of", i, 2);
      if (i + 1 < units_.size()) free_gradients(i + 1);
    }
    free_gradients(0);
  }

  void update() {
    awaited_.push_back(plan_.add({.lane = kCommunication,
                                  .name = "loss",
                                  .kind = "messages",
                                  .text = "the ranks' losses are averaged",
                                  .length = kMoment,
                                  .after = {last_}}));
    const bool shard = options_.shares(ShardKind::optimizer);
    compute({.lane = kCompute,
             .name = "update",
             .kind = "other",
             .text = shard ? "the optimizer's step, of this rank's shard" : "the optimizer's step",
             .length = shard ? 1.0 / options_.ranks : 1.0});
    if (!shard || shares_values_) return;
    for (size_t i = 0; i < units_.size(); ++i) {
      send("gather", "while the next forward begins: all-gather of the values of", i, 1);
    }
  }

 private:
  double always_whole() const {
    return (!shares_values_ + !shares_gradients_) * size_of(units_, 0, units_.size());
  }

  /// Work of the stream of the passes, which has to wait for what was awaited since the last one.
  void compute(PlannedWork work) {
    work.after = std::exchange(awaited_, {});
    last_ = plan_.add(std::move(work));
  }

  /// A message of unit i: `halves` of an all-reduce, after what the passes do so far.
  size_t send(const std::string& name, const std::string& text, size_t i, int halves) {
    const double size = halves * units_[i].size;
    const double sent = size * (options_.ranks - 1) / options_.ranks;
    return plan_.add({.lane = kCommunication,
                      .name = fmt::format("{} {}", name, units_[i].name),
                      .kind = "messages",
                      .text = fmt::format("{} {}, {} sent", text, units_[i].name, told(sent)),
                      .length = size * options_.units_per_mib,
                      .after = {last_},
                      .takes = sent,
                      .gives = sent});
  }

  void fetch(size_t at, int direction) {
    gather(at);
    for (int64_t ahead = 1; ahead <= options_.sharding.prefetch; ++ahead) {
      const int64_t next = int64_t(at) + direction * ahead;
      if (next >= 0 && next < std::ssize(units_)) gather(size_t(next));
    }
    await(gathered_[at]);
  }

  void gather(size_t i) {
    if (whole_[i]) return;
    compute({.lane = kCompute,
             .name = "",
             .kind = "memory",
             .text = fmt::format("allocates room for {}, {}", units_[i].name, told(units_[i].size)),
             .length = kMoment,
             .takes = units_[i].size});
    gathered_[i] = send("gather", "all-gather of the values of", i, 1);
    whole_[i] = true;
  }

  void free_values(size_t i) {
    if (!shares_values_ || !whole_[i]) return;
    await(gathered_[i]);
    free("values", i);
    whole_[i] = false;
  }

  void free_gradients(size_t i) {
    await(reduced_[i]);
    if (shares_gradients_) free("gradients", i);
  }

  void free(const std::string& what, size_t i) {
    compute({.lane = kCompute,
             .name = "",
             .kind = "memory",
             .text = fmt::format("frees the whole {} of {}, {}", what, units_[i].name,
                                 told(units_[i].size)),
             .length = kMoment,
             .gives = units_[i].size});
  }

  void await(std::optional<size_t>& message) {
    if (message) awaited_.push_back(*message);
    message.reset();
  }

  Plan& plan_;
  const std::vector<DrawnUnit>& units_;
  const PlanOptions& options_;
  const bool shares_values_, shares_gradients_;
  std::vector<std::optional<size_t>> gathered_, reduced_;  // messages not waited for
  std::vector<bool> whole_;                                // by unit: its values
  std::vector<size_t> awaited_;
  size_t last_ = 0;  // work of the passes
};

std::string title_of(const std::vector<DrawnUnit>& units, const PlanOptions& options) {
  const char* names[] = {"DistributedDataParallel", "ZeRO-1", "ZeRO-2", "FSDP"};
  const int halves =
      options.shares(ShardKind::parameters) && options.sharding.reshard_after_forward ? 3 : 2;
  const double all = size_of(units, 0, units.size());
  return fmt::format("{}: {}, {} unit{}, W = {}; sends {}P(W-1)/W = {}",
                     names[size_t(options.sharding.kind)], name_of(options.network.model),
                     units.size(), units.size() == 1 ? "" : "s", options.ranks, halves,
                     told(halves * all * (options.ranks - 1) / options.ranks));
}

Plan make_plan(PlanOptions options) {
  const std::vector<DrawnUnit> units = units_of(options);
  if (options.units_per_mib == 0) {
    for (const DrawnUnit& unit : units) options.units_per_mib += unit.layers;
    options.units_per_mib /= 3 * size_of(units, 0, units.size());
  }
  Plan plan(title_of(units, options), "layers' forwards",
            "MiB: kept whole (compute), under way (communication)",
            {{"compute", most_whole(units, options)}, {"communication"}});
  StepWriter step(plan, units, options);
  step.forward();
  step.backward();
  step.update();
  return plan;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::PlanOptions options;
  lockstep::OptionParser parser("plan", "Prints a step of sharded data parallel as JSON.");
  options.sharding.add_to(parser);
  parser.add("--ranks", options.ranks, "how many ranks", {1, 1024});
  options.network.add_to(parser);
  parser.add(
      "--units-per-mib", options.units_per_mib,
      "how long a MiB's all-gather takes, in layers' forwards; 0: all units' together a third of "
      "forward",
      {0, 1e6});
  return lockstep::print_plan(argc, argv, parser, [&] { return lockstep::make_plan(options); });
}
