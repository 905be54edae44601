#pragma once
// Memory that several processes have in common, and that no file system knows.

#include <cstddef>
#include <utility>

#include "common/system/descriptor.h"

namespace lockstep {

/// Memory behind a descriptor (memfd). Whoever is sent the descriptor can map it, too. It is gone
/// with the last process that has it open or mapped, however that process ends.
class SharedMemory {
 public:
  /// `bytes` zeros. Of the first `used` the system sets all aside, so that no later access can fail
  /// for want of memory, and looks up their pages now. The others take memory when set_aside() asks
  /// for them. Throws EnvironmentError with the size and the system's reason.
  static SharedMemory create(size_t bytes, size_t used);
  static SharedMemory create(size_t bytes) { return create(bytes, bytes); }
  /// What the process that created such memory sent the descriptor of. Throws EnvironmentError.
  static SharedMemory open(Descriptor descriptor, size_t bytes, size_t used);
  static SharedMemory open(Descriptor descriptor, size_t bytes) {
    return open(std::move(descriptor), bytes, bytes);
  }
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) = delete;

  /// Before any of these bytes is touched, unless they are among those that were set aside already.
  /// What they hold stays. Throws EnvironmentError.
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
