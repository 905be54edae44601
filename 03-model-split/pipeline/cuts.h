#pragma once
// Where a network is cut: between which layers.

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
/// The layers run one after another, so that the device need not hold the whole network. Their
/// parameters have no memory afterwards.
std::vector<LayerCost> probe_layers(const Layers& layers, const Shape& images, Stream stream);

/// The cuts with which the most expensive of `stages` stages costs least. Every stage gets a layer
/// or more; throws BadInput if there are too few.
Cuts balanced_cuts(const std::vector<double>& costs, int stages);

/// The cuts that --split asks for: "3,6"; "auto" balances the floating-point operations, "measured"
/// the times, "parameters" the bytes of the parameters. Throws BadInput for anything else, for cuts
/// that are not in order or outside the network, and for cuts that do not make `stages` stages, of
/// which each device has `chunks`.
Cuts choose_cuts(const std::string& text, const Layers& layers, int stages, const Shape& images,
                 Stream stream, int chunks = 1);

}  // namespace lockstep
