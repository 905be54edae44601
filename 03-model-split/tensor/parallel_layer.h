#pragma once
// What all layers that are split inside share: shards, and collectives between them.

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/comm/single_process_world.h"
#include "common/core/error.h"
#include "common/nn/module.h"

namespace lockstep {

using Tensors = std::vector<Tensor>;     // [r] is on rank r's device
using Contexts = std::vector<Context*>;  // [r] is that of rank r's stream

/// What the ranks of a layer exchanged. Bytes are those that rank 0 sent: counted by the world,
/// where they leave.
struct Traffic {
  int64_t all_reduces = 0, all_gathers = 0, bytes = 0;

  Traffic& operator+=(const Traffic& other);
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

/// The modules of a split network: one tree per rank, whose parameters are named as in the unsplit
/// network.
class RankModules {
 public:
  /// Empty trees for the ranks of `world`, which must outlive this object.
  explicit RankModules(SingleProcessWorld& world);

  SingleProcessWorld& world() const { return world_; }
  int world_size() const { return static_cast<int>(trees_.size()); }
  Sequential& tree(int rank) const { return *trees_[rank]; }
  /// Puts a module, which already has its final name, into a rank's tree.
  template <class M>
  M* add(int rank, std::unique_ptr<M> module) const {
    M& added = *module;
    const std::string name = added.name();
    trees_[rank]->add(name, std::move(module));
    return &added;
  }

 private:
  SingleProcessWorld& world_;
  std::vector<std::unique_ptr<Sequential>> trees_;
};

/// A layer on all ranks. It is not a Module: it has one Module per rank, its shard, and the
/// collectives between them, which the one host thread issues for all ranks in one group. An
/// activation is either whole, with the same values on all ranks, or split: of P ranks, rank r has
/// the r-th P-th of its channels or features.
class ParallelLayer {
 public:
  ParallelLayer(std::string name, const RankModules& trees)
      : name_(std::move(name)), world_(trees.world()) {}
  virtual ~ParallelLayer() = default;
  ParallelLayer(const ParallelLayer&) = delete;
  ParallelLayer& operator=(const ParallelLayer&) = delete;

  const std::string& name() const { return name_; }
  int world_size() const { return world_.world_size(); }

  /// As Module::forward() and backward(), for all ranks: they only enqueue. An error of a rank
  /// names the rank and its device.
  virtual Tensors forward(const Tensors& x, const Contexts& contexts) = 0;
  virtual Tensors backward(const Tensors& dy, const Contexts& contexts) = 0;

  /// What was exchanged in training so far.
  virtual Traffic traffic() const { return traffic_; }
  /// What one training pass, forward and backward, has to exchange, computed from sizes alone: `x`
  /// is the shape of a rank's input.
  virtual Traffic predicted(const Shape& x) const = 0;

 protected:
  /// x[r] becomes the sum of all x. Does nothing for a single rank.
  void all_reduce(const Tensors& x, const Contexts& contexts);
  /// all[r] becomes mine[0], mine[1], ...
  void all_gather(const Tensors& mine, const Tensors& all, const Contexts& contexts);
  /// The traffic of one collective whose result has this many elements, by sizes: of P ranks, each
  /// makes a P-th of the result and sends it to all others; for an all-reduce it first sends every
  /// other rank its own numbers for that rank's part.
  Traffic one_all_reduce(int64_t elements) const;
  Traffic one_all_gather(int64_t elements) const;

  /// Calls work(rank, its context) for each rank, under the layer's name in the trace.
  template <class Work>
  void on_each_rank(const Contexts& contexts, Work work) const {
    for (int r = 0; r < world_size(); ++r) {
      Context& context = *contexts[r];
      within(fmt::format("rank {} on {}", r, context.stream().device().name()), [&] {
        const ScopedRange range(context.stream(), name_);
        work(r, context);
      });
    }
  }
  /// The same, and returns the tensors that these calls return.
  template <class Work>
  Tensors from_each_rank(const Contexts& contexts, Work work) const {
    Tensors all;
    on_each_rank(contexts, [&](int r, Context& context) { all.push_back(work(r, context)); });
    return all;
  }
  /// modules[r]->forward(x[r]) or backward(dy[r]) of each rank.
  template <class Modules>
  Tensors forward_each(const Modules& modules, const Tensors& x, const Contexts& contexts) const {
    return from_each_rank(
        contexts, [&](int r, Context& context) { return modules[r]->forward(x[r], context); });
  }
  template <class Modules>
  Tensors backward_each(const Modules& modules, const Tensors& dy, const Contexts& contexts) const {
    return from_each_rank(
        contexts, [&](int r, Context& context) { return modules[r]->backward(dy[r], context); });
  }

 private:
  using CallCount = int64_t Traffic::*;  // all_reduces or all_gathers
  /// Calls issue(rank, communicator, stream) for each rank in one group. Counts the call in
  /// `calls`, and the bytes.
  template <class Issue>
  void collective(const Contexts& contexts, CallCount calls, Issue issue);

  template <class Issue>
  void enqueue_together(const Contexts& contexts, Issue issue);

  std::string name_;
  SingleProcessWorld& world_;
  Traffic traffic_;
};

/// No communication: a layer that is whole on every rank, or one that works channel by channel on
/// the rank's channels.
class LocalLayer final : public ParallelLayer {
 public:
  using Make = std::function<std::unique_ptr<Module>(int rank)>;

  /// make(r) is rank r's module, which has its final name.
  LocalLayer(std::string name, const RankModules& trees, const Make& make);
  Tensors forward(const Tensors& x, const Contexts& contexts) override;
  Tensors backward(const Tensors& dy, const Contexts& contexts) override;
  Traffic predicted(const Shape&) const override { return {}; }

 private:
  std::vector<Module*> modules_;
};

}  // namespace lockstep
