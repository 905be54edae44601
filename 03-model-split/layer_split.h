#pragma once
// A network cut between its layers: the pieces lie on different devices.

#include <memory>
#include <string>
#include <vector>

#include "common/nn/module.h"

namespace lockstep {

/// The numbers of the layers with which stages 1, 2, ... begin: {3, 6} makes the three stages 0 to
/// 2, 3 to 5, and 6 to the end.
using Cuts = std::vector<size_t>;

/// What a layer costs, for one batch.
struct LayerCost {
  std::string name;
  double flops = 0;    // floating-point operations, forward and backward: the estimate
  double seconds = 0;  // forward and backward, as measured
  int64_t parameter_bytes = 0;
};

/// Runs each layer by itself on `stream`, forward and backward, on images of this shape [N,H,W,C].
/// One after another, so that the device need not hold the whole network. The layers' parameters
/// have no memory afterwards.
std::vector<LayerCost> probe_layers(const Layers& layers, const Shape& images, Stream stream);

/// The cuts with which the most expensive of `stages` stages costs least. Every stage gets a layer
/// or more; throws BadInput if there are too few.
Cuts balanced_cuts(const std::vector<double>& costs, int stages);

/// The cuts that --split asks for: "3,6"; "auto" balances the floating-point operations, "measured"
/// the times, "parameters" the bytes of the parameters. Throws BadInput for anything else, for cuts
/// that are not in order or outside the network, and for another number of stages than `stages`.
Cuts choose_cuts(const std::string& text, const Layers& layers, int stages, const Shape& images,
                 Stream stream);

/// A Sequential of which consecutive layers lie on one device each. forward() and backward() are
/// the naive way to use it: one stage works, all others wait.
class LayerSplit final : public Module {
 public:
  struct Stage {
    Stream stream;
    Sequential* layers;
    std::unique_ptr<FlatParameters> parameters;
  };

  /// One stage on each stream, in order. Throws BadInput for cuts that do not make so many stages.
  LayerSplit(Layers layers, const Cuts& cuts, const std::vector<Stream>& streams);

  const std::vector<Stage>& stages() const { return stages_; }
  /// "conv2 to flatten".
  std::string layers_text(size_t stage) const;
  /// "stage 1 (cpu:1, conv2 to flatten)".
  std::string text(size_t stage) const;

  /// x lies on the first stage's device, and there the result comes back to, so that the whole
  /// looks like a network on one device. An error names the stage.
  Tensor forward(const Tensor& x, Context& context) override;
  Tensor backward(const Tensor& dy, Context& context) override;

 private:
  Context& context_of(size_t stage, Context& first) {
    return stage == 0 ? first : *contexts_[stage - 1];
  }
  void share_facts(size_t stage, Context& first);

  std::vector<Stage> stages_;
  std::vector<std::unique_ptr<Context>> contexts_;  // of stages 1, 2, ...
};

/// A copy of x on `context`'s device, made by its stream. Each stream waits for the other where it
/// has to.
Tensor copied_to(const Tensor& x, Context& context);

}  // namespace lockstep
