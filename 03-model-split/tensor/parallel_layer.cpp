#include "03-model-split/tensor/parallel_layer.h"

namespace lockstep {

Traffic& Traffic::operator+=(const Traffic& other) {
  all_reduces += other.all_reduces;
  all_gathers += other.all_gathers;
  bytes += other.bytes;
  return *this;
}

RankModules::RankModules(SingleProcessWorld& world) : world_(world) {
  for (int r = 0; r < world.world_size(); ++r) trees_.push_back(std::make_unique<Sequential>());
}

// --- Collectives ---------------------------------------------------------------------------------

template <class Issue>
void ParallelLayer::collective(const Contexts& contexts, const Traffic& traffic, Issue issue) {
  if (world_size() == 1) return;
  if (contexts[0]->facts.training) traffic_ += traffic;
  std::deque<ScopedRange> ranges;  // until the group is closed: only then is the work enqueued
  for (const Context* context : contexts) ranges.emplace_back(context->stream(), name_);
  const CollectiveGroup group(world_);
  for (int r = 0; r < world_size(); ++r) issue(r, world_.communicator(r), contexts[r]->stream());
}

void ParallelLayer::all_reduce(const Tensors& x, const Contexts& contexts) {
  collective(contexts, one_all_reduce(x[0].elements()),
             [&](int r, Communicator& rank, Stream stream) { rank.all_reduce(stream, x[r]); });
}

void ParallelLayer::all_gather(const Tensors& mine, const Tensors& all, const Contexts& contexts) {
  collective(
      contexts, one_all_gather(all[0].elements()),
      [&](int r, Communicator& rank, Stream stream) { rank.all_gather(stream, mine[r], all[r]); });
}

Traffic ParallelLayer::one_all_reduce(int64_t elements) const {
  if (world_size() == 1) return {};
  return {.all_reduces = 1, .bytes = elements * int64_t{sizeof(Real)}};
}

Traffic ParallelLayer::one_all_gather(int64_t elements) const {
  if (world_size() == 1) return {};
  return {.all_gathers = 1, .bytes = elements * int64_t{sizeof(Real)}};
}

// --- LocalLayer ----------------------------------------------------------------------------------

LocalLayer::LocalLayer(std::string name, const RankModules& trees, const Make& make)
    : ParallelLayer(std::move(name), trees) {
  for (int r = 0; r < trees.world_size(); ++r) modules_.push_back(trees.add(r, make(r)));
}

Tensors LocalLayer::forward(const Tensors& x, const Contexts& contexts) {
  return forward_each(modules_, x, contexts);
}

Tensors LocalLayer::backward(const Tensors& dy, const Contexts& contexts) {
  return backward_each(modules_, dy, contexts);
}

}  // namespace lockstep
