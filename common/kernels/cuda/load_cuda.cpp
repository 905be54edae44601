// The CUDA backend in a build with CUDA: loads it (cuda.h says why it is loaded and not linked).

#include <dlfcn.h>

#include <optional>

#include "common/core/error.h"
#include "common/kernels/cuda/cuda.h"

namespace lockstep::cuda {
namespace {

constexpr const char* kNoDriver = "no NVIDIA driver";

struct Loaded {
  std::optional<Backend> backend;
  std::string reason;  // why there is none
};

/// Libraries stay loaded, and loading one again costs nothing.
Loaded load() {
  if (dlopen("libcuda.so.1", RTLD_LAZY) == nullptr) return {{}, kNoDriver};
  void* library = dlopen(LOCKSTEP_CUDA_LIBRARY, RTLD_NOW | RTLD_NODELETE);
  if (library == nullptr)
    return {{}, fmt::format("the CUDA backend cannot be loaded: {}", dlerror())};
  const auto fill =
      reinterpret_cast<decltype(&lockstep_cuda_backend)>(dlsym(library, "lockstep_cuda_backend"));
  if (fill == nullptr) return {{}, fmt::format("liblockstep_cuda.so: {}", dlerror())};
  Backend backend{};
  fill(backend);
  return {backend, ""};
}

}  // namespace

Availability availability() {
  const Loaded loaded = load();
  if (loaded.backend) return loaded.backend->availability();
  return {.reason = loaded.reason, .unusable = loaded.reason != kNoDriver};
}

std::unique_ptr<Device> open_cuda_device(int index, const DeviceOptions& options) {
  const Loaded loaded = load();
  if (!loaded.backend) {
    fail<EnvironmentError>("cuda:{}: {}; use --devices cpu:0", index, loaded.reason);
  }
  return loaded.backend->open(index, options);
}

}  // namespace lockstep::cuda
