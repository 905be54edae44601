#include "common/kernels/cuda/peer_access.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "common/core/device.h"

namespace lockstep::cuda {
namespace {

struct OpenPool {
  int index;
  cudaMemPool_t pool;
  std::set<int> users;  // other GPUs that have access
};

/// Those of this process. Never destroyed: a program may end while devices are open.
struct OpenPools {
  std::mutex mutex;
  std::vector<OpenPool> pools;
};
OpenPools& open_pools() {
  static auto& open = *new OpenPools;
  return open;
}

/// Lets GPU `index` use this pool, if it can.
void allow(int index, OpenPool& memory) {
  if (index == memory.index) return;
  const std::string device = DeviceId{DeviceId::Kind::cuda, index}.name();
  int possible = 0;
  check(cudaDeviceCanAccessPeer(&possible, index, memory.index), "cudaDeviceCanAccessPeer", device);
  if (possible == 0) return;
  const cudaMemAccessDesc access{{cudaMemLocationTypeDevice, index},
                                 cudaMemAccessFlagsProtReadWrite};
  check(cudaMemPoolSetAccess(memory.pool, &access, 1), "cudaMemPoolSetAccess", device);
  memory.users.insert(index);
}

/// True if only one GPU is open: then no copy is between two.
bool is_single(OpenPools& open, int index) {
  const std::lock_guard lock(open.mutex);
  return std::all_of(open.pools.begin(), open.pools.end(),
                     [&](const OpenPool& pool) { return pool.index == index; });
}

/// True if GPU `index` has access to all open pools of GPU `memory_of`.
bool uses(OpenPools& open, int index, int memory_of) {
  const std::lock_guard lock(open.mutex);
  return std::all_of(open.pools.begin(), open.pools.end(), [&](const OpenPool& pool) {
    return pool.index != memory_of || index == memory_of || pool.users.contains(index);
  });
}

/// Whose memory it is: a GPU's, or of the host, which is as good as that of GPU `index`.
CallStatus find_gpu(const void* memory, int index, int& found) {
  cudaPointerAttributes attributes{};
  const cudaError_t status = cudaPointerGetAttributes(&attributes, memory);
  found = attributes.type == cudaMemoryTypeDevice ? attributes.device : index;
  return {status, "cudaPointerGetAttributes"};
}

}  // namespace

PeerAccess::PeerAccess(int index, cudaMemPool_t pool) : pool_(pool) {
  OpenPools& open = open_pools();
  const std::lock_guard lock(open.mutex);
  OpenPool mine{index, pool, {}};
  for (OpenPool& other : open.pools) {
    allow(index, other);
    allow(other.index, mine);
  }
  open.pools.push_back(std::move(mine));
}

PeerAccess::~PeerAccess() {
  OpenPools& open = open_pools();
  const std::lock_guard lock(open.mutex);
  std::erase_if(open.pools, [&](const OpenPool& other) { return other.pool == pool_; });
}

/// A plain copy of memory that comes from a pool is made by the stream's GPU, which must have
/// access. Without it the driver has to be told both GPUs: then it takes the bytes through the
/// host, if there is no other way. With it a plain copy is the better choice: some drivers are
/// reported to lose the bytes of cudaMemcpyPeerAsync where a pool is open to the other GPU.
CallStatus copy_between(void* to, const void* from, size_t bytes, int index, cudaStream_t stream) {
  OpenPools& open = open_pools();
  int target = index, source = index;
  if (!is_single(open, index)) {
    const CallStatus to_found = find_gpu(to, index, target);
    if (to_found.status != cudaSuccess) return to_found;
    const CallStatus from_found = find_gpu(from, index, source);
    if (from_found.status != cudaSuccess) return from_found;
  }
  if (uses(open, index, target) && uses(open, index, source)) {
    return {cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync"};
  }
  return {cudaMemcpyPeerAsync(to, target, from, source, bytes, stream), "cudaMemcpyPeerAsync"};
}

}  // namespace lockstep::cuda
