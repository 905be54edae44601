#include "common/system/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/core/error.h"

namespace lockstep {
namespace {

[[noreturn]] void fail_for(const char* what, size_t bytes, int error) {
  fail<EnvironmentError>("cannot {} {} KiB of shared memory: {}", what, bytes >> 10,
                         errno_text(error));
}

void allocate(const Descriptor& memory, size_t first, size_t bytes) {
  if (::fallocate(memory.get(), 0, off_t(first), off_t(bytes)) != 0) fail_for("get", bytes, errno);
}

}  // namespace

SharedMemory SharedMemory::create(size_t bytes, size_t used) {
  Descriptor made(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made.is_open()) fail_for("make", bytes, errno);
  if (::ftruncate(made.get(), off_t(bytes)) != 0) fail_for("get", bytes, errno);
  allocate(made, 0, used);
  // Nobody can take the memory away again from under the others.
  ::fcntl(made.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return {std::move(made), bytes, used};
}

SharedMemory SharedMemory::open(Descriptor descriptor, size_t bytes, size_t used) {
  struct stat found = {};
  if (::fstat(descriptor.get(), &found) != 0) fail_for("open", bytes, errno);
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (seals == -1 || (seals & F_SEAL_SHRINK) == 0 || found.st_size != off_t(bytes)) {
    fail<EnvironmentError>("a descriptor of {} bytes came, expected shared memory of {}",
                           found.st_size, bytes);
  }
  return {std::move(descriptor), bytes, used};
}

SharedMemory::SharedMemory(Descriptor descriptor, size_t bytes, size_t used)
    : descriptor_(std::move(descriptor)), bytes_(bytes) {
  const auto map = [&](void* at, size_t length, int more) {
    return ::mmap(at, length, PROT_READ | PROT_WRITE, MAP_SHARED | more, descriptor_.get(), 0);
  };
  void* const place = map(nullptr, bytes, 0);
  if (place == MAP_FAILED) fail_for("map", bytes, errno);
  data_ = static_cast<std::byte*>(place);
  // Once more, over itself: every page that is used is looked up now, none in a step.
  if (map(place, used, MAP_FIXED | MAP_POPULATE) != MAP_FAILED) return;
  const int error = errno;
  ::munmap(place, bytes);
  fail_for("map", used, error);
}

void SharedMemory::set_aside(size_t first, size_t bytes) const {
  allocate(descriptor_, first, bytes);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      bytes_(other.bytes_),
      data_(std::exchange(other.data_, nullptr)) {}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace lockstep
