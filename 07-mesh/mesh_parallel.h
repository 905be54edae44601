#pragma once
// A network on a mesh of ranks: cut between its layers along the axis `pipeline`, split inside them
// along `tensor`, the parameters shared out along `shard`, and all of that copied along `data`.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "03-model-split/tensor/tensor_split.h"
#include "06-fully-sharded/fully_sharded.h"
#include "07-mesh/device_mesh.h"
#include "07-mesh/rank_pipeline.h"
#include "common/nn/models.h"

namespace lockstep {

/// The axes along which ranks have other samples: a gradient is averaged over them.
inline const Axes kSampleAxes{Axis::data, Axis::shard};

/// The axes along which a gradient is averaged: first `reduced`, then `replicas`. If `reduced` is
/// `shard`, its ranks keep a shard of the gradient each. Ranks along `replicas` have the same
/// shard. An axis of one rank costs no message: `replicas` is empty then.
struct AveragingAxes {
  Axis reduced;
  std::optional<Axis> replicas{};
};
AveragingAxes averaging_axes(const MeshShape& shape);

/// The axes along which ranks update different parts of the network: the norm of its gradient needs
/// the squares of all these ranks.
Axes cut_along(ShardKind kind);
/// Whether a rank adds its squares of a parameter's gradient to the norm for the whole network. The
/// parameter has the shape `here` on the rank, and `whole` in the unsplit network. `tensor_place`
/// is the rank's place along `tensor`.
bool counts_in_norm(const Shape& here, const Shape& whole, int tensor_place);

/// Names of layers with parameters: a rank along `tensor` has a part of `split`, all of `copied`.
struct TensorLayers {
  std::vector<std::string> split{}, copied{};
};

/// One rank's part of a network. A parameter's gradient needs messages that depend on what the
/// ranks of an axis have of the parameter:
///
///            samples    layer        gradient in backward    its norm
///   data     their own  a copy       averaged                counts once
///   shard    their own  a copy       averaged, then cut      added up over the shards
///   tensor   the same   a part       the rank's own          added up over the parts
///   tensor   the same   a copy       the same on all         counts once
///   pipeline the same   another one  the rank's own          added up over the stages
class MeshParallel {
 public:
  /// Replaces the model's network, which `options` describe, by this rank's part. `mesh` must
  /// outlive this object. `plan` is that of a pipeline. Throws BadInput, on all ranks, where no
  /// layer divides by the tensor axis, or the pipeline has more stages than there are layers with
  /// parameters.
  MeshParallel(Model& model, const ModelOptions& options, DeviceMesh& mesh, Stream passes,
               Stream communication, const ShardingOptions& sharding,
               const PipelinePlan& plan = {});

  /// The network as stage 06 knows it, of this rank's parts of layers.
  FullyShardedDataParallel& sharded() const { return sharded_; }
  /// The number of learnt values of the whole network.
  int64_t count() const;

  /// Sets the first values of all parameters: those of the unsplit network.
  void initialize(Initializer initializer, uint64_t seed);

  // The training loop of stage 06 calls these functions.
  Optimizer optimizer(const OptimizerRule& rule) const { return sharded_.optimizer(rule); }
  Tensor loss() const { return sharded_.loss(); }
  const HealthTensor& own_health() const { return sharded_.own_health(); }
  void broadcast_buffers() {
    sharded_.broadcast_buffers();
    await_messages();  // the evaluation that follows makes calls on the stream of its passes
  }
  void gather_parameters() { sharded_.gather_parameters(); }
  /// Scales the gradients by the norm of the whole network's gradient.
  ClipByNorm clip_by_norm(double most) const;
  /// The healths of all ranks along `tensor`; each rank knows only its own parts of layers.
  std::vector<HealthTensor> healths(const HealthTensor& mine, Context& context) {
    return ranks_.healths(mine, context);
  }
  /// The layers of the whole network, whatever stage this rank is.
  const TensorLayers& layers_along_tensor() const { return layers_; }
  /// The ranks along `tensor`, with what their layers have exchanged.
  SplitRanks& split_ranks() { return ranks_; }
  /// Null without a pipeline.
  RankPipeline* stage() const { return stage_; }
  /// Seconds that this rank's training passes have waited for messages along an axis. Along
  /// `tensor` this includes split_ranks().seconds_queued(). Waits for the last one.
  double seconds_waited(Axis axis);

