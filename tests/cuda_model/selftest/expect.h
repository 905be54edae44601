#pragma once
// Assertions of the model's own test programs: each names its line, all are counted.

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

inline int expect_failures = 0;

inline void expect(bool holds, const char* text, const char* file, int line) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, text);
  ++expect_failures;
}
inline void expect_code(cudaError_t found, cudaError_t expected, const char* text, const char* file,
                        int line) {
  if (found == expected) return;
  std::fprintf(stderr, "%s:%d: %s gives %s, expected %s\n", file, line, text,
               cudaGetErrorName(found), cudaGetErrorName(expected));
  ++expect_failures;
}

#define EXPECT(condition) expect(condition, #condition, __FILE__, __LINE__)
#define EXPECT_CODE(call, code) expect_code(call, code, #call, __FILE__, __LINE__)
#define OK(call) EXPECT_CODE(call, cudaSuccess)

inline cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

/// Device memory with the values of `host`.
template <class T, class Range>
T* upload(const Range& host, cudaStream_t stream) {
  T* memory = nullptr;
  OK(cudaMallocAsync(&memory, host.size() * sizeof(T), stream));
  OK(cudaMemcpyAsync(memory, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
  return memory;
}

template <class Range, class T>
Range download(const T* memory, size_t n, cudaStream_t stream) {
  Range host(n);
  OK(cudaMemcpyAsync(host.data(), memory, n * sizeof(T), cudaMemcpyDeviceToHost, stream));
  OK(cudaStreamSynchronize(stream));
  return host;
}
