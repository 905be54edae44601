#pragma once
// Weights in safetensors files: --save and --load.

#include <string>

#include "common/nn/module.h"

namespace lockstep {

/// Writes the network's whole state under PyTorch's names and shapes, atomically. Synchronizes.
void save_weights(const std::string& path, Module& network);

/// Reads such a file into the network, whatever wrote it. F32 and F64 become Real, and a line says
/// so where that changes them; num_batches_tracked (I64) may be missing. Throws BadInput for a
/// malformed file, another dtype, and tensors that are missing, unexpected or of another shape; the
/// network is then unchanged.
void load_weights(const std::string& path, Module& network);

}  // namespace lockstep
