// The labs about memory: when it may be given back, and how much of it a rank takes at first.

#include <algorithm>
#include <map>

#include "06-fully-sharded/labs.h"
#include "common/core/error.h"
#include "common/training/lab.h"

namespace lockstep {
namespace {

Tensor filled(Stream stream, int64_t count, Real value) {
  Tensor x = Tensor::empty(stream, {count});
  stream.kernels().fill(stream, value, x);
  return x;
}

}  // namespace

// --- Freed too early -----------------------------------------------------------------------------

/// A unit's gradients are 1 on rank 0 and 3 on rank 1, and are being averaged when the unit in
/// front takes memory for its own. Rank 0's communication stream is late: it still waits for an
/// earlier message, which rank 1 sends behind the host's barrier. So the race ends in the same way
/// each time.
void freed_too_early(ProcessGroup& group, bool fixed) {
  require(group.world_size() == 2, "this lab is of two ranks, found {}", group.world_size());
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

namespace {

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

double mebibytes(int64_t bytes) { return double(bytes) / 1048576.0; }

}  // namespace

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

}  // namespace lockstep
