// What the build compiles first, to see whether nvcc, the C++ compiler and the libraries fit.

#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <cudnn.h>

#include <algorithm>
#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <vector>

template <std::integral Index>
__global__ void each(Index n, float* x) {
  const Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] = float(i);
}

void run(const std::vector<float*>& arrays, cudaStream_t stream) {
  for (float* x : arrays) each<<<1, 32, 0, stream>>>(32, x);
}
