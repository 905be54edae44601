#pragma once
// Checkpoints of a mesh: stage 06's files, whatever the mesh that wrote them.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "06-fully-sharded/sharded_checkpointer.h"
#include "07-mesh/mesh_parallel.h"

namespace lockstep {

/// Says where a rank's piece lies in the whole parameter. The piece is the elements `wanted` of its
/// part, one or more. The runs have them in order and are as long as possible. The shapes are equal
/// or differ in one extent, of which the rank at this place along `tensor` has its range. Elements
/// count in memory order.
std::vector<FlatRange> runs_in_whole(const Shape& whole, const Shape& part, int tensor_place,
                                     FlatRange wanted);

/// Every rank writes an equal share of each parameter of its stage. For that the ranks put the
/// parameters together, one by one. This costs messages as large as the stage and its optimizer's
/// state, and memory for one unit. In return any mesh, and stage 06, reads what any other has
/// written.
class MeshCheckpointer final : public ShardedCheckpointer {
 public:
  /// `parallel` must outlive this object.
  template <class... Base>
  MeshCheckpointer(const MeshParallel& parallel, const Optimizer& optimizer, Base&&... base)
      : ShardedCheckpointer(parallel.sharded(), optimizer, std::forward<Base>(base)...),
        parallel_(parallel) {}

 private:
  std::vector<ShardPiece> pieces() const override;
  std::vector<StateTensor> parameters() const override;
  std::map<std::string, double> steps() const override;
  std::map<std::string, double> own_steps(
      const std::map<std::string, double>& saved) const override;
  std::vector<StateTensor> running() const override { return parallel_.running(); }
  void check(const std::vector<StateTensor>& saved) const override {
    check_state_dict(parallel_.unsplit(), saved);
  }
  std::vector<Real> read_from(const ShardedCheckpoint& checkpoint, const std::string& state,
                              const Parameter& parameter, FlatRange elements) const override;
  /// The number of ranks along the sample axes; 0 if these are all ranks.
  int64_t sample_parts() const override {
    const int64_t parts = parallel_.along(kSampleAxes).world_size();
    return parts == comm().world_size() ? 0 : parts;
  }
  void load_running(const std::map<std::string, StateTensor>& running) const override {
    parallel_.load_running(running);
  }

  Tensor gathered(const Unit& unit, const Tensor& kept) const;
  RingPart share_of(int64_t count) const;

  const MeshParallel& parallel_;
};

}  // namespace lockstep
