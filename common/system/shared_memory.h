#pragma once
// Memory that several processes have in common, and that no file system knows.

#include <cstddef>

#include "common/system/descriptor.h"

namespace lockstep {

/// Memory behind a descriptor (memfd). Whoever is sent the descriptor can map it, too. It is gone
/// with the last process that has it open or mapped, however that process ends.
class SharedMemory {
 public:
  /// `bytes` zeros. The system has set all of them aside, so that no later access can fail for want
  /// of memory. Throws EnvironmentError with the size and the system's reason.
  static SharedMemory create(size_t bytes);
  /// What the process that created `bytes` bytes sent the descriptor of. Throws EnvironmentError.
  static SharedMemory open(Descriptor descriptor, size_t bytes);
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) = delete;

  std::byte* data() const { return data_; }
  const Descriptor& descriptor() const { return descriptor_; }

 private:
  SharedMemory(Descriptor descriptor, size_t bytes);

  Descriptor descriptor_;
  size_t bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace lockstep
