#pragma once
// Memory of a device, tied to the order of one stream.

#include <cstddef>
#include <memory>

#include "common/core/stream.h"

namespace lockstep {

/// A block of device memory with one home stream. Allocating and freeing are operations in that
/// stream's order (cudaMallocAsync, cudaFreeAsync): work enqueued on the home stream before the
/// Buffer is destroyed may still use the memory. A buffer that was used on another stream must be
/// handed back first: `home.wait(other.record())`. Contents are undefined at first.
/// Throws DeviceError when the device has no room.
class Buffer {
 public:
  Buffer(Stream home, size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Stream home() const { return home_; }

 private:
  Stream home_;
  size_t bytes_;
  void* data_;
};

}  // namespace lockstep
