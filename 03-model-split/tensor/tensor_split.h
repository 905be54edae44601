#pragma once
// The networks, split inside their layers, as the options of this program say.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "03-model-split/tensor/row_and_column.h"
#include "common/comm/process_group.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/state_dict.h"
#include "common/options/rank_options.h"
#include "common/training/program.h"
#include "common/training/training_log.h"

namespace lockstep {

/// Rank `rank`'s part of a tensor of the unsplit network, in PyTorch's layout. The shapes differ in
/// at most one extent: the part has the rank's range of this extent.
std::vector<Real> part_of(const std::vector<Real>& whole, const Shape& whole_shape,
                          const Shape& part_shape, int rank);
/// Joins the parts again: `parts` has all ranks' parts, one after another.
std::vector<Real> joined(const std::vector<Real>& parts, const Shape& whole_shape,
                         const Shape& part_shape);
/// Gathers the numbers of all ranks of `comm`, in the order of the ranks. Synchronizes.
std::vector<Real> gathered(const std::vector<Real>& mine, Stream stream, Communicator& comm);
/// Gives all ranks rank 0's numbers. Synchronizes.
template <class T>
void broadcast(std::vector<T>& numbers, Stream stream, Communicator& comm) {
  if (numbers.empty()) return;
  const auto all = BasicTensor<T>::from_host(stream, {std::ssize(numbers)}, numbers);
  comm.broadcast(stream, all, 0);
  numbers = all.to_host();
}

/// One rank's share of a network. The split network computes the same (AlexNet's grouped layers, on
/// two GPUs, compute something else). Every rank sees every sample, has a part of the wide layers
/// and the whole of all others, under the unsplit network's names. Whole activations and parameters
/// have the same values on all ranks. So every rank has scores and loss, and its own optimizer for
/// its parameters.
///
/// These layers can be split. In the seed networks: conv2 by output channels, and fc1 by its
/// inputs, which are these channels; the layers between them work per channel. In ResNet-18: every
/// residual block ("block1.0"), its conv1 by output channels and its conv2 by input channels. In
/// the perceptron: all linear layers but the last, in pairs: fc1 by outputs and fc2 by inputs, fc3
/// and fc4 alike. Each pair needs one all-reduce forward and one backward.
class TensorSplit final : public Sequential {
 public:
  using Names = std::vector<std::string>;

  /// `ranks` must outlive this object. `layers` are those to split; by default all that can be
  /// split and divide by the number of ranks. Throws BadInput, naming the layer and the numbers, if
  /// a layer cannot be split, or not over so many ranks. Also if none divides by the ranks.
  TensorSplit(const ModelOptions& options, SplitRanks& ranks,
              const std::optional<Names>& layers = {});

  /// The names of the layers that are split, in order.
  const Names& split_names() const { return split_; }
  /// The number of learnt values of the unsplit network.
  int64_t parameter_count() const;

  /// Sets the first values of all parameters: those of the unsplit network.
  void initialize(Initializer initializer, uint64_t seed);
  /// Sets this rank's parts of the unsplit network's state. Throws BadInput as load_state_dict()
  /// does; nothing is changed then. Synchronizes. Call it before anything else: the values with
  /// which a network starts do not depend on how it is split.
  void load_full_state(const std::vector<StateTensor>& state);
  /// Puts the unsplit network's state together, on all ranks; all call it. The bits are those
  /// loaded, if nothing has happened since. Whole tensors are this rank's own. Synchronizes.
  std::vector<StateTensor> full_state();
  /// Throws BadInput for a state that is not the unsplit network's.
  void check_full_state(const std::vector<StateTensor>& state) const;

  /// Makes the optimizer of `parameters`, which are this network's. If the loss is scaled, all
  /// ranks skip a step in which a gradient of one rank has overflowed.
  Optimizer optimizer(const FlatParameters& parameters, const OptimizerRule& rule);
  /// Does the same as Sequential's; with fp16 then adds up the overflows of all ranks.
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

  SplitRanks& ranks() const { return ranks_; }

 private:
  void choose(const std::optional<Names>& asked, const Layers& layers);
  void append(std::unique_ptr<Module> layer);
  void append_split(std::unique_ptr<Module> whole);
  void make_whole(const Module& before);

  StateTensor my_part(const StateTensor& whole, const Shape& shape) const;

  std::unique_ptr<Module> unsplit_;  // without memory: names and shapes
  ModelKind kind_;
  SplitRanks& ranks_;
  Names split_;
  Tensor gradients_;            // for fp16, and
  OverflowNumber overflow_;     // what this rank found in them
  int64_t split_channels_ = 0;  // of the activation after the layers so far; 0: it is whole
};

struct TensorProgramOptions : Options {
  RankOptions ranks;
  std::vector<std::string> layers{"auto"};  // or their names

  void add_to(OptionParser& parser) override;
  bool splits_network() const override { return true; }
};

/// Replaces the model's network by this rank's share of it, split inside the layers that the
/// options name. Throws BadInput, on all ranks, where it cannot be split in this way.
TensorSplit& split_network(Model& model, const Dataset& images, SplitRanks& ranks,
                           ProcessGroup& group, const TensorProgramOptions& options);

/// Rank 0 reads the file and sends every tensor to all ranks, which keep their parts. Errors as in
/// lockstep::load_weights(), on all ranks. Does nothing if the path is empty.
void load_weights(ProcessGroup& group, const std::string& path, TensorSplit& network);
/// Puts the weights together, and rank 0 writes the file, which any other stage loads. All ranks
/// call it; it does nothing if the path is empty.
void save_weights(ProcessGroup& group, const std::string& path, TensorSplit& network);

/// Adds to the summary what the layers exchanged per step, as counted and by sizes, and how long
/// the passes waited.
void report(TensorSplit& network, TrainingLog& log);

}  // namespace lockstep
