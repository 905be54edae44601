// Gloo in a build that includes it: loads liblockstep_gloo.so, where the rest of it is. Not every
// program pays for Gloo so: Debian 13 builds it with MPI, whose libraries take 25 ms to load and
// complain about little memory by themselves.

#include <dlfcn.h>

#include "common/comm/gloo_transport.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

struct LoadedGloo {
  decltype(&lockstep_connect_gloo) connect = nullptr;
  std::string reason;  // why it could not be loaded
};

/// Libraries stay loaded, and loading one again costs nothing.
LoadedGloo load_gloo() {
  void* library = dlopen(LOCKSTEP_GLOO_LIBRARY, RTLD_NOW | RTLD_NODELETE);
  if (library == nullptr) return {nullptr, fmt::format("Gloo cannot be loaded: {}", dlerror())};
  void* connect = dlsym(library, "lockstep_connect_gloo");
  if (connect == nullptr) return {nullptr, fmt::format("liblockstep_gloo.so: {}", dlerror())};
  return {reinterpret_cast<decltype(&lockstep_connect_gloo)>(connect), ""};
}

}  // namespace

std::string gloo_availability() { return load_gloo().reason; }

std::shared_ptr<HostTransport> connect_gloo(int rank, int world_size, const RendezvousStore& store,
                                            const std::string& host, double timeout_seconds) {
  const LoadedGloo loaded = load_gloo();
  if (loaded.connect == nullptr) {
    fail<EnvironmentError>("{}; give --backend tcp", loaded.reason);
  }
  std::shared_ptr<HostTransport> connected;
  loaded.connect(connected, rank, world_size, store, host, timeout_seconds);
  return connected;
}

}  // namespace lockstep
