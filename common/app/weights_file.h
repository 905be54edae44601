#pragma once
// Weights in safetensors files: --save and --load.

#include <functional>
#include <string>
#include <vector>

#include "common/nn/module.h"
#include "common/nn/state.h"

namespace lockstep {

/// Writes a network's whole state under PyTorch's names and shapes, atomically. Synchronizes.
void save_weights(const std::string& path, Module& network);
void save_weights(const std::string& path, const std::vector<StateTensor>& state);

/// Reads such a file into the network, whatever wrote it. F32 and F64 become Real, and a line says
/// so where that changes them; num_batches_tracked (I64) may be missing. Throws BadInput for a
/// malformed file, another dtype, and tensors that are missing, unexpected or of another shape; the
/// network is then unchanged.
void load_weights(const std::string& path, Module& network);
/// The same for a network that is set by `load`, which throws where the state does not fit.
void load_weights(const std::string& path,
                  const std::function<void(const std::vector<StateTensor>&)>& load);

}  // namespace lockstep
