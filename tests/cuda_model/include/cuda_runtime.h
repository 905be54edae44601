#pragma once
// The C++ side of the runtime: vector types, typed overloads and, under nvcc, the device language.

#include "cuda_runtime_api.h"

struct uint3 {
  unsigned int x, y, z;
};
struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// clang-format off
#define CUDA_MODEL_VECTORS(T, name)                             \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };            \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };      \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; } \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
// clang-format on
CUDA_MODEL_VECTORS(float, float)
CUDA_MODEL_VECTORS(int, int)
CUDA_MODEL_VECTORS(unsigned int, uint)
CUDA_MODEL_VECTORS(unsigned char, uchar)
#undef CUDA_MODEL_VECTORS

template <class T>
inline cudaError_t cudaMalloc(T** pointer, size_t size) {
  return cudaMalloc(reinterpret_cast<void**>(pointer), size);
}
template <class T>
inline cudaError_t cudaMallocAsync(T** pointer, size_t size, cudaStream_t stream) {
  return cudaMallocAsync(reinterpret_cast<void**>(pointer), size, stream);
}
template <class T>
inline cudaError_t cudaMallocFromPoolAsync(T** pointer, size_t size, cudaMemPool_t pool,
                                           cudaStream_t stream) {
  return cudaMallocFromPoolAsync(reinterpret_cast<void**>(pointer), size, pool, stream);
}
template <class T>
inline cudaError_t cudaMallocHost(T** pointer, size_t size, unsigned int flags = 0) {
  return cudaHostAlloc(reinterpret_cast<void**>(pointer), size, flags);
}
template <class T>
inline cudaError_t cudaHostAlloc(T** pointer, size_t size, unsigned int flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(pointer), size, flags);
}
template <class T>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, T* entry) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(entry));
}

#ifdef __CUDACC__
#include "cuda_model_device.h"
#endif
