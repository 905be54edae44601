// NCCL in a build with it: loads liblockstep_nccl.so (backend.h says why it is loaded).

#include <dlfcn.h>

#include "common/comm/nccl/backend.h"
#include "common/comm/nccl/nccl.h"
#include "common/core/error.h"
#include "common/kernels/cuda/cuda.h"

namespace lockstep {
namespace {

struct Loaded {
  decltype(&lockstep_make_nccl_world) make_world = nullptr;
  std::string reason;  // why there is none
};

/// Libraries stay loaded, and loading one again costs nothing.
Loaded load() {
  const cuda::Availability gpus = cuda::availability();
  if (gpus.devices == 0) return {nullptr, gpus.reason};
  void* library = dlopen(LOCKSTEP_NCCL_LIBRARY, RTLD_NOW | RTLD_NODELETE);
  if (library == nullptr) return {nullptr, fmt::format("NCCL cannot be loaded: {}", dlerror())};
  const auto make_world = reinterpret_cast<decltype(&lockstep_make_nccl_world)>(
      dlsym(library, "lockstep_make_nccl_world"));
  if (make_world == nullptr) {
    return {nullptr, fmt::format("liblockstep_nccl.so: {}", dlerror())};
  }
  return {make_world, ""};
}

}  // namespace

std::string nccl_availability() { return load().reason; }

std::unique_ptr<LocalWorld> make_nccl_world(const std::vector<Device*>& devices,
                                            double deadline_seconds) {
  const Loaded loaded = load();
  if (loaded.make_world == nullptr) {
    fail<EnvironmentError>("no NCCL: {}; use one GPU or CPU devices", loaded.reason);
  }
  return std::unique_ptr<LocalWorld>(loaded.make_world(devices, deadline_seconds));
}

}  // namespace lockstep
