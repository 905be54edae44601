// The messages of stage 07 by hand: a bare loop sends what a step sends, over the same
// communicators, and computes nothing. Beside it stands what 07-mesh waits along each axis.
//
//   build/07-mesh/mesh-messages --devices cpu:0,cpu:1,cpu:2,cpu:3 --mesh data=2,shard=2
//
// The options are 07-mesh's. --max-steps says how often the messages are sent: 100 times, unless it
// is given.

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "07-mesh/stage_options.h"
#include "common/core/text.h"
#include "common/io/json.h"
#include "common/training/phase_timer.h"
#include "common/training/program.h"

namespace lockstep {
namespace {

using Op = Call::Op;

constexpr int64_t kSteps = 100, kUntimedSteps = 2;  // the latter touch new memory

struct Message {
  Axis axis;
  Op op;
  int64_t count;                         // numbers of this rank's own share
  Purpose purpose = Purpose::gradients;  // other: what the summary of 07-mesh does not count
  int peer = 0;                          // of a transfer, its place along the axis
};
using Messages = std::vector<Message>;

// --- What a step sends ---------------------------------------------------------------------------

/// Parameters before the passes; gradients, and last the loss with the marks, after them.
void add_of_units(Messages& step, const MeshParallel& parallel, int micro_batches) {
  const FullyShardedDataParallel& sharded = parallel.sharded();
  const ShardingOptions& options = sharded.options();
  const AveragingAxes axes = averaging_axes(parallel.mesh().shape());
  const bool whole = options.kind == ShardKind::none;
  const int passes = micro_batches * (options.reshard_after_forward ? 2 : 1);
  const int gathers = whole ? 0 : options.kind == ShardKind::parameters ? passes : 1;
  int64_t parameters = 0;
  for (const Unit* unit : sharded.units()) {
    const int64_t shard = unit->gradient_shard().elements();
    parameters += std::ssize(unit->in_order());
    step.insert(step.end(), size_t(gathers), {axes.reduced, Op::all_gather, shard});
    step.push_back({axes.reduced, whole ? Op::all_reduce : Op::reduce_scatter, shard});
    if (axes.replicas) step.push_back({*axes.replicas, Op::all_reduce, shard});
  }
  step.push_back({axes.reduced, Op::all_reduce, 1 + parameters, Purpose::other});
  if (axes.replicas)
    step.push_back({*axes.replicas, Op::all_reduce, 1 + parameters, Purpose::other});
}

/// Sums, and parts of activations that are put together, of layers that have made a step's passes.
void add_of_split_layers(Messages& step, const SplitRanks& ranks) {
  for (const auto& [layer, traffic] : ranks.traffic()) {
    const int64_t calls = traffic.all_reduces + traffic.all_gathers;
    const Op op = traffic.all_reduces > 0 ? Op::all_reduce : Op::all_gather;
    step.insert(step.end(), size_t(calls), {Axis::tensor, op, traffic.numbers / calls});
  }
}

/// How many numbers each stage sends to the next, and to the one before, of a micro-batch:
/// [2 stages]. Waits.
std::vector<int64_t> counts_of_stages(const MeshParallel& parallel, int micro_batches) {
  const auto count = [&](const StageLink& link) {
    return link.bytes_by_sizes() / micro_batches / int64_t(sizeof(Real));
  };
  Communicator& comm = parallel.along({Axis::pipeline});
  const Stream stream = parallel.passes();
  const RankPipeline& stage = *parallel.stage();
  const auto mine =
      CountTensor::from_host(stream, {2}, {count(stage.activations()), count(stage.gradients())});
  const auto all = CountTensor::empty(stream, {2 * comm.world_size()});
  comm.all_gather(stream, mine, all);
  return all.to_host();
}

/// Activations forward, then their gradients back, a micro-batch after another.
void add_of_pipeline(Messages& step, const MeshParallel& parallel, int micro_batches) {
  if (parallel.stage() == nullptr) return;
  const std::vector<int64_t> counts = counts_of_stages(parallel, micro_batches);
  const int here = parallel.mesh().coordinate(Axis::pipeline);
  const int last = parallel.mesh().size(Axis::pipeline) - 1;
  const auto transfers = [&](int from, int to, bool activations) {
    if (std::min(from, to) < 0 || std::max(from, to) > last) return;
    const int64_t count = counts[size_t(2 * from + (activations ? 0 : 1))];
    step.push_back({Axis::pipeline, from == here ? Op::send : Op::receive, count,
                    Purpose::activations, from == here ? to : from});
  };
  for (const bool activations : {true, false}) {
    const int on = activations ? 1 : -1;
    for (int part = 0; part < micro_batches; ++part) {
      transfers(here - on, here, activations);
      transfers(here, here + on, activations);
    }
  }
}

/// A step's passes, after which the network knows what layers and stages send. The samples are
/// black, and every micro-batch has the same number of them.
void make_passes(Model& model, MeshParallel& parallel, const Dataset& images,
                 const MeshStageOptions& options) {
  const Stream passes = parallel.passes();
  const ModelOptions sizes = options.model_options(images);
  const int parts = parallel.along(kSampleAxes).world_size() * options.step.accumulate;
  const int64_t samples = std::max<int64_t>(1, options.batch_size / parts);
  const Tensor x =
      Tensor::empty(passes, {samples, sizes.height, sizes.width_pixels, sizes.channels});
  passes.kernels().fill(passes, 0, x);
  passes.kernels().fill(passes, 0, parallel.loss());
  const auto labels = LabelTensor::from_host(passes, {samples}, std::vector<int32_t>(samples));
  Context context(passes);
  context.state().copy_from_host({{.loss_weight = Real(1) / Real(samples)}});
  for (int part = 1; part <= options.step.accumulate; ++part) {
    context.facts.last_contribution = part == options.step.accumulate;
    const AnyTensor scores = model.network->forward(x, context);
    model.loss->forward(scores, labels, parallel.loss(), context);
    model.network->backward(model.loss->backward(labels, context), context);
  }
  passes.synchronize();
}

// --- By hand -------------------------------------------------------------------------------------

/// The shares [most] and what all ranks have [most W] of the largest messages.
struct Memory {
  Tensor mine, all;
};

Memory memory_for(const Messages& messages, const DeviceMesh& mesh, Stream stream) {
  int64_t most = 1, most_of_all = 1;
  for (const Message& message : messages) {
    most = std::max(most, message.count);
    most_of_all = std::max(most_of_all, message.count * mesh.size(message.axis));
  }
  Memory memory{Tensor::empty(stream, {most}), Tensor::empty(stream, {most_of_all})};
  stream.kernels().fill(stream, 0, memory.mine);
  stream.kernels().fill(stream, 0, memory.all);
  return memory;
}

void send(const Message& message, Communicator& comm, Stream stream, const Memory& memory) {
  const CallPurpose counted(comm, message.purpose);
  const Tensor mine = memory.mine.range(0, {message.count});
  const Tensor all =
      memory.all.range(0, {std::min(memory.all.elements(), message.count * comm.world_size())});
  switch (message.op) {
    case Op::all_reduce:
      return comm.all_reduce(stream, mine);
    case Op::all_gather:
      return comm.all_gather(stream, mine, all);
    case Op::reduce_scatter:
      return comm.reduce_scatter(stream, all, mine);
    case Op::send:
      return comm.send(stream, mine, message.peer);
    case Op::receive:
      return comm.receive(stream, mine, message.peer);
    default:
      return;
  }
}

int64_t training_bytes(const Communicator& comm) {
  return comm.bytes_sent(Purpose::gradients) + comm.bytes_sent(Purpose::activations);
}

/// Sends the messages of many steps. Each begins when all ranks have come to it. Returns, by axis,
/// seconds and bytes of a step.
nlohmann::json send_all(const Messages& messages, DeviceMesh& mesh, Communicator& world,
                        Stream stream, int64_t steps) {
  const Memory memory = memory_for(messages, mesh, stream);
  PhaseTimer times(stream);
  std::map<Axis, int64_t> before;
  for (int64_t step = 0; step < kUntimedSteps + steps; ++step) {
    if (step == kUntimedSteps) {
      times.restart();
      for (const Axis axis : kAllAxes) before[axis] = training_bytes(mesh.along({axis}));
    }
    world.barrier(stream);
    times.start();
    for (const Message& message : messages) {
      send(message, mesh.along({message.axis}), stream, memory);
      times.end(words_of(Axis())[size_t(message.axis)]);
    }
    times.stop();
    stream.synchronize();
  }
  nlohmann::json found = nlohmann::json::object();
  for (const Axis axis : kAllAxes) {
    if (mesh.size(axis) == 1) continue;
    const int64_t sent = training_bytes(mesh.along({axis})) - before[axis];
    found[name_of(axis)] = {{"seconds_per_step", times.total(name_of(axis)) / double(steps)},
                            {"sent", double(sent) / double(steps)}};
  }
  return found;
}

void measure(const MeshStageOptions& options) {
  ProcessGroup group = init_process_group(options.ranks.group_options());
  const DatasetPair data = load_dataset(group, options);
  require_same_settings(group, options, data);
  const std::unique_ptr<Device> device = open_device_of_rank(options, group);
  const std::unique_ptr<Communicator> comm = group.connect(*device);
  const Stream stream = device->create_stream("compute");
  const Stream communication = device->create_stream("communication");
  DeviceMesh mesh(options.mesh, group, *device, *comm);
  Model model = make_model(options.model_options(data.train));
  MeshParallel parallel = parallelize(model, data.train, mesh, stream, communication, options);
  parallel.initialize(options.init, options.seed);
  make_passes(model, parallel, data.train, options);

  Messages step;
  add_of_units(step, parallel, options.step.accumulate);
  add_of_split_layers(step, parallel.split_ranks());
  add_of_pipeline(step, parallel, options.step.accumulate);
  const int64_t steps = options.max_steps > 0 ? options.max_steps : kSteps;
  const nlohmann::json found = send_all(step, mesh, *comm, communication, steps);
  if (group.rank() != 0) return;
  print_clean("{}, {}: rank 0's {} messages of a step by hand\n", ranks_text(group),
              mesh.shape().text(), step.size());
  for (const auto& [axis, row] : found.items()) {
    print_clean("  along {:<9} {:9.3f} ms, {:.0f} bytes sent\n", axis,
                1e3 * row.at("seconds_per_step").get<double>(), row.at("sent").get<double>());
  }
  if (!options.metrics.empty()) write_json(options.metrics, found);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::MeshStageOptions options;
  return lockstep::run_program({.name = "mesh-messages",
                                .summary = "The messages of stage 07's steps, sent by hand.",
                                .order = lockstep::OrderKind::sampler,
                                .model = lockstep::ModelKind::mlp,
                                .optimizer = lockstep::OptimizerKind::adamw,
                                .start_ranks = [&] { return start_ranks(options, options.ranks); }},
                               options, argc, argv, [&] { lockstep::measure(options); });
}
