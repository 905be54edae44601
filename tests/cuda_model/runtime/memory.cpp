// Device memory, page-locked host memory, copies.

#include "runtime/memory.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "runtime/environment.h"
#include "runtime/model.h"
#include "runtime/turn.h"

/// Bit per physical device.
using DeviceSet = unsigned;

struct CUmemPoolHandle_st {
  explicit CUmemPoolHandle_st(cuda_model::Device* owner)
      : device(owner), reached_by(std::make_shared<DeviceSet>(1u << owner->index)) {}
  cuda_model::Device* device;
  // Guarded by model_mutex(). Blocks keep it: they may outlive the pool.
  std::shared_ptr<DeviceSet> reached_by;
};

namespace cuda_model {
namespace {

/// One block of memory that CUDA knows.
struct Block {
  size_t size = 0;
  Device* device = nullptr;         // null: page-locked host memory
  std::shared_ptr<DeviceSet> pool;  // who reaches the pool it is from; null: from cudaMalloc
  bool released = false;            // cudaFreeAsync was called; the stream has not got there

  DeviceSet reached_by() const {
    if (pool != nullptr) return *pool;
    DeviceSet all = 1u << device->index;  // cudaDeviceEnablePeerAccess opens what cudaMalloc gave
    for (int i = 0; i < kMaxDevices; ++i) {
      if ((physical_device(i).peers >> device->index & 1) != 0) all |= 1u << i;
    }
    return all;
  }
};

/// Blocks by address. Guarded by model_mutex().
std::map<const char*, Block>& blocks() {
  static auto& map = *new std::map<const char*, Block>;
  return map;
}

enum class Place { device, pinned, pageable, invalid };

struct Range {
  Place place = Place::pageable;
  const Device* device = nullptr;  // of device memory
  bool from_pool = false;
  DeviceSet reached_by = ~0u;

