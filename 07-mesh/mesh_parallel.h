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

/// In which groups of ranks a gradient is averaged: along `reduced`, whose ranks keep a shard of it
/// each if that is `shard`, then along `replicas`, whose ranks have the same shard. An axis of one
/// rank costs no message: `replicas` is nothing then.
struct AveragingAxes {
  Axis reduced;
  std::optional<Axis> replicas{};
};
AveragingAxes averaging_axes(const MeshShape& shape);

/// Along which axes ranks update other parts of the network, so that the norm of its gradient needs
/// the squares of all of them.
Axes cut_along(ShardKind kind);
/// Whether a rank adds its squares of a parameter's gradient to the norm of the whole network's.
/// The parameter has the shape `here` on the rank, whose place along `tensor` is given, and `whole`
/// in the unsplit network.
bool counts_in_norm(const Shape& here, const Shape& whole, int tensor_place);

/// Names of the layers with parameters, by what a rank along `tensor` has of them: a part, or all.
struct TensorLayers {
  std::vector<std::string> split{}, copied{};
};

/// One rank's part of a network. Which messages a parameter's gradient needs follows from what the
/// ranks of an axis have of it:
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

  // What stage 06's training loop asks its network for.
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
  /// Those of all ranks along `tensor`, each of which knows its own parts of layers only.
  std::vector<HealthTensor> healths(const HealthTensor& mine, Context& context) {
    return ranks_.healths(mine, context);
  }
  /// Of the whole network, whatever stage this rank is.
  const TensorLayers& layers_along_tensor() const { return layers_; }
  /// What layers along `tensor` have exchanged.
  SplitRanks& split_ranks() { return ranks_; }
  /// Null without a pipeline.
  RankPipeline* stage() const { return stage_; }
  /// Seconds that this rank's training passes have waited for messages along an axis. Along
  /// `tensor` split_ranks().seconds_queued() is in it. Waits for the last one.
  double seconds_waited(Axis axis);

  // For files, which have the whole network's numbers.

  using ReadTensor = std::function<void(StateTensor& tensor)>;
  /// Sets all parameters: `read` gives each of the whole network's its values, on all ranks.
  void load_parameters(const ReadTensor& read);
  /// Calls use(whole) for each of them, on all ranks. Synchronizes.
  void visit_parameters(const std::function<void(StateTensor whole)>& use) const;

  /// Without memory: names and shapes.
  Module& unsplit() const { return *unsplit_; }
  const Parameter& of_unsplit(const Parameter& p) const { return *of_unsplit_.at(p.name); }
  /// The whole numbers of which this rank along `tensor` has `part`, or a copy if the shapes are
  /// the same. All ranks along `tensor` call it. Synchronizes.
  std::vector<Real> whole_of(std::vector<Real> part, const Shape& part_shape,
                             const Shape& whole_shape) const;
  /// Running statistics, of the whole network. All ranks call it. Synchronizes.
  std::vector<StateTensor> running() const;
  /// Sets this rank's part of them.
  void load_running(std::map<std::string, StateTensor> whole) const;
  /// Numbers that one stage knows, and zeros on all others, become those numbers on all. All ranks
  /// along `pipeline` call it. Synchronizes.
  template <class T>
  void from_its_stage(std::vector<T>& numbers) const;
  /// What is enqueued on the passes' stream from now on comes after all messages so far. Then that
  /// stream may make a call itself, of whatever group: one message at a time is under way, so that
  /// no rank can wait for one that waits for it (device_mesh.h).
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

/// Rank 0 reads the file, and sends a tensor after another to all ranks, those of `comm`, which
/// keep their parts. Errors as in lockstep::load_weights(), on all ranks. Does nothing if the path
/// is empty.
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
