#include <new>

#include "common/kernels/cpu/engine.h"

namespace lockstep::cpu {
namespace {
constexpr std::align_val_t kAlignment{64};
}

Workspace::~Workspace() { release(); }

void Workspace::release() {
  ::operator delete(memory_, kAlignment);
  counter_.subtract(static_cast<int64_t>(bytes_));
  memory_ = nullptr;
  bytes_ = 0;
}

void* Workspace::at_least(size_t bytes) {
  if (bytes > bytes_) {
    release();  // first: the two need not exist side by side
    memory_ = ::operator new(bytes, kAlignment);
    counter_.add(static_cast<int64_t>(bytes));
    bytes_ = bytes;
  }
  return memory_;
}

}  // namespace lockstep::cpu
