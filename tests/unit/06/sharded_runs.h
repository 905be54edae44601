#pragma once
// Steps of sharded training on ranks that are threads of this process.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "06-fully-sharded/fully_sharded.h"
#include "common/nn/optimizer.h"
#include "tests/support/comm_trial.h"
#include "tests/support/ddp_test_support.h"
#include "tests/support/local_store.h"
#include "tests/support/rank_threads.h"

namespace lockstep::testing::sharded {

using Values = std::vector<Real>;

constexpr OptimizerRule kMomentum{.momentum = 0.9};
constexpr OptimizerRule kAdam{.kind = OptimizerKind::adamw, .weight_decay = 0.01, .eps = 1e-3};

/// One rank's side of a run, on the thread of its own.
class ShardedMember {
 public:
  ShardedMember(Communicator& comm, Stream passes, const ExchangeTexts& exchange,
                const ShardingOptions& options, const OptimizerRule& rule, const MakeModule& make)
      : comm(comm),
        exchange(exchange),
        stream(passes),
        network(make(comm.rank()), passes, comm, exchange,
                passes.device().create_stream("communication"), options),
        optimizer(network.optimizer(rule)),
        context(passes) {
    network.initialize(Initializer::kaiming_uniform, 1);
  }

  /// Adds up the gradients of this rank's part of `samples`, in `parts` passes, and averages them
  /// over the ranks.
  void gradients(const Samples& samples, int parts = 1) {
    optimizer.zero_gradients();
    const Samples mine = samples.every(comm.rank(), comm.world_size());
    for (int part = 0; part < parts; ++part) {
      context.facts.last_contribution = part + 1 == parts;
      pass(mine.every(part, parts), double(comm.world_size()) / double(samples.count()));
    }
  }
  void step(const Samples& samples, int parts = 1) {
    gradients(samples, parts);
    optimizer.step(context.state(), network.loss());
    network.gather_parameters();
    ++steps;
  }
  /// All parameters, in order of registration: gathered unit by unit.
  Values weights() {
    Values all;
    network.visit_units([&](Unit& unit) {
      for (const Parameter* p : unit.parameters()) {
        const Values values = p->value.to_host();
        all.insert(all.end(), values.begin(), values.end());
      }
    });
    return all;
  }
  Device& device() const { return stream.device(); }

  Communicator& comm;
  ExchangeTexts exchange;
  Stream stream;
  FullyShardedDataParallel network;
  Optimizer optimizer;
  Context context;
  int64_t steps = 0;

 private:
  void pass(const Samples& samples, double weight) {
    const int64_t count = samples.count();
    context.state().copy_from_host(
        {{.step = steps, .learning_rate = Real(0.05), .loss_weight = Real(weight)}});
    const Tensor images = Tensor::from_host(stream, {count, 16, 16, 1}, samples.images);
    const LabelTensor labels = LabelTensor::from_host(stream, {count}, samples.labels);
    const Tensor scores = network.forward(images, context);
    criterion_->forward(scores, labels, network.loss(), context);
    network.backward(criterion_->backward(labels, context), context);
  }

  std::unique_ptr<Loss> criterion_ = make_nll_loss();
};

struct Setting {
  ShardingOptions options{};
  OptimizerRule rule{};
  MakeModule make = small_network();
};

/// Calls work(member) for each of `world_size` ranks at the same time, and returns their errors.
inline std::vector<std::string> on_ranks(int world_size, const Setting& setting,
                                         const std::function<void(ShardedMember&)>& work) {
  LocalStore store;
  Ranks ranks = gloo_ranks(world_size);
  return run_ranks(world_size, [&](int rank) {
    Communicator& comm = *ranks.comms[size_t(rank)];
    ShardedMember member(
        comm, ranks.streams[size_t(rank)],
        [&](const std::string& mine) { return store.exchange(rank, world_size, mine); },
        setting.options, setting.rule, setting.make);
    work(member);
    member.stream.synchronize();
  });
}

/// The weights of one device after the same steps.
inline Values single_device_weights(const std::vector<Samples>& steps, const OptimizerRule& rule,
                                    const MakeModule& make = small_network()) {
  testing::Member whole(0, make, 1);
  const Optimizer optimizer(whole.parameters, rule);
  for (const Samples& samples : steps) {
    whole.parameters.zero_gradients();
    whole.accumulate(samples, 1.0 / double(samples.count()));
    optimizer.step(whole.context.state(), whole.loss);
    ++whole.steps;
  }
  Values all;
  for (const Parameter* p : whole.parameters.parameters()) {
    const Values values = p->value.to_host();
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

}  // namespace lockstep::testing::sharded
