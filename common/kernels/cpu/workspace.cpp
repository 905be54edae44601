#include "common/core/host.h"
#include "common/kernels/cpu/engine.h"

namespace lockstep::cpu {

Workspace::~Workspace() { release(); }

void Workspace::release() {
  if (memory_ == nullptr) return;
  release_aligned(memory_);
  stream_.count_memory(-static_cast<int64_t>(bytes_));
  memory_ = nullptr;
  bytes_ = 0;
}

void* Workspace::at_least(size_t bytes) {
  if (bytes > bytes_) {
    release();  // first: the two need not exist side by side
    memory_ = allocate_aligned(bytes);
    stream_.count_memory(static_cast<int64_t>(bytes));
    bytes_ = bytes;
  }
  return memory_;
}

}  // namespace lockstep::cpu
