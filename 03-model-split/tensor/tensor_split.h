#pragma once
// The networks, split inside their layers.

#include <optional>
#include <string>
#include <vector>

#include "03-model-split/tensor/parallel_layer.h"
#include "common/app/training_log.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/state.h"

namespace lockstep {

/// A network whose layers are split over the ranks of a world, and which stays the same network
/// (AlexNet's grouped layers, on two GPUs, make another): every rank sees every sample, has a part
/// of the wide layers, and all of the others. Ranks hold the
/// same values wherever an activation or a parameter is whole, so scores and loss are on every
/// rank, and every rank has its own optimizer for its parameters.
///
/// What can be split: in the seed networks, conv2 by output channels and fc1 by its inputs, which
/// are those channels; the layers between them work per channel. In ResNet-18, every residual block
/// ("block1.0"): its conv1 by output channels and its conv2 by input channels. Both need one
/// all-reduce forward and one backward.
class TensorSplit {
 public:
  using Names = std::vector<std::string>;

  /// Rank r works on streams[r], on the r-th device of `world`, which must outlive this object.
  /// `layers` are those to be split; by default all that can be split and divide by the number of
  /// ranks. Throws BadInput for a layer that cannot be split, or not over so many ranks, naming it
  /// and the numbers.
  TensorSplit(const ModelOptions& options, const std::vector<Stream>& streams,
              SingleProcessWorld& world, const std::optional<Names>& layers = {});

  int world_size() const { return trees_.world_size(); }
  /// Rank r's modules, and their parameters: named as in the unsplit network.
  Module& module(int rank) const { return trees_.tree(rank); }
  const FlatParameters& parameters(int rank) const { return *parameters_[rank]; }

  /// Scores [N,classes] on each rank, from the same images [N,H,W,C] on each. Only enqueues. The
  /// contexts are on the ranks' streams; their facts and their state(), which dropout and the loss
  /// read, must be the same. Throws BadInput unless each rank has one tensor and one context; an
  /// error of a rank names the rank and its device.
  Tensors forward(const Tensors& images, const Contexts& contexts);
  /// Given the gradients of the scores, the same on each rank, adds up those of the parameters.
  void backward(const Tensors& scores_gradients, const Contexts& contexts);

  /// How many numbers the unsplit network learns.
  int64_t parameter_count() const;
  /// Sets the first values of all parameters: those of the unsplit network.
  void initialize(Initializer initializer, uint64_t seed);
  /// Sets the ranks' parts of the unsplit network's state. Throws BadInput as load_state_dict()
  /// does; nothing is changed then. Synchronizes. Call it before anything else: the values with
  /// which a network starts do not depend on how it is split.
  void load_full_state(const std::vector<StateTensor>& state);
  /// The unsplit network's state, put together: bit by bit what was loaded, if nothing has happened
  /// since. Tensors that every rank has are taken from rank 0. Synchronizes.
  std::vector<StateTensor> full_state() const;

  /// The names of the layers that are split, in order.
  const Names& split_names() const { return split_; }
  /// All layers, in order, each with its traffic.
  const std::vector<std::unique_ptr<ParallelLayer>>& layers() const { return layers_; }
  /// What the ranks exchanged in training so far, as counted, and what they had to, by the sizes of
  /// the layers.
  Traffic traffic() const;
  const Traffic& predicted_traffic() const { return expected_; }
  /// Adds both, per step, to the summary and the metrics.
  void report(TrainingLog& log) const;

 private:
  class Builder;
  void require_one_per_rank(const Tensors& tensors, const Contexts& contexts) const;

  ModelOptions options_;
  std::unique_ptr<Module> unsplit_;  // without memory: names and shapes
  RankModules trees_;
  Names split_;
  std::vector<std::unique_ptr<ParallelLayer>> layers_;
  std::vector<std::unique_ptr<FlatParameters>> parameters_;
  std::vector<Stream> streams_;
  Traffic expected_;
};

}  // namespace lockstep
