// The one file that nvcc compiles: every kernel of the project, made from the shared bodies.

#include "common/kernels/cuda/reduce.cuh"
// The launchers come first: they say how nvcc is to compile the bodies.
#include "common/kernels/body_kernels.inl"
#include "common/kernels/cuda/cuda_kernels.h"

namespace lockstep {

template class BodyKernels<cuda::Launch>;

namespace cuda {

cudaError_t kernels_fit_current_device() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, each_kernel<uint32_t, bodies::Add>);
}

}  // namespace cuda
}  // namespace lockstep
