#include <new>

#include "common/kernels/cpu/engine.h"

namespace lockstep::cpu {
namespace {
constexpr std::align_val_t kAlignment{64};
}

Workspace::~Workspace() {
  ::operator delete(memory_, kAlignment);
  counter_.subtract(static_cast<int64_t>(bytes_));
}

void* Workspace::at_least(size_t bytes) {
  if (bytes > bytes_) {
    void* larger = ::operator new(bytes, kAlignment);
    ::operator delete(memory_, kAlignment);
    counter_.add(static_cast<int64_t>(bytes) - static_cast<int64_t>(bytes_));
    memory_ = larger;
    bytes_ = bytes;
  }
  return memory_;
}

}  // namespace lockstep::cpu
