// Loads liblockstep_nccl.so, in a build that has it.

#include <dlfcn.h>

#include <optional>

#include "common/comm/nccl/nccl.h"
#include "common/core/error.h"
#include "common/kernels/cuda/cuda.h"

namespace lockstep {
namespace {

struct Loaded {
  std::optional<NcclBackend> backend;
  std::string reason;  // why it could not be loaded
};

#ifdef LOCKSTEP_NCCL_LIBRARY
/// Libraries stay loaded, and loading one again costs nothing.
Loaded load() {
  const cuda::Availability gpus = cuda::availability();
  if (gpus.devices == 0) return {{}, gpus.reason};
  void* library = dlopen(LOCKSTEP_NCCL_LIBRARY, RTLD_NOW | RTLD_NODELETE);
  if (library == nullptr) return {{}, fmt::format("NCCL cannot be loaded: {}", dlerror())};
  const auto fill =
      reinterpret_cast<decltype(&lockstep_nccl_backend)>(dlsym(library, "lockstep_nccl_backend"));
  if (fill == nullptr) return {{}, fmt::format("liblockstep_nccl.so: {}", dlerror())};
  NcclBackend backend{};
  fill(backend);
  return {backend, ""};
}
#else
Loaded load() { return {{}, "this build has no NCCL"}; }
#endif

NcclBackend backend() {
  const Loaded loaded = load();
  if (!loaded.backend) {
    fail<EnvironmentError>("no NCCL: {}; use one GPU or CPU devices", loaded.reason);
  }
  return *loaded.backend;
}

}  // namespace

std::string nccl_availability() { return load().reason; }

std::string nccl_unique_id() { return backend().unique_id(); }

std::unique_ptr<Communicator> make_nccl_rank(Device& device, int rank, int world_size,
                                             const std::string& id, double timeout_seconds) {
  return backend().make_rank(device, rank, world_size, id, timeout_seconds);
}

}  // namespace lockstep
