#include "07-mesh/stage_options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/json.h"

namespace lockstep {

namespace {

/// An option that concerns ranks along these axes only.
struct OptionOfAxes {
  const char *name, *what;
  Axes axes;
};

/// No option that a checkpoint keeps: a run that goes on with another mesh has to be given it.
const std::vector<OptionOfAxes>& options_of_axes() {
  static const auto& all = *new std::vector<OptionOfAxes>{
      {"--schedule", "orders what the stages of a pipeline do", {Axis::pipeline}},
      {"--shard", "says what ranks along shard share out", {Axis::shard}},
      {"--prefetch", "is for ranks along shard, which fetch parameters", {Axis::shard}},
      {"--reshard-after-forward", "is for ranks along shard", {Axis::shard}},
      {"--unit", "divides what ranks along data or shard send", {Axis::data, Axis::shard}}};
  return all;
}

/// Refuses those of the options `given` that would have no effect.
void check_axes(const MeshShape& mesh, const std::set<std::string>& given) {
  for (const auto& [name, what, axes] : options_of_axes()) {
    const bool unknown = mesh == MeshShape() && !axes.contains(Axis::pipeline);  // ranks must meet
    const bool there = std::ranges::any_of(axes, [&](Axis axis) { return mesh.size(axis) > 1; });
    require(unknown || there || !given.contains(name),
            "{}: {}, and --mesh {} has none; leave it out, or give --mesh {}=2", name, what,
            mesh.text(), name_of(*axes.rbegin()));
  }
}

/// Parameters and gradients could be rounded along the shard axis only.
void check_message_types(const MessageTypes& types) {
  for (const auto& [type, option] : {std::pair(types.parameters, "--param-dtype"),
                                     std::pair(types.gradients, "--reduce-dtype")}) {
    require(type == Compression::none,
            "{} bf16: on a mesh parameters and gradients travel in float32; leave it out, or take "
            "06-fully-sharded",
            option);
  }
}

}  // namespace

void MeshStageOptions::add_to(OptionParser& parser) {
  Options::add_to(parser);
  ranks.add_to(parser);
  parser.begin_group("Ranks");
  parser.add("--mesh", mesh,
             {"axes of ranks, outermost first: data=2,shard=2,tensor=2; auto: shard within a host, "
              "data over hosts",
              Role::all_ranks});
  parser.add("--schedule", rank_schedule,
             {"pipelines: order of the forwards and backwards of the micro-batches of --accumulate",
              Role::all_ranks});
  step.add_to(parser);
  sync_bn.add_to(parser);
  saving.add_to(parser);
  sharding.add_to(parser);
  parser.check_afterwards([this, &parser] {
    given.clear();
    for (const OptionOfAxes& option : options_of_axes()) {
      if (parser.given(option.name)) given.insert(option.name);
    }
    check_axes(mesh, given);
    ranks.place_of = [shape = mesh](int rank) { return shape.place_of(rank); };
    check_message_types(sharding.messages);
    require(sync_bn.sync_bn_group == 0,
            "--sync-bn-group: in a mesh all ranks with other samples normalise together; leave it "
            "out, or give --no-sync-bn");
    check_saved_statistics(step, sync_bn, saving);
    refuse_simulated(*this, saving);
  });
}

SimulatedRanks MeshStageOptions::simulated_ranks() const {
  SimulatedRanks ranks = Options::simulated_ranks();
  if (mesh.ranks() != ranks.world_size) return ranks;  // is refused, or is the default mesh
  ranks.kinds = mesh.size(Axis::pipeline);
  while (mesh.coordinate(ranks.apart, Axis::pipeline) == 0 && ranks.kinds > 1) ++ranks.apart;
  return ranks;
}

std::string MeshStageOptions::emulation(size_t world_size) const {
  const int copies = mesh.size(Axis::tensor) * mesh.size(Axis::pipeline);  // of the same samples
  const size_t parts = std::max<size_t>(1, world_size / size_t(copies));
  const bool together = !sync_bn.no_sync_bn || parts == 1;
  return together ? step.emulation_together(parts) : step.emulation(parts);
}

MeshParallel parallelize(Model& model, const Dataset& images, DeviceMesh& mesh, Stream passes,
                         Stream communication, const MeshStageOptions& options) {
  mesh.group().together([&] {  // the default mesh is known now; a single rank may try any option
    if (mesh.group().world_size() > 1) check_axes(mesh.shape(), options.given);
  });
  ShardingOptions sharding = options.sharding;
  sharding.broadcast_buffers = !options.step.no_broadcast_buffers;
  sharding.precision = options.precision;
  return MeshParallel(model, options.model_options(images), mesh, passes, communication, sharding,
                      {choice_of<ScheduleKind>(name_of(options.rank_schedule), "--schedule"),
                       options.step.accumulate});
}

std::string mesh_line(const MeshStageOptions& options, const DeviceMesh& mesh) {
  const int parts = mesh.size(Axis::data) * mesh.size(Axis::shard);
  return fmt::format("{}, {}: global batch {} = {} x at most {} samples{}; learning rate {:.6g}",
                     ranks_text(mesh.group()), mesh.shape().text(), options.batch_size, parts,
                     (options.batch_size + parts - 1) / parts,
                     options.step.accumulate > 1
                         ? fmt::format(" in {} micro-batches", options.step.accumulate)
                         : "",
                     options.schedule(1).base);
}

std::shared_ptr<SyncBatchNorm> synchronise(Model& model, Communicator& samples,
                                           Stream communication, const MeshStageOptions& options) {
  if (options.sync_bn.no_sync_bn) return nullptr;
  return convert_sync_batchnorm(*model.network, samples, communication);
}

// --- The report ----------------------------------------------------------------------------------

namespace {

/// What a rank sends along an axis, and what it must, by sizes. In all steps.
struct Sent {
  int64_t bytes = 0;
  double predicted = 0;
};

int64_t training_bytes(const Communicator& comm) {
  return comm.bytes_sent(Purpose::gradients) + comm.bytes_sent(Purpose::parameters) +
         comm.bytes_sent(Purpose::activations);
}

/// For an all-reduce of what this rank has of each unit's gradients: 2 (D-1)/D times that.
double bytes_of_sums(const FullyShardedDataParallel& sharded, const Communicator& comm) {
  int64_t bytes = 0;
  for (const Unit* unit : sharded.units()) {
    bytes += comm.bytes_of_all_reduce(unit->gradient_shard());
  }
  return double(bytes);
}

/// To the ranks with other samples that come first: as in stage 06.
Sent sent_to_reduced(MeshParallel& parallel, int micro_batches, double steps) {
  const FullyShardedDataParallel& sharded = parallel.sharded();
  const Communicator& comm = sharded.comm();
  const double in_step = sharded.options().kind == ShardKind::none
                             ? bytes_of_sums(sharded, comm)
                             : double(bytes_by_formula(sharded, micro_batches, comm.world_size()));
  return {training_bytes(comm), steps * in_step};
}

Sent sent_to_replicas(MeshParallel& parallel, DeviceMesh& mesh, double steps) {
  const Communicator& comm = mesh.along({Axis::data});
  return {training_bytes(comm), steps * bytes_of_sums(parallel.sharded(), comm)};
}

Sent sent_along_tensor(MeshParallel& parallel, DeviceMesh& mesh) {
  double bytes = 0;
  for (const auto& [layer, traffic] : parallel.split_ranks().traffic()) bytes += traffic.bytes;
  return {training_bytes(mesh.along({Axis::tensor})), bytes};
}

/// Its activations to the next stage and its gradients to the one before, in all micro-batches.
Sent sent_along_pipeline(const RankPipeline& stage) {
  const StageLink &forward = stage.activations(), &backward = stage.gradients();
  return {forward.bytes_sent() + backward.bytes_sent(),
          double(forward.bytes_by_sizes() + backward.bytes_by_sizes())};
}

Sent sent_along(Axis axis, MeshParallel& parallel, DeviceMesh& mesh, int micro_batches,
                double steps) {
  if (axis == Axis::tensor) return sent_along_tensor(parallel, mesh);
  if (axis == Axis::pipeline) return sent_along_pipeline(*parallel.stage());
  if (axis == averaging_axes(mesh.shape()).replicas) return sent_to_replicas(parallel, mesh, steps);
  return sent_to_reduced(parallel, micro_batches, steps);
}

/// "0.40 ms, 12 % of compute": the waiting, and its share of what stage 06 counts it in.
std::string waited_text(Axis axis, double waited, const StepTimes& times) {
  const bool within_pass = axis == Axis::tensor || axis == Axis::pipeline;
  const double whole = within_pass ? times.compute : times.exposed;
  return fmt::format("{:.2f} ms, {:.0f} % of {}", 1e3 * waited,
                     whole > 0 ? 100 * waited / whole : 0, within_pass ? "compute" : "exposed");
}

/// "conv1 to fc1"
std::string layers_text(const std::vector<Unit*>& units) {
  const std::string first = units.front()->name();
  return units.size() == 1 ? first : first + " to " + units.back()->name();
}

/// What rank 0 has of the network, and how long it waits for the others.
void report_stage(RankPipeline& stage, const std::vector<Unit*>& units, int stages,
                  const MeshStageOptions& options, double steps, TrainingLog& log) {
  const double waited = stage.seconds_waited() / steps;
  const int micro_batches = options.step.accumulate;
  const double bubble = predicted_bubble(stages, micro_batches);
  log.note("pipeline",
           fmt::format("{} stages, the first one with the parameters of {}; {} of {} "
                       "micro-batch{}, rank 0 waits {:.2f} ms per step; bubble by (p-1)/(m+p-1) "
                       "{:.1f} %",
                       stages, layers_text(units), name_of(options.rank_schedule), micro_batches,
                       micro_batches == 1 ? "" : "es", 1e3 * waited, 100 * bubble),
           "pipeline",
           {{"stages", stages}, {"waited_seconds_per_step", waited}, {"predicted_bubble", bubble}});
}

/// A layer that does not divide by the ranks stays whole, and its memory is not divided.
void report_split_layers(const TensorLayers& layers, TrainingLog& log) {
  const size_t split = layers.split.size(), all = split + layers.copied.size();
  const std::string copies =
      layers.copied.empty()
          ? ""
          : fmt::format("; copies on all ranks along tensor: {}", listed(layers.copied));
  log.note("split layers", fmt::format("{} of {}{}", split, all, copies), "split_layers",
           {{"split", layers.split}, {"copied", layers.copied}});
}

/// Its row, and its object in `found`.
void report_axis(Axis axis, const Sent& all, MeshParallel& parallel, DeviceMesh& mesh, double steps,
                 const StepTimes& times, nlohmann::json& found, TrainingLog& log) {
  const double sent = double(all.bytes) / steps, predicted = all.predicted / steps;
  const double waited = parallel.seconds_waited(axis) / steps;
  nlohmann::json& row = found[name_of(axis)];
  row = {{"ranks", mesh.size(axis)},
         {"sent", sent},
         {"predicted", predicted},
         {"waited_seconds_per_step", waited}};
  std::string before;  // a sum: what one stream for all axes costs, and threads
  if (axis == Axis::tensor) {
    const double queued = parallel.split_ranks().seconds_queued() / steps;
    row["queued_seconds_per_step"] = queued;
    before = fmt::format(
        ", {:.2f} ms of it before its sums began: behind other messages, and from thread to thread",
        1e3 * queued);
  }
  log.note(fmt::format("along {}", name_of(axis)),
           fmt::format("{:.0f} bytes sent in a step, counted in {}; by sizes {:.0f} ({}); waited "
                       "{}{}",
                       sent, mesh.along({axis}).bytes_counted_in(), predicted,
                       beside_formula(sent, predicted), waited_text(axis, waited, times), before),
           "along", found);
}

}  // namespace

void report(MeshParallel& parallel, DeviceMesh& mesh, const Optimizer& optimizer,
            SyncBatchNorm* synchronised, const MeshStageOptions& options, TrainingLog& log) {
  FullyShardedDataParallel& sharded = parallel.sharded();
  report(sharded, optimizer, options.step.accumulate, sharded.comm().world_size(), log);
  const double steps = double(std::max<int64_t>(log.own_steps(), 1));
  const StepTimes times = sharded.times(log.own_steps());
  if (RankPipeline* const stage = parallel.stage()) {
    report_stage(*stage, sharded.units(), mesh.size(Axis::pipeline), options, steps, log);
  }
  const int per_host = mesh.group().local_world_size();
  log.note("mesh",
           fmt::format("{}, {} rank{} per host", mesh.shape().text(), per_host,
                       per_host == 1 ? "" : "s"),
           "mesh", {{"shape", mesh.shape().text()}, {"ranks_per_host", per_host}});
  if (mesh.size(Axis::tensor) > 1) report_split_layers(parallel.layers_along_tensor(), log);
  nlohmann::json found = nlohmann::json::object();
  for (const Axis axis : kAllAxes) {
    if (mesh.size(axis) == 1) continue;
    const Sent sent = sent_along(axis, parallel, mesh, options.step.accumulate, steps);
    report_axis(axis, sent, parallel, mesh, steps, times, found, log);
  }
  if (synchronised != nullptr) report(*synchronised, log);
}

}  // namespace lockstep
