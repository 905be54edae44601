#pragma once
// Memory that several processes have in common, and that no file system knows.

#include <cstddef>
#include <utility>

#include "common/system/descriptor.h"

namespace lockstep {

/// Memory behind a descriptor (memfd). A process that is sent the descriptor can map it, too. The
/// memory is gone with the last process that has it open or mapped, however that process ends.
class SharedMemory {
 public:
  /// Makes `bytes` zeros. The system sets the first `used` aside, so that no later access to them
  /// can fail for lack of memory. The system also looks up their pages now. The others take memory
  /// when set_aside() asks for it. Throws EnvironmentError with the size and the system's reason.
  static SharedMemory create(size_t bytes, size_t used);
  static SharedMemory create(size_t bytes) { return create(bytes, bytes); }
  /// Opens such memory by the descriptor that its creator has sent. Throws EnvironmentError.
  static SharedMemory open(Descriptor descriptor, size_t bytes, size_t used);
  static SharedMemory open(Descriptor descriptor, size_t bytes) {
    return open(std::move(descriptor), bytes, bytes);
  }
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) = delete;

  /// Sets these bytes aside, and keeps what they hold. Call it before any of them is touched,
  /// unless they were set aside already. Throws EnvironmentError.
  void set_aside(size_t first, size_t bytes) const;

  std::byte* data() const { return data_; }
  const Descriptor& descriptor() const { return descriptor_; }

 private:
  SharedMemory(Descriptor descriptor, size_t bytes, size_t used);

  Descriptor descriptor_;
  size_t bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace lockstep
