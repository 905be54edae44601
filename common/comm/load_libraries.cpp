// The libraries that not every program pays for: Gloo and NCCL, each with what uses it, are loaded
// where they are asked for. Debian 13 builds Gloo with MPI, whose libraries take 25 ms to load and
// complain about little memory by themselves; NCCL takes 200 MiB, and not every machine has it.

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "common/comm/host_transport.h"
#include "common/comm/nccl_communicator.h"
#include "common/core/error.h"
#include "common/kernels/cuda/cuda.h"

// In a build without the library:
#ifndef LOCKSTEP_GLOO_LIBRARY
#define LOCKSTEP_GLOO_LIBRARY ""
#endif
#ifndef LOCKSTEP_NCCL_LIBRARY
#define LOCKSTEP_NCCL_LIBRARY ""
#endif

namespace lockstep {
namespace {

/// The one function that a library exports, or why it cannot be called.
template <class Function>
struct Loaded {
  Function* function = nullptr;
  std::string reason{};
};

/// Libraries stay loaded, and loading one again costs nothing.
template <class Function>
Loaded<Function> load(const std::string& what, const std::string& path, const char* name) {
  if (path.empty()) return {nullptr, "this build has no " + what};
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_NODELETE);
  if (library == nullptr) return {nullptr, fmt::format("{} cannot be loaded: {}", what, dlerror())};
  void* const function = dlsym(library, name);
  const std::string file = std::filesystem::path(path).filename();
  if (function == nullptr) return {nullptr, fmt::format("{}: {}", file, dlerror())};
  return {reinterpret_cast<Function*>(function), ""};
}

auto load_gloo() {
  return load<decltype(lockstep_connect_gloo)>("Gloo", LOCKSTEP_GLOO_LIBRARY,
                                               "lockstep_connect_gloo");
}

auto load_nccl() {
  using Function = decltype(lockstep_nccl_backend);
  const std::string path = LOCKSTEP_NCCL_LIBRARY;
  if (!path.empty()) {
    const cuda::Availability gpus = cuda::availability();
    if (gpus.devices == 0) return Loaded<Function>{nullptr, gpus.reason};
  }
  return load<Function>("NCCL", path, "lockstep_nccl_backend");
}

NcclBackend nccl_backend() {
  const auto loaded = load_nccl();
  if (loaded.function == nullptr) {
    fail<EnvironmentError>("no NCCL: {}; leave --backend out", loaded.reason);
  }
  NcclBackend backend{};
  loaded.function(backend);
  return backend;
}

}  // namespace

std::string gloo_availability() { return load_gloo().reason; }

std::shared_ptr<HostTransport> connect_gloo(int rank, int world_size, const RendezvousStore& store,
                                            const std::string& host, double timeout_seconds) {
  const auto loaded = load_gloo();
  if (loaded.function == nullptr) {
    const bool built = *LOCKSTEP_GLOO_LIBRARY != '\0';
    fail<EnvironmentError>("{}; {}give --backend tcp", loaded.reason,
                           built ? "" : "configure it where Gloo is, or ");
  }
  std::shared_ptr<HostTransport> connected;
  loaded.function(connected, rank, world_size, store, host, timeout_seconds);
  return connected;
}

std::string nccl_availability() { return load_nccl().reason; }

std::string nccl_unique_id() { return nccl_backend().unique_id(); }

std::unique_ptr<Communicator> make_nccl_rank(Device& device, int rank, int world_size,
                                             const std::string& id, double timeout_seconds) {
  return nccl_backend().make_rank(device, rank, world_size, id, timeout_seconds);
}

}  // namespace lockstep
