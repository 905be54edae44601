#pragma once
// A network cut between its layers: where to cut, and the pieces on different devices.

#include <memory>
#include <string>
#include <vector>

#include "common/nn/module.h"

namespace lockstep {

/// The numbers of the layers with which stages 1, 2, ... begin: {3, 6} makes the three stages 0 to
/// 2, 3 to 5, and 6 to the end.
using Cuts = std::vector<size_t>;

/// The cost of a layer for one batch.
struct LayerCost {
  std::string name;
  double flops = 0;    // floating-point operations, forward and backward: the estimate
  double seconds = 0;  // forward and backward, as measured
  int64_t parameter_bytes = 0;
};

/// Runs each layer by itself on `stream`, forward and backward, on images of this shape [N,H,W,C].
/// The layers run one after another, so that the device need not hold the whole network. Their
/// parameters have no memory afterwards.
std::vector<LayerCost> probe_layers(const Layers& layers, const Shape& images, Stream stream);

/// The cuts for which the most expensive of `stages` stages is as cheap as possible. Every stage
/// gets at least one layer; throws BadInput if there are fewer layers than stages.
Cuts balanced_cuts(const std::vector<double>& costs, int stages);

/// The cuts that --split asks for: "3,6"; "auto" balances the floating-point operations, "measured"
/// the times, "parameters" the bytes of the parameters. Throws BadInput for any other text, and for
/// cuts that are not in order, outside the network, or do not make `stages` stages. Each device has
/// `chunks` of the stages.
Cuts choose_cuts(const std::string& text, const Layers& layers, int stages, const Shape& images,
                 Stream stream, int chunks = 1);

/// A Sequential cut into stages of consecutive layers, each stage on a device: with p devices,
/// stage k lies on device k modulo p. forward() and backward() are the naive way to use it: one
/// stage works, all others wait.
class StagedNetwork final : public Module {
 public:
  struct Stage {
    Stream stream;
    Sequential* layers;
    std::unique_ptr<FlatParameters> parameters;
  };

  /// Deals the stages out to the streams in order. Throws BadInput if the number of stages, which
  /// follows from the cuts, is no multiple of the number of streams.
  StagedNetwork(Layers layers, const Cuts& cuts, const std::vector<Stream>& streams,
                Precision precision = Precision::real);

  const std::vector<Stage>& stages() const { return stages_; }
  size_t devices() const { return devices_; }
  /// How many stages a device has.
  size_t chunks() const { return stages_.size() / devices_; }
  /// "stage 1 (cpu:1, conv2 to flatten)".
  std::string text(size_t stage) const { return text_of({stage}); }
  /// The same for all stages of a device: "stages 1 and 3 (cpu:1, conv2 to pool2 and fc2)".
  std::string device_text(size_t device) const { return text_of(stages_on(device)); }
  /// "stages 1 and 3".
  static std::string numbers_text(const std::vector<size_t>& stages);
  /// "conv2 to pool2 and fc2".
  std::string layers_text(const std::vector<size_t>& stages) const;
  std::vector<size_t> stages_on(size_t device) const;

  /// x is on the first stage's device, and the result comes back there, so that the whole looks
  /// like a network on one device. An error names the stage.
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

 private:
  Context& context_of(size_t stage, Context& first) {
    return stage == 0 ? first : *contexts_[stage - 1];
  }
  void share_facts(size_t stage, Context& first);
  std::string text_of(const std::vector<size_t>& stages) const;

  size_t devices_;
  std::vector<Stage> stages_;
  std::vector<std::unique_ptr<Context>> contexts_;  // of stages 1, 2, ...
};

}  // namespace lockstep
