// Mistakes in sharing out a network, and in numbers of 16 bits. Run each with the mistake, and
// without it.
//
//   build/06-fully-sharded/labs stale-parameters
//   build/06-fully-sharded/labs stale-parameters --fixed
//
// Two ranks, unless a launcher starts more; the last two have one.

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>

#include "06-fully-sharded/fully_sharded.h"
#include "06-fully-sharded/sharded_step.h"
#include "common/core/error.h"
#include "common/core/sixteen_bits.h"
#include "common/core/text.h"
#include "common/data/synthetic.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/training/feeder.h"
#include "common/training/lab.h"

namespace lockstep {
namespace {

/// What a rank has before it has a network: one CPU device.
struct RankDevice {
  explicit RankDevice(ProcessGroup& of)
      : group(of),
        device(open_device({DeviceId::Kind::cpu, of.local_rank()}, {})),
        stream(device->create_stream("compute")),
        communication(device->create_stream("communication")),
        communicator(of.connect(*device)),
        comm(*communicator) {}

  ProcessGroup& group;
  std::unique_ptr<Device> device;
  Stream stream, communication;
  std::unique_ptr<Communicator> communicator;
  Communicator& comm;
};

constexpr int64_t kBatch = 32;  // of all ranks together

/// Training of the small network, with what the options share out. The ranks begin with the same
/// weights.
struct LabTraining {
  LabTraining(const RankDevice& rank, const ShardingOptions& options, const OptimizerRule& rule)
      : stream(rank.stream),
        comm(rank.comm),
        set(make_synthetic(SyntheticPart::train, 160)),
        model(make_model({})),
        sharded(model.wrap<FullyShardedDataParallel>(stream, comm, rank.group.exchanger(),
                                                     rank.communication, options)),
        optimizer(sharded.optimizer(rule)),
        context(stream),
        feeder(stream, set) {
    sharded.initialize(Initializer::kaiming_uniform, 1);
    DataLoader loader(set, {.batch_size = kBatch, .shuffle = true});
    loader.begin_epoch(0);
    batch = *loader.next();
  }

  /// Gradients of this rank's part of the batch, or of all of it as one process has them; reduced
  /// over the ranks, or, with `reduces` false, as they are. Waits.
  void forward_and_backward(bool all_of_it = false, bool reduces = true) {
    const BatchSplit dealt{BatchSplit::Kind::stride, all_of_it ? 1 : comm.world_size()};
    const BatchPart mine = dealt.divide(kBatch).at(all_of_it ? 0 : size_t(comm.rank()));
    context.begin_step(
        {.learning_rate = Real(0.1), .loss_weight = Real(double(dealt.parts) / double(kBatch))});
    context.facts.last_contribution = reduces;
    optimizer.zero_gradients();
    const DeviceBatch& fed = feeder.feed(batch, mine, context);
    const AnyTensor scores = model.network->forward(feeder.normalize(fed, context), context);
    model.loss->forward(scores, fed.labels, sharded.loss(), context);
    model.network->backward(model.loss->backward(fed.labels, context), context);
    stream.synchronize();
  }

