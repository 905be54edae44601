#include <algorithm>
#include <array>
#include <cstdio>

#include "runtime/environment.h"
#include "runtime/memory.h"
#include "runtime/model.h"

namespace cuda_model {
namespace {

thread_local int current = 0;

}  // namespace

Device& physical_device(int index) {
  static auto& devices = *[] {
    auto* all = new std::array<Device, kMaxDevices>;
    for (int i = 0; i < kMaxDevices; ++i) (*all)[i].index = i;
    return all;
  }();
  return devices[index];
}

Device* visible_device(int index) {
  const auto visible = visible_devices();
  if (index < 0 || index >= static_cast<int>(visible.size())) return nullptr;
  return &physical_device(visible[index]);
}

std::mutex& model_mutex() {
  static auto& mutex = *new std::mutex;  // outlives worker threads at exit
  return mutex;
}

Device* current_device() { return visible_device(current); }

cudaError_t sticky_error() {
  const Device* device = current_device();
  return device == nullptr ? cudaSuccess : static_cast<cudaError_t>(device->sticky.load());
}

}  // namespace cuda_model

using namespace cuda_model;

cudaError_t cudaDriverGetVersion(int* version) {
  if (version == nullptr) return remember(cudaErrorInvalidValue);
  *version = integer_variable("CUDA_MODEL_DRIVER", kRuntimeVersion);
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  if (version == nullptr) return remember(cudaErrorInvalidValue);
  *version = kRuntimeVersion;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  return api("cudaGetDeviceCount", [&] {
    *count = static_cast<int>(visible_devices().size());
    return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return api("cudaSetDevice", [&] {
    if (visible_devices().empty()) return cudaErrorNoDevice;
    if (visible_device(device) == nullptr) return cudaErrorInvalidDevice;
    current = device;
    return sticky_error();
  });
}

cudaError_t cudaGetDevice(int* device) {
  return api("cudaGetDevice", [&] {
    *device = current;
    return visible_devices().empty() ? cudaErrorNoDevice : cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return api("cudaGetDeviceProperties", [&] {
    const Device* gpu = visible_device(device);
    if (gpu == nullptr) return cudaErrorInvalidDevice;
    cudaDeviceProp p{};
    std::snprintf(p.name, sizeof(p.name), "CUDA model on the CPU");
    p.uuid.bytes[15] = static_cast<char>(gpu->index);
    p.totalGlobalMem = capacity();
    p.sharedMemPerBlock = kSharedMemoryPerBlock;
    p.regsPerBlock = 65536;
    p.warpSize = 32;
    p.maxThreadsPerBlock = kMaxThreadsPerBlock;
    std::copy_n(std::array{1024, 1024, 64}.begin(), 3, p.maxThreadsDim);
    std::copy_n(std::array{2147483647, 65535, 65535}.begin(), 3, p.maxGridSize);
    p.major = capability().major;
    p.minor = capability().minor;
    p.multiProcessorCount = kMultiprocessors;
    p.maxThreadsPerMultiProcessor = kThreadsSideBySide;
    p.asyncEngineCount = 2;
    p.pciBusID = gpu->index;
    p.memoryPoolsSupported = 1;
    *properties = p;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return api("cudaDeviceGetAttribute", [&] {
    if (visible_device(device) == nullptr) return cudaErrorInvalidDevice;
    switch (attribute) {
      case cudaDevAttrMaxThreadsPerBlock:
        *value = kMaxThreadsPerBlock;
        break;
      case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = kSharedMemoryPerBlock;
        break;
      case cudaDevAttrWarpSize:
        *value = 32;
        break;
      case cudaDevAttrMultiProcessorCount:
        *value = kMultiprocessors;
        break;
      case cudaDevAttrComputeMode:
        *value = 0;
        break;
      case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = kThreadsSideBySide;
        break;
      case cudaDevAttrAsyncEngineCount:
        *value = 2;
        break;
      case cudaDevAttrComputeCapabilityMajor:
        *value = capability().major;
        break;
      case cudaDevAttrComputeCapabilityMinor:
        *value = capability().minor;
        break;
      case cudaDevAttrMemoryPoolsSupported:
        *value = 1;
        break;
      default:
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return api("cudaDeviceSynchronize", [&] {
    const Device* device = current_device();
    if (device == nullptr) return cudaErrorNoDevice;
    for (const auto& stream : all_streams(device)) {
      if (const cudaError_t error = forbid_in_capture(stream.get())) return error;
    }
    for (const auto& stream : all_streams(device)) stream->drain();
    return sticky_error();
  });
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return api("cudaDeviceCanAccessPeer", [&] {
    if (!visible_device(device) || !visible_device(peer)) return cudaErrorInvalidDevice;
    *can = device != peer && has_peer_access();
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
  return api("cudaDeviceEnablePeerAccess", [&] {
    Device* device = current_device();
    const Device* other = visible_device(peer);
    if (!device || !other || device == other) return cudaErrorInvalidDevice;
    if (flags != 0) return cudaErrorInvalidValue;
    if (!has_peer_access()) return cudaErrorPeerAccessUnsupported;
    const std::lock_guard lock(model_mutex());
    if (device->peers >> other->index & 1) return cudaErrorPeerAccessAlreadyEnabled;
    device->peers |= 1u << other->index;
    return cudaSuccess;
  });
}
