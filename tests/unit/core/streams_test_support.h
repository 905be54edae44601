#pragma once
// CPU devices whose streams fail, and memory that is watched.

#include <sys/mman.h>

#include <memory>

#include "common/core/cpu_stream.h"
#include "common/core/error.h"
#include "common/kernels/devices.h"
#include "tests/support/data_test_files.h"
#include "tests/support/tasks.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace lockstep::testing::streams {

inline std::unique_ptr<Device> open_cpu(int index = 0, const DeviceOptions& options = {}) {
  return open_device({DeviceId::Kind::cpu, index}, options);
}

inline CpuStream& backend(Stream stream) { return static_cast<CpuStream&>(stream.backend()); }

inline void enqueue_failure(Stream stream, std::string message) {
  enqueue(stream, [message] { throw BadInput(message); });
}

inline std::string error_of(Stream stream) {
  return message_of<BadInput>([&] { stream.synchronize(); });
}

constexpr size_t kLarge = size_t{64} << 20;  // the allocator gives it back to the system at once

/// Whether the memory of a Buffer of kLarge bytes has been freed.
inline bool is_freed(void* memory) {
#if defined(__SANITIZE_ADDRESS__)
  return __asan_address_is_poisoned(memory) != 0;
#else
  constexpr uintptr_t kPage = 4096;
  unsigned char resident = 0;
  void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory) / kPage * kPage);
  return ::mincore(page, kPage, &resident) != 0;
#endif
}

/// One number moves over three streams of two devices; each changes it in a different way, so that
/// any two steps in the wrong order, or lost, give a different result.
inline uint32_t wander_over_streams(int rounds) {
  uint32_t value = 1;
  const auto first = open_cpu(0), second = open_cpu(1);
  const std::vector<Stream> streams = {first->create_stream("a"), second->create_stream("b"),
                                       first->create_stream("c")};
  for (int i = 0; i < 3 * rounds; ++i) {
    const Stream stream = streams[i % 3];
    if (i > 0) stream.wait(streams[(i - 1) % 3].record());
    enqueue(stream, [&value, i] { value = value * 1664525u + static_cast<uint32_t>(i); });
  }
  streams[2].synchronize();
  return value;
}

inline uint32_t wander_alone(int rounds) {
  uint32_t value = 1;
  for (int i = 0; i < 3 * rounds; ++i) value = value * 1664525u + static_cast<uint32_t>(i);
  return value;
}

}  // namespace lockstep::testing::streams
