#pragma once
// The CUDA backend as the rest of the project sees it: two functions, of load_cuda.cpp or, in a
// build without CUDA, of no_cuda.cpp. No other code asks whether CUDA is there.
//
// The backend itself is in liblockstep_cuda.so. cuBLAS and cuDNN take a tenth of a second and 150
// MiB just to be loaded, and a program that is linked with them does not start where they are
// missing. So we use them through a library of our own, which is loaded only where there is a
// driver.

#include <memory>
#include <string>

#include "common/core/device.h"

namespace lockstep::cuda {

/// The GPUs that this process can use, or the reason why there are none.
struct Availability {
  int devices = 0;
  std::string reason{};   // "built without CUDA", "no driver", ...; empty if devices > 0
  bool unusable = false;  // a driver is there, and the reason says what is wrong with it
};
Availability availability();

/// Opens cuda:`index`. Throws EnvironmentError if there is no such GPU.
std::unique_ptr<Device> open_cuda_device(int index, const DeviceOptions& options);

/// The same two functions, as the library implements them.
struct Backend {
  Availability (*availability)();
  std::unique_ptr<Device> (*open)(int index, const DeviceOptions& options);
};

/// The one function that the library exports.
extern "C" void lockstep_cuda_backend(Backend& backend);

}  // namespace lockstep::cuda