  Stream stream;
  Communicator& comm;
  Dataset set;
  Model model;
  FullyShardedDataParallel& sharded;
  Optimizer optimizer;
  Context context;
  Feeder feeder;
  HostBatch batch;
};

// --- Stale parameters ----------------------------------------------------------------------------

/// How far the last rank's parameters are from this rank's, relative to their length.
double apart(LabTraining& training) {
  Numbers mine, theirs;
  const auto append = [](Numbers& all, const Tensor& x) {
    const Numbers more = numbers_of(x);
    all.insert(all.end(), more.begin(), more.end());
  };
  training.sharded.visit_units([&](Unit& unit) {
    const Tensor sent =
        Tensor::from_host(training.stream, unit.values().shape(), unit.values().to_host());
    append(mine, sent);
    training.comm.broadcast(training.stream, sent, training.comm.world_size() - 1);
    append(theirs, sent);
  });
  return relative_error(mine, theirs);
}

/// The mistake: the ranks update their shards, and go on with the others' old ones.
void stale_parameters(ProcessGroup& group, bool fixed) {
  const RankDevice rank(group);
  LabTraining training(rank, {.kind = ShardKind::optimizer}, {});
  for (int step = 1; step <= 5; ++step) {
    training.forward_and_backward();
    training.optimizer.step(training.context.state(), training.sharded.loss());
    if (fixed) training.sharded.gather_parameters();
    say(group,
        fmt::format("step {}: the ranks' parameters are {:.1e} apart", step, apart(training)));
  }
}

// --- The norm of one shard -----------------------------------------------------------------------

/// The norm of the shards of all ranks.
double norm_of_all(LabTraining& training) {
  double squares = 0;
  for (const UpdatedRange& shard : training.sharded.shards()) {
    const double norm = norm_of(shard.gradients);
    squares += norm * norm;
  }
  const auto sum = BasicTensor<double>::from_host(training.stream, {1}, {squares});
  training.comm.all_reduce(training.stream, sum);
  return std::sqrt(sum.to_host()[0]);
}

double norm_of_shard(const LabTraining& training) {
  Numbers norms;
  for (const UpdatedRange& shard : training.sharded.shards()) {
    norms.push_back(norm_of(shard.gradients));
  }
  return norm_of(norms);
}

/// The mistake: each rank clips its shard by the norm of that alone.
void norm_of_one_shard(ProcessGroup& group, bool fixed) {
  constexpr double kMost = 0.01;
  const RankDevice rank(group);
  LabTraining training(rank, {.kind = ShardKind::gradients}, {});
  training.forward_and_backward();
  const double before = norm_of_shard(training);
  const ClipByNorm clip(training.stream, training.sharded.shards(), kMost,
                        [&](const Tensor& squares) {
                          if (fixed) training.sharded.sum_over_shards(squares);
                        });
  clip();
  const double factor = norm_of_shard(training) / before;
  for (const std::string& line :
       group.exchange(fmt::format("rank {} scales its shard by {:.4f}", group.rank(), factor))) {
    say(group, line);
  }
  const double norm = norm_of_all(training);
  say(group, fmt::format("the gradient was to have a norm of {}, and has {:.4f}", kMost, norm));
}

// --- Summed for averaged -------------------------------------------------------------------------

/// The mistake: without an argument a reduce-scatter sums.
void summing_step(LabTraining& training, const UpdatedRange& whole, const UpdatedRange& shard,
                  const OptimizerRule& rule) {
  training.comm.reduce_scatter(training.stream, whole.gradients, shard.gradients);
  Optimizer(training.stream, {shard}, rule).step(training.context.state(), training.sharded.loss());
  training.comm.all_gather(training.stream, shard.values, whole.values);
}

/// How far one step of the ranks goes, relative to the same step of one process.
double length_of_step(const RankDevice& rank, const OptimizerRule& rule, bool fixed) {
  LabTraining training(rank, {.kind = ShardKind::none, .unit = {UnitSize::Kind::model}}, rule);
  const Unit& unit = *training.sharded.units().front();
  const UpdatedRange whole{unit.values(), unit.gradient_shard()};
  const std::vector<Real> first = whole.values.to_host();
  const auto moved = [&] {
    Numbers difference = numbers_of(whole.values);
    for (size_t i = 0; i < difference.size(); ++i) difference[i] -= double(first[i]);
    return norm_of(difference);
  };

  training.forward_and_backward(/*all_of_it=*/true, /*reduces=*/false);
  training.optimizer.step(training.context.state(), training.sharded.loss());
  const double one_process = moved();

  whole.values.copy_from_host(first);
  training.forward_and_backward(/*all_of_it=*/false, /*reduces=*/false);
  const ShardedStep step(whole, training.comm, rule);
  if (fixed) {
    step(training.context.state(), training.sharded.loss());
  } else {
    summing_step(training, whole, step.shard(), rule);
  }
  return moved() / one_process;
}

void summed_for_averaged(ProcessGroup& group, bool fixed) {
  const RankDevice rank(group);
  for (const auto& [name, kind] :
       {std::pair{"SGD", OptimizerKind::sgd}, std::pair{"AdamW", OptimizerKind::adamw}}) {
    say(group,
        fmt::format("{}: the step of {} ranks is {:.3f} times as long as that of one process", name,
                    group.world_size(), length_of_step(rank, {.kind = kind}, fixed)));
  }
}

Tensor filled(Stream stream, int64_t count, Real value) {
  Tensor x = Tensor::empty(stream, {count});
  stream.kernels().fill(stream, value, x);
  return x;
}

// --- Freed too early -----------------------------------------------------------------------------

/// A unit's gradients are 1 on rank 0 and 3 on rank 1, and are being averaged when the unit in
/// front takes memory for its own. Rank 0's communication stream is late: it still waits for an
/// earlier message, which rank 1 sends after the host's barrier. So the race ends in the same way
/// each time.
void freed_too_early(ProcessGroup& group, bool fixed) {
  require(group.world_size() == 2, "this lab takes 2 ranks, found {}", group.world_size());
  constexpr int64_t kShard = 8192;
  const RankDevice rank(group);
  const bool late = group.rank() == 0;
  const Stream passes = rank.stream, communication = rank.communication;
  Tensor gradients = filled(passes, 2 * kShard, late ? 1 : 3);
  const Tensor shard = filled(passes, kShard, 0), earlier = filled(passes, 1, 0);
  communication.wait(passes.record());
  if (late) {
    rank.comm.receive(communication, earlier, 1);
  } else {
    group.barrier();
    rank.comm.send(communication, earlier, 0);
  }
  rank.comm.reduce_scatter(communication, gradients, shard, Reduction::average);
  const bool waits = fixed || !late;
  if (waits) passes.wait(communication.record());
  gradients = Tensor();              // given back when the passes come to it
  if (!waits) passes.synchronize();  // they have, before the reduction has begun
  const Tensor in_front = filled(passes, kShard, 100);
  if (!waits) passes.synchronize();
  if (late) group.barrier();
  communication.synchronize();
  const Numbers found = numbers_of(shard);
  say(group, fmt::format("averages of 1 and 3 in the shard of rank 0: from {} to {}",
                         std::ranges::min(found), std::ranges::max(found)));
}

// --- All initialise in full ----------------------------------------------------------------------

/// The mistake: all parameters of the network at once, on every rank.
std::map<std::string, Tensor> initialise_in_full(Module& network, Stream stream) {
  std::map<std::string, Tensor> whole;
  for (Parameter* p : network.parameters()) {
    p->value = whole[p->name] = Tensor::empty(stream, p->shape);
  }
  initialize(network.parameters(), Initializer::kaiming_uniform, 1);
  return whole;
}

/// Each rank keeps its shard of them.
void keep_shards(FullyShardedDataParallel& sharded, const std::map<std::string, Tensor>& whole,
                 Stream stream) {
  sharded.load_units([&](Unit& unit) {
    for (const Parameter* p : unit.in_order()) {
      stream.copy(p->value.data(), whole.at(p->name).data(), p->value.bytes());
    }
  });
}

void all_initialise_in_full(ProcessGroup& group, bool fixed) {
  const RankDevice rank(group);
  Model model = make_model({.kind = ModelKind::resnet18, .width = 32});
  std::map<std::string, Tensor> whole;
  if (!fixed) whole = initialise_in_full(*model.network, rank.stream);
  auto& sharded = model.wrap<FullyShardedDataParallel>(rank.stream, rank.comm, group.exchanger(),
                                                       rank.communication, ShardingOptions());
  if (fixed) {
    sharded.initialize(Initializer::kaiming_uniform, 1);
  } else {
    keep_shards(sharded, whole, rank.stream);
  }
  whole.clear();
  rank.stream.synchronize();
  const MemoryCounter& memory = rank.device->memory();
  int64_t largest = 0;
  for (const Unit* unit : sharded.units()) largest = std::max(largest, unit->length());
  say(group,
      fmt::format("{:.1f} MiB of parameters, the largest unit {:.1f}; rank 0 keeps {:.1f} MiB of "
                  "parameters and gradients, and had {:.1f} MiB at most",
                  mebibytes(sharded.count() * int64_t(sizeof(Real))),
                  mebibytes(largest * int64_t(sizeof(Real))), mebibytes(memory.current()),
                  mebibytes(memory.peak())));
}

// --- Numbers of 16 bits --------------------------------------------------------------------------

std::vector<float> floats_of(const Tensor& x) {
  const std::vector<Real> values = x.to_host();
  return {values.begin(), values.end()};
}

/// Every number as T has it.
template <class T>
std::vector<Real> rounded(const std::vector<float>& numbers) {
  std::vector<Real> all;
  for (const float number : numbers) all.push_back(Real(float(T(number))));
  return all;
}

/// Layers compute with weights of bf16. The mistake: the optimizer adds to these, not to weights of
/// float32 from which they are rounded.
void bf16_weights(ProcessGroup& group, bool fixed) {
  constexpr int kSteps = 100;
  constexpr float kRate = 0.01F;
  SmallTraining training;
  const HostBatch batch = training.first_batch(kBatch);
  const Tensor& values = training.parameters.values();
  values.copy_from_host(rounded<Bf16>(floats_of(values)));
  std::vector<float> weights = floats_of(values);
  int64_t updates = 0, without_effect = 0;
  for (int step = 1; step <= kSteps; ++step) {
    values.copy_from_host(rounded<Bf16>(weights));
    training.forward_and_backward(batch, {{0, 1, kBatch}}, 1.0 / kBatch);
    const std::vector<float> gradients = floats_of(training.parameters.gradients());
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i] == 0) continue;
      const float updated = weights[i] - kRate * gradients[i];
      const float kept = fixed ? updated : float(Bf16(updated));
      ++updates;
      without_effect += kept == weights[i];
      weights[i] = kept;
    }
  }
  say(group, fmt::format("updates without effect: {:.1f} %; loss of step {}: {:.4f}",
                         100.0 * double(without_effect) / double(updates), kSteps,
                         training.loss.to_host()[0]));
}

