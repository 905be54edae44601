// Prints what a program meets on the machine that the environment describes: a line per call.

#include <cublas_v2.h>
#include <cudnn.h>

#include <chrono>
#include <cstdio>

#include "expect.h"

void print(const char* call, cudaError_t code) {
  std::printf("%s %s\n", call, cudaGetErrorName(code));
}

void time_an_upload(cudaStream_t stream) {
  float host[4] = {}, *memory = nullptr;
  print("cudaMallocAsync", cudaMallocAsync(&memory, sizeof(host), stream));
  const auto begin = std::chrono::steady_clock::now();
  print("cudaMemcpyAsync",
        cudaMemcpyAsync(memory, host, sizeof(host), cudaMemcpyHostToDevice, stream));
  print("cudaStreamSynchronize", cudaStreamSynchronize(stream));
  const std::chrono::duration<double, std::milli> span = std::chrono::steady_clock::now() - begin;
  std::printf("upload_ms %.1f\n", span.count());
  print("again cudaStreamSynchronize", cudaStreamSynchronize(stream));
  print("cudaGetLastError", cudaGetLastError());
  print("again cudaGetLastError", cudaGetLastError());
}

int main() {
  int count = -7, driver = -1;
  print("cudaGetDeviceCount", cudaGetDeviceCount(&count));
  print("cudaDriverGetVersion", cudaDriverGetVersion(&driver));
  std::printf("count %d driver %d\n", count, driver);
  cudnnHandle_t dnn = nullptr;
  cublasHandle_t blas = nullptr;
  std::printf("cudnnCreate %s\n", cudnnGetErrorString(cudnnCreate(&dnn)));
  std::printf("cublasCreate %s\n", cublasGetStatusName(cublasCreate(&blas)));
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    print("cudaGetDeviceProperties", cudaGetDeviceProperties(&p, i));
    std::printf("device %d: %s, %d.%d, %zu MiB, bus %d\n", i, p.name, p.major, p.minor,
                p.totalGlobalMem >> 20, p.pciBusID);
  }
  (void)cudaGetLastError();
  cudaStream_t stream = nullptr;
  print("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  if (stream != nullptr) time_an_upload(stream);
}