  // For files, which have the whole network's numbers.

  using ReadTensor = std::function<void(StateTensor& tensor)>;
  /// Sets all parameters: `read` fills in the values of each whole parameter, on all ranks.
  void load_parameters(const ReadTensor& read);
  /// Calls use(whole) for each whole parameter, on all ranks. Synchronizes.
  void visit_parameters(const std::function<void(StateTensor whole)>& use) const;

  /// The unsplit network, without memory: names and shapes.
  Module& unsplit() const { return *unsplit_; }
  const Parameter& of_unsplit(const Parameter& p) const { return *of_unsplit_.at(p.name); }
  /// Joins the parts of all ranks along `tensor`; `part` is this rank's. Copies `part` if the
  /// shapes are the same. All ranks along `tensor` call it. Synchronizes.
  std::vector<Real> whole_of(std::vector<Real> part, const Shape& part_shape,
                             const Shape& whole_shape) const;
  /// Running statistics, of the whole network. All ranks call it. Synchronizes.
  std::vector<StateTensor> running() const;
  /// Sets this rank's part of the running statistics.
  void load_running(std::map<std::string, StateTensor> whole) const;
  /// Gives all ranks the numbers that one stage knows; the other stages bring zeros. All ranks
  /// along `pipeline` call it. Synchronizes.
  template <class T>
  void from_its_stage(std::vector<T>& numbers) const;
  /// Later work on the passes' stream waits for all messages so far. Then that stream may make a
  /// call itself, in any group. One message at a time is under way, so no two ranks can wait for
  /// each other (device_mesh.h).
  void await_messages() const { passes_.wait(communication_.record()); }
  Communicator& along(const Axes& axes) const { return mesh_.along(axes); }
  Stream passes() const { return passes_; }
  const DeviceMesh& mesh() const { return mesh_; }

 private:
  void split(Model& model, const ModelOptions& options);
  void cut(Model& model, const ModelOptions& options);
  FullyShardedDataParallel& shard(Model& model, ShardingOptions options);
  ExchangeTexts exchange_in_stage() const;
  /// PyTorch's shape of a tensor of this rank's network in the unsplit one.
  Shape whole_shape(const std::string& name, const Shape& part) const;
  StateTensor blank(const std::string& name) const;
  void set(Parameter& p, const std::vector<Real>& whole) const;
  StateTensor whole_of(StateTensor part) const;
  std::vector<Tensor> counted_gradients() const;

  DeviceMesh& mesh_;
  Stream passes_, communication_;
  std::unique_ptr<Module> unsplit_;                     // without memory: names and shapes
  std::map<std::string, const Parameter*> of_unsplit_;  // by name
  std::map<std::string, Shape> whole_shapes_;           // PyTorch's, by name
  TensorLayers layers_;
  SplitRanks ranks_;
  std::vector<std::vector<std::string>> names_;  // of the stages' parameters
  FullyShardedDataParallel& sharded_;
  RankPipeline* stage_ = nullptr;
};

/// Rank 0 reads the file and sends one tensor after another to all ranks of `comm`, which keep
/// their parts. Errors as in lockstep::load_weights(), on all ranks. Does nothing if the path is
/// empty.
void load_weights(ProcessGroup& group, Communicator& comm, const std::string& path,
                  MeshParallel& network);
/// Puts the weights together, and rank 0 writes the file, which any other stage loads. All ranks
/// call it; it does nothing if the path is empty.
void save_weights(ProcessGroup& group, const std::string& path, MeshParallel& network);

template <class T>
void MeshParallel::from_its_stage(std::vector<T>& numbers) const {
  if (stage_ == nullptr || numbers.empty()) return;
  await_messages();
  const auto all = BasicTensor<T>::from_host(passes_, {std::ssize(numbers)}, numbers);
  mesh_.along({Axis::pipeline}).all_reduce(passes_, all);
  numbers = all.to_host();
}

}  // namespace lockstep
