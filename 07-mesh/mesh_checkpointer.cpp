#include "07-mesh/mesh_checkpointer.h"

namespace lockstep {

/// A unit's numbers [length] of this rank's parts of layers, from the shards of all ranks.
Tensor MeshCheckpointer::gathered(const Unit& unit, const Tensor& kept) const {
  if (kept.elements() == unit.length()) return kept;
  const Tensor all = Tensor::empty(parallel_.passes(), {unit.length()});
  parallel_.along({Axis::shard}).all_gather(parallel_.passes(), kept, all);
  return all;
}

/// What this rank writes of so many numbers: the ranks of its stage share them out.
RingPart MeshCheckpointer::share_of(int64_t count) const {
  const DeviceMesh& mesh = parallel_.mesh();
  int before = 0;  // ranks of the stage
  for (int rank = 0; rank < comm().rank(); ++rank) {
    const int stage = mesh.shape().coordinate(rank, Axis::pipeline);
    before += stage == mesh.coordinate(Axis::pipeline) ? 1 : 0;
  }
  return ring_part(count, before, comm().world_size() / mesh.size(Axis::pipeline));
}

std::vector<ShardPiece> MeshCheckpointer::pieces() const {
  std::vector<ShardPiece> pieces;
  for (size_t u = 0; u < network().units().size(); ++u) {
    const Unit& unit = *network().units()[u];
    for (const NamedNumbers& kept : kept_of(u)) {
      const std::vector<Real> numbers = gathered(unit, kept.numbers).to_host();
      for (size_t i = 0; i < unit.in_order().size(); ++i) {
        const Parameter& p = *unit.in_order()[i];
        const auto begin = numbers.begin() + unit.ranges()[i].first;
        const std::vector<Real> whole =
            parallel_.whole_numbers(p, {begin, begin + unit.ranges()[i].count});
        const RingPart mine = share_of(std::ssize(whole));
        if (mine.count == 0) continue;
        const auto first = whole.begin() + mine.first;
        pieces.push_back({kept.state, p.name, mine.first, {first, first + mine.count}});
      }
    }
  }
  return pieces;
}

std::vector<StateTensor> MeshCheckpointer::parameters() const {
  std::vector<StateTensor> all;
  for (const Parameter* p : parallel_.unsplit().parameters()) {
    all.push_back({.name = p->name, .shape = torch_shape(*p)});
  }
  return all;
}

std::map<std::string, double> MeshCheckpointer::steps() const {
  const std::map<std::string, double> mine = ShardedCheckpointer::steps();
  if (mine.empty()) return mine;
  std::vector<int64_t> counts;  // of all stages
  for (const Parameter* p : parallel_.unsplit().parameters()) {
    const auto found = mine.find(p->name);
    counts.push_back(found == mine.end() ? 0 : int64_t(found->second));
  }
  parallel_.from_its_stage(counts);
  std::map<std::string, double> all;
  for (size_t i = 0; i < counts.size(); ++i) {
    all[parallel_.unsplit().parameters()[i]->name] = double(counts[i]);
  }
  return all;
}

/// Without those that are other stages'.
std::map<std::string, double> MeshCheckpointer::own_steps(
    const std::map<std::string, double>& saved) const {
  std::map<std::string, double> own = saved;
  for (const Parameter* p : parallel_.unsplit().parameters()) own.erase(p->name);
  for (const Parameter* p : optimizer().parameters()) {
    if (saved.contains(p->name)) own[p->name] = saved.at(p->name);
  }
  return own;
}

std::vector<Real> MeshCheckpointer::read_from(const ShardedCheckpoint& checkpoint,
                                              const std::string& state, const Parameter& parameter,
                                              FlatRange elements) const {
  const int64_t all = parallel_.of_unsplit(parameter).shape.elements();
  const std::vector<Real> part =
      parallel_.part_numbers(parameter, checkpoint.read(state, parameter.name, {0, all}));
  const auto first = part.begin() + elements.first;
  return {first, first + elements.count};
}

}  // namespace lockstep
