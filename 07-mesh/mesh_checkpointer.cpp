#include "07-mesh/mesh_checkpointer.h"

#include <algorithm>

namespace lockstep {

std::vector<FlatRange> runs_in_whole(const Shape& whole, const Shape& part, int tensor_place,
                                     FlatRange wanted) {
  // [task 07.4] a piece of a part
  if (part == whole) return {wanted};  // a copy, at every place
  int64_t rows = 1;                    // in front of the extent that is split
  for (int axis = 0; whole[axis] == part[axis]; ++axis) rows *= whole[axis];
  const int64_t length = part.elements() / rows, stride = whole.elements() / rows;
  std::vector<FlatRange> runs;
  for (int64_t at = wanted.first; at < wanted.end(); at += runs.back().count) {
    const int64_t row = at / length, end = std::min((row + 1) * length, wanted.end());
    runs.push_back({row * stride + tensor_place * length + at % length, end - at});
  }
  return runs;
  // [end 07.4]
}

/// A unit's numbers [length] of this rank's parts of layers, from the shards of all ranks.
Tensor MeshCheckpointer::gathered(const Unit& unit, const Tensor& kept) const {
  if (kept.elements() == unit.length()) return kept;
  parallel_.await_messages();
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
        const std::vector<Real> whole = parallel_.whole_of({begin, begin + unit.ranges()[i].count},
                                                           p.shape, parallel_.of_unsplit(p).shape);
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

/// One read, from the first element to the last.
std::vector<Real> MeshCheckpointer::read_from(const ShardedCheckpoint& checkpoint,
                                              const std::string& state, const Parameter& parameter,
                                              FlatRange elements) const {
  const std::vector<FlatRange> runs =
      runs_in_whole(parallel_.of_unsplit(parameter).shape, parameter.shape,
                    parallel_.along({Axis::tensor}).rank(), elements);
  const int64_t first = runs.front().first;
  const std::vector<Real> read =
      checkpoint.read(state, parameter.name, {first, runs.back().end() - first});
  std::vector<Real> numbers;
  for (const FlatRange& run : runs) {
    const auto begin = read.begin() + run.first - first;
    numbers.insert(numbers.end(), begin, begin + run.count);
  }
  return numbers;
}

}  // namespace lockstep