  bool reached(const Device& gpu) const { return (reached_by >> gpu.index & 1) != 0; }
  /// A plain copy of pool memory is made by the stream's GPU, which must have access. For other
  /// memory the driver finds a way.
  bool copied_plainly_by(const Device& gpu) const { return !from_pool || reached(gpu); }
};

/// Where [address, address + bytes) is; invalid: not wholly inside the block in which it begins.
Range range_of(const void* address, size_t bytes) {
  const auto* at = static_cast<const char*>(address);
  const std::lock_guard lock(model_mutex());
  auto next = blocks().upper_bound(at);
  if (next == blocks().begin()) return {};
  const auto& [begin, block] = *std::prev(next);
  if (at >= begin + block.size) return {};
  if (at + bytes > begin + block.size || block.released) return {.place = Place::invalid};
  if (block.device == nullptr) return {.place = Place::pinned};
  return {Place::device, block.device, block.pool != nullptr, block.reached_by()};
}

bool reserve(Device& device, size_t size) {
  const std::lock_guard lock(model_mutex());
  if (size > capacity() - std::min(capacity(), device.used)) return false;
  device.used += size;
  return true;
}

cudaError_t allocate(void** pointer, size_t size, Device* device, std::shared_ptr<DeviceSet> pool) {
  if (pointer == nullptr) return cudaErrorInvalidValue;
  *pointer = nullptr;
  if (size == 0) return cudaSuccess;
  if (!reserve(*device, size)) {
    // Memory whose release is queued counts once the stream gets there.
    for (const auto& stream : all_streams(device)) stream->drain();
    if (!reserve(*device, size)) return cudaErrorMemoryAllocation;
  }
  if (posix_memalign(pointer, 256, size) != 0)
    die("the host has no memory left for the modelled GPU");
  std::memset(*pointer, 0xff, size);  // NaN as a float: reading it before writing shows
  const std::lock_guard lock(model_mutex());
  Block& block = blocks()[static_cast<char*>(*pointer)];
  block = {size, device, std::move(pool)};
  protect_new(*pointer, size, block.reached_by());
  return cudaSuccess;
}

/// Gives back the block at `pointer`, which is of device memory or not.
cudaError_t release(void* pointer, bool of_device) {
  const std::lock_guard lock(model_mutex());
  const auto found = blocks().find(static_cast<char*>(pointer));
  if (found == blocks().end() || (found->second.device != nullptr) != of_device) {
    return cudaErrorInvalidValue;
  }
  if (of_device) found->second.device->used -= found->second.size;
  blocks().erase(found);
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t wait_for_everything() {
  for (const auto& stream : all_streams()) stream->drain();
  return sticky_error();
}

bool fits(cudaMemcpyKind kind, Place to, Place from) {
  const bool to_device = to == Place::device, from_device = from == Place::device;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

/// The copy as the stream does it, for this GPU, or for the driver (null). `staged`: the bytes of a
/// pageable source, taken at the call.
Task copy_task(const Device* gpu, void* to, const void* from, size_t bytes, bool upload,
               std::shared_ptr<std::vector<char>> staged) {
  const int delay = upload ? integer_variable("CUDA_MODEL_COPY_DELAY_US", 0) : 0;
  return [=, staged = std::move(staged)] {
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    const Turn turn(gpu);
    std::memmove(to, staged != nullptr ? staged->data() : from, bytes);
  };
}

/// For what the model does not record: copies of pageable memory (the driver would have to stage
/// them) and allocations.
cudaError_t refuse_in_capture(cudaStream_t handle) {
  const auto stream = find_stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  const std::lock_guard lock(model_mutex());
  if (stream->capture == nullptr) return cudaSuccess;
  stream->capture->invalidated = true;
  return cudaErrorStreamCaptureUnsupported;
}

}  // namespace

void each_device_block(const std::function<void(const void*, size_t, unsigned)>& visit) {
  for (const auto& [address, block] : blocks()) {
    if (block.device != nullptr) visit(address, block.size, block.reached_by());
  }
}

size_t capacity() {
  return static_cast<size_t>(integer_variable("CUDA_MODEL_MEMORY_MIB", 4096)) << 20;
}

}  // namespace cuda_model

using namespace cuda_model;

cudaError_t cudaMalloc(void** pointer, size_t size) {
  return api("cudaMalloc", [&] {
    if (const cudaError_t error = forbid_in_capture()) return error;
    if (current_device() == nullptr) return cudaErrorNoDevice;
    if (const cudaError_t sticky = sticky_error()) return sticky;
    return allocate(pointer, size, current_device(), nullptr);
  });
}

cudaError_t cudaFree(void* pointer) {
  return api("cudaFree", [&] {
    if (const cudaError_t error = forbid_in_capture()) return error;
    if (current_device() == nullptr) return cudaErrorNoDevice;
    if (const cudaError_t sticky = wait_for_everything()) return sticky;
    return pointer == nullptr ? cudaSuccess : release(pointer, true);
  });
}

cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t size, cudaMemPool_t pool,
                                    cudaStream_t handle) {
  return api("cudaMallocFromPoolAsync", [&] {
    const auto stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (pool == nullptr) return cudaErrorInvalidValue;
    if (const int sticky = stream->device.sticky) return static_cast<cudaError_t>(sticky);
    if (const cudaError_t error = refuse_in_capture(handle)) return error;
    return allocate(pointer, size, pool->device, pool->reached_by);
  });
}

cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t handle) {
  return api("cudaMallocAsync", [&] {
    const auto stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    CUmemPoolHandle_st pool(&stream->device);  // the default one: nothing opens it to others
    return cudaMallocFromPoolAsync(pointer, size, &pool, handle);
  });
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return api("cudaFreeAsync", [&] {
    if (pointer == nullptr) return cudaSuccess;
    if (const cudaError_t error = refuse_in_capture(stream)) return error;
    {
      const std::lock_guard lock(model_mutex());
      const auto found = blocks().find(static_cast<char*>(pointer));
      if (found == blocks().end() || found->second.released || !found->second.device) {
        return cudaErrorInvalidValue;
      }
      found->second.released = true;
    }
    return enqueue(stream, [pointer] { release(pointer, true); });
  });
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned int flags) {
  return api("cudaHostAlloc", [&] {
    if (const cudaError_t error = forbid_in_capture()) return error;
    if (pointer == nullptr || flags > 7) return cudaErrorInvalidValue;
    if (current_device() == nullptr) return cudaErrorNoDevice;
    if (const cudaError_t sticky = sticky_error()) return sticky;
    if (posix_memalign(pointer, 4096, std::max<size_t>(size, 1)) != 0) {
      return cudaErrorMemoryAllocation;
    }
    const std::lock_guard lock(model_mutex());
    blocks()[static_cast<char*>(*pointer)] = {.size = size};
    return cudaSuccess;
  });
}

cudaError_t cudaMallocHost(void** pointer, size_t size) {
  return api("cudaMallocHost", [&] { return cudaHostAlloc(pointer, size, cudaHostAllocDefault); });
}

