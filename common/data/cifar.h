#pragma once
// The binary version of CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html): records of 3073
// bytes, a label and 32x32 pixels, all red, then all green, then all blue.

#include <filesystem>
#include <vector>

#include "common/data/dataset.h"

namespace lockstep {

/// Reads `files` (plain or ".gz") one after another, pixels turned from planes to [32, 32, 3].
/// Throws BadInput, naming the file, if it is empty or not a whole number of records or has a label
/// above 9; EnvironmentError if it cannot be opened. Name and normalisation of the result are left
/// to the caller.
Dataset read_cifar10(const std::vector<std::filesystem::path>& files);

/// One image from planes [channels, pixels] to channels last [pixels, channels].
void planes_to_channels_last(const uint8_t* planes, int64_t channels, int64_t pixels, uint8_t* out);

}  // namespace lockstep
