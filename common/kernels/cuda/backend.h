#pragma once
// The border between the programs and liblockstep_cuda.so, which holds the whole CUDA backend.
//
// cuBLAS and cuDNN take a tenth of a second and 150 MiB just to be loaded, and a program that is
// linked with them does not start where they are missing. So we use them through a library of our
// own, which is loaded only where there is a driver.

#include "common/kernels/cuda/cuda.h"

namespace lockstep::cuda {

/// The functions of cuda.h, as the library implements them.
struct Backend {
  Availability (*availability)();
  std::unique_ptr<Device> (*open)(int index, const DeviceOptions& options);
};

/// The one function that the library exports.
extern "C" void lockstep_cuda_backend(Backend& backend);

}  // namespace lockstep::cuda
