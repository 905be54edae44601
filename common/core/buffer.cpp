#include "common/core/buffer.h"

#include <new>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"

namespace lockstep {
namespace {

void* allocate(Stream home, size_t bytes) try {
  return home.backend().allocate(bytes);
} catch (const std::bad_alloc&) {
  fail<DeviceError>(
      "{}: no room for {:.1f} MiB beside the {:.1f} MiB in use{}; use a smaller batch "
      "or model, or more devices",
      home.device().name(), double(bytes) / 1048576.0,
      double(home.device().memory().current()) / 1048576.0, home.device().memory_note());
}

}  // namespace

Buffer::Buffer(Stream home, size_t bytes)
    : home_(home), bytes_(bytes), data_(allocate(home, bytes)) {
  home_.device().memory().add(static_cast<int64_t>(bytes_));
}

Buffer::~Buffer() {
  home_.backend().release(data_, bytes_);
  home_.device().memory().subtract(static_cast<int64_t>(bytes_));
}

}  // namespace lockstep
