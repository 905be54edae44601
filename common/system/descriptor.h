#pragma once
// A file descriptor with an owner.

#include <unistd.h>

#include <utility>

namespace lockstep {

/// A descriptor that is closed at the end of its scope; -1 is none. The kernel closes it on exec
/// only if it was opened with O_CLOEXEC.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { close(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  /// Closes now; false (and errno) if the file system reports a late write error.
  bool close() { return fd_ < 0 || ::close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_ = -1;
};

}  // namespace lockstep