cudaError_t cudaFreeHost(void* pointer) {
  return api("cudaFreeHost", [&] {
    if (const cudaError_t error = forbid_in_capture()) return error;
    if (pointer == nullptr) return cudaSuccess;
    return release(pointer, false);  // that it waits for copies is promised nowhere
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return api("cudaMemGetInfo", [&] {
    const Device* device = current_device();
    if (device == nullptr) return cudaErrorNoDevice;
    if (const cudaError_t sticky = sticky_error()) return sticky;
    const std::lock_guard lock(model_mutex());
    *total = capacity();
    *free = *total - std::min(*total, device->used);
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  return api("cudaMemPoolCreate", [&] {
    if (pool == nullptr || properties == nullptr ||
        properties->allocType != cudaMemAllocationTypePinned ||
        properties->location.type != cudaMemLocationTypeDevice) {
      return cudaErrorInvalidValue;
    }
    Device* device = visible_device(properties->location.id);
    if (device == nullptr) return cudaErrorInvalidDevice;
    *pool = new CUmemPoolHandle_st(device);
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  return api("cudaMemPoolDestroy", [&] {
    delete pool;  // as documented, blocks that are still in use live on
    return pool == nullptr ? cudaErrorInvalidValue : cudaSuccess;
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return api("cudaMemPoolSetAttribute", [&] {
    if (pool == nullptr || value == nullptr) return cudaErrorInvalidValue;
    const bool known = attribute >= cudaMemPoolReuseFollowEventDependencies &&
                       attribute <= cudaMemPoolAttrReleaseThreshold;
    return known ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* accesses,
                                 size_t count) {
  return api("cudaMemPoolSetAccess", [&] {
    if (pool == nullptr || (accesses == nullptr && count > 0)) return cudaErrorInvalidValue;
    const std::lock_guard lock(model_mutex());
    for (size_t i = 0; i < count; ++i) {
      const Device* device = visible_device(accesses[i].location.id);
      if (device == nullptr) return cudaErrorInvalidDevice;
      const bool given = accesses[i].flags == cudaMemAccessFlagsProtReadWrite;
      if (device == pool->device && !given) return cudaErrorInvalidDevice;
      if (device != pool->device && !has_peer_access()) return cudaErrorInvalidDevice;
      const DeviceSet bit = 1u << device->index;
      *pool->reached_by = given ? *pool->reached_by | bit : *pool->reached_by & ~bit;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t handle) {
  return api("cudaMemcpyAsync", [&] {
    const auto stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (bytes == 0) return cudaSuccess;
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
      return cudaErrorInvalidMemcpyDirection;
    }
    const Range to_range = range_of(to, bytes), from_range = range_of(from, bytes);
    const Place target = to_range.place, source = from_range.place;
    if (to == nullptr || from == nullptr || target == Place::invalid || source == Place::invalid ||
        !fits(kind, target, source) || !to_range.copied_plainly_by(stream->device) ||
        !from_range.copied_plainly_by(stream->device)) {
      return cudaErrorInvalidValue;
    }
    std::shared_ptr<std::vector<char>> staged;
    if (target == Place::pageable || source == Place::pageable) {
      if (const cudaError_t error = refuse_in_capture(handle)) return error;
    }
    if (source == Place::pageable) {
      const auto* begin = static_cast<const char*>(from);
      staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    }
    const bool upload = target == Place::device && source != Place::device;
    const bool itself = to_range.reached(stream->device) && from_range.reached(stream->device);
    const cudaError_t error = enqueue(handle, copy_task(itself ? &stream->device : nullptr, to,
                                                        from, bytes, upload, std::move(staged)));
    if (error != cudaSuccess || target != Place::pageable) return error;
    stream->drain();  // the driver's staging buffer is emptied before the call returns
    return static_cast<cudaError_t>(stream->device.sticky.load());
  });
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  return api("cudaMemsetAsync", [&] {
    if (bytes == 0) return cudaSuccess;
    const Range range = range_of(pointer, bytes);
    const auto of = find_stream(stream);
    if (of == nullptr) return cudaErrorInvalidResourceHandle;
    if (range.place != Place::device || !range.copied_plainly_by(of->device)) {
      return cudaErrorInvalidValue;
    }
    return enqueue(stream, [=, gpu = range.reached(of->device) ? &of->device : nullptr] {
      const Turn turn(gpu);
      std::memset(pointer, value, bytes);
    });
  });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                size_t bytes, cudaStream_t stream) {
  return api("cudaMemcpyPeerAsync", [&] {
    if (find_stream(stream) == nullptr) return cudaErrorInvalidResourceHandle;
    const Device *target = visible_device(to_device), *source = visible_device(from_device);
    if (target == nullptr || source == nullptr) return cudaErrorInvalidDevice;
    if (bytes == 0) return cudaSuccess;
    if (range_of(to, bytes).device != target || range_of(from, bytes).device != source) {
      return cudaErrorInvalidValue;
    }
    return enqueue(stream, copy_task(nullptr, to, from, bytes, false, nullptr));
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return api("cudaPointerGetAttributes", [&] {
    if (attributes == nullptr) return cudaErrorInvalidValue;
    const Range range = range_of(pointer, 1);
    if (range.place == Place::invalid) return cudaErrorInvalidValue;  // freed
    *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, const_cast<void*>(pointer), {}};
    if (range.place == Place::pinned) attributes->type = cudaMemoryTypeHost;
    if (range.place != Place::device) return cudaSuccess;
    *attributes = {cudaMemoryTypeDevice, 0, const_cast<void*>(pointer), nullptr, {}};
    while (visible_device(attributes->device) != range.device) ++attributes->device;
    return cudaSuccess;
  });
}
