#include "03-model-split/tensor/parallel_layer.h"

#include "common/comm/ring_part.h"

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
void ParallelLayer::collective(const Contexts& contexts, CallCount calls, Issue issue) {
  if (world_size() == 1) return;
  const Communicator& rank_0 = world_.communicator(0);
  const int64_t before = rank_0.bytes_sent();
  enqueue_together(contexts, issue);
  if (!contexts[0]->facts.training) return;
  ++(traffic_.*calls);
  traffic_.bytes += rank_0.bytes_sent() - before;
}

template <class Issue>
void ParallelLayer::enqueue_together(const Contexts& contexts, Issue issue) {
  std::deque<ScopedRange> ranges;  // until the group is closed: only then is the work enqueued
  for (const Context* context : contexts) ranges.emplace_back(context->stream(), name_);
  const CollectiveGroup group(world_);
  for (int r = 0; r < world_size(); ++r) issue(r, world_.communicator(r), contexts[r]->stream());
}

void ParallelLayer::all_reduce(const Tensors& x, const Contexts& contexts) {
  collective(contexts, &Traffic::all_reduces,
             [&](int r, Communicator& rank, Stream stream) { rank.all_reduce(stream, x[r]); });
}

void ParallelLayer::all_gather(const Tensors& mine, const Tensors& all, const Contexts& contexts) {
  collective(contexts, &Traffic::all_gathers, [&](int r, Communicator& rank, Stream stream) {
    rank.all_gather(stream, mine[r], all[r]);
  });
}

Traffic ParallelLayer::one_all_reduce(int64_t elements) const {
  if (world_size() == 1) return {};
  const int64_t own = ring_part(elements, 0, world_size()).count;
  const int64_t sent = elements - own + (world_size() - 1) * own;
  return {.all_reduces = 1, .bytes = sent * int64_t{sizeof(Real)}};
}

Traffic ParallelLayer::one_all_gather(int64_t elements) const {
  if (world_size() == 1) return {};
  const int64_t sent = elements / world_size() * (world_size() - 1);
  return {.all_gathers = 1, .bytes = sent * int64_t{sizeof(Real)}};
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