/// Gradients are kept in fp16. The mistake: they are not scaled up before, by the loss.
void fp16_without_scale(ProcessGroup& group, bool fixed) {
  constexpr int kSteps = 300;
  const double scale = fixed ? 1024 : 1;
  SmallTraining training;
  const HostBatch batch = training.first_batch(kBatch);
  for (int step = 1; step <= kSteps; ++step) {
    training.forward_and_backward(batch, {{0, 1, kBatch}}, scale / kBatch);
    const Tensor& gradients = training.parameters.gradients();
    const std::vector<float> exact = floats_of(gradients);
    std::vector<Real> kept = rounded<Fp16>(exact);
    int64_t numbers = 0, vanished = 0;
    for (size_t i = 0; i < kept.size(); ++i) {
      numbers += exact[i] != 0;
      vanished += exact[i] != 0 && kept[i] == 0;
      kept[i] /= Real(scale);
    }
    gradients.copy_from_host(kept);
    training.update();  // in float32
    if (step != 1 && step % 100 != 0) continue;
    say(group, fmt::format("step {}, loss {:.4f}; gradients that vanish in fp16: {:.2f} %", step,
                           double(training.loss.to_host()[0]) / scale,
                           100.0 * double(vanished) / double(numbers)));
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  return run_rank_labs(argc, argv,
                       {{"stale-parameters", stale_parameters},
                        {"norm-of-one-shard", norm_of_one_shard},
                        {"summed-for-averaged", summed_for_averaged},
                        {"freed-too-early", freed_too_early},
                        {"all-initialise-in-full", all_initialise_in_full},
                        {"bf16-weights", bf16_weights, "cpu:0"},
                        {"fp16-without-scale", fp16_without_scale, "cpu:0"}});
}
