#pragma once
// How GPUs of one process use each other's memory.

#include "common/kernels/cuda/check.h"

namespace lockstep::cuda {

/// Keeps `pool` of GPU `index` open while it lives. GPUs with open pools use each other's pools
/// where the hardware can. Any other GPU is left alone, as access would bring the driver's state
/// onto that GPU. May be used by several threads.
class PeerAccess {
 public:
  PeerAccess(int index, cudaMemPool_t pool);
  ~PeerAccess();
  PeerAccess(const PeerAccess&) = delete;
  PeerAccess& operator=(const PeerAccess&) = delete;

 private:
  cudaMemPool_t pool_;
};

/// The status that CUDA returned, and the call that returned it.
struct CallStatus {
  cudaError_t status;
  const char* call;
};

/// Enqueues a copy in a stream of GPU `index`, which is current, between memory of the host and of
/// any GPUs of this process.
CallStatus copy_between(void* to, const void* from, size_t bytes, int index, cudaStream_t stream);

}  // namespace lockstep::cuda
