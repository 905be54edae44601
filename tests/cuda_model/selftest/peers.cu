// Two GPUs, with access to each other's memory and without. With an argument it touches memory that
// is out of reach, which AddressSanitizer must report.

#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "expect.h"

using Ints = std::vector<int>;

__global__ void add(int* x, int value) { *x += value; }

/// A GPU with a pool, and an integer in it.
struct Gpu {
  explicit Gpu(int index) : index(index) {
    use();
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, index};
    OK(cudaMemPoolCreate(&pool, &properties));
    stream = make_stream();
    OK(cudaMallocFromPoolAsync(&x, sizeof(int), pool, stream));
    set(0);
  }
  void use() const { OK(cudaSetDevice(index)); }
  void set(int value) const {
    OK(cudaMemcpyAsync(x, &value, sizeof value, cudaMemcpyHostToDevice, stream));
    OK(cudaStreamSynchronize(stream));
  }
  int get() const { return download<Ints>(x, 1, stream)[0]; }
  cudaError_t allow(int other, cudaMemAccessFlags flags) const {
    const cudaMemAccessDesc access{{cudaMemLocationTypeDevice, other}, flags};
    return cudaMemPoolSetAccess(pool, &access, 1);
  }

  int index;
  cudaMemPool_t pool = nullptr;
  cudaStream_t stream = nullptr;
  int* x = nullptr;
};

cudaError_t plain_copy(const Gpu& to, const Gpu& from, cudaStream_t stream) {
  return cudaMemcpyAsync(to.x, from.x, sizeof(int), cudaMemcpyDefault, stream);
}

cudaError_t peer_copy(const Gpu& to, const Gpu& from, cudaStream_t stream) {
  return cudaMemcpyPeerAsync(to.x, to.index, from.x, from.index, sizeof(int), stream);
}

void without_access(const Gpu& a, const Gpu& b) {
  a.set(1);
  b.set(2);
  for (cudaStream_t stream : {a.stream, b.stream}) {
    EXPECT_CODE(plain_copy(a, b, stream), cudaErrorInvalidValue);
    EXPECT_CODE(plain_copy(b, a, stream), cudaErrorInvalidValue);
  }
  int host = 7;
  EXPECT_CODE(cudaMemcpyAsync(b.x, &host, sizeof host, cudaMemcpyDefault, a.stream),
              cudaErrorInvalidValue);
  EXPECT_CODE(cudaMemsetAsync(b.x, 0, sizeof(int), a.stream), cudaErrorInvalidValue);
  OK(peer_copy(b, a, a.stream));
  OK(cudaStreamSynchronize(a.stream));
  EXPECT(b.get() == 1);
  EXPECT_CODE(cudaMemcpyPeerAsync(b.x, a.index, a.x, b.index, sizeof(int), a.stream),
              cudaErrorInvalidValue);
  EXPECT_CODE(cudaMemcpyPeerAsync(b.x, 9, a.x, a.index, sizeof(int), a.stream),
              cudaErrorInvalidDevice);
  (void)cudaGetLastError();
}

void with_access(const Gpu& a, const Gpu& b) {
  OK(b.allow(a.index, cudaMemAccessFlagsProtReadWrite));
  a.set(5);
  a.use();
  OK(plain_copy(b, a, a.stream));
  add<<<1, 1, 0, a.stream>>>(b.x, 2);
  OK(cudaStreamSynchronize(a.stream));
  EXPECT(b.get() == 7);
  EXPECT_CODE(plain_copy(b, a, b.stream), cudaErrorInvalidValue);  // access has one direction
  OK(b.allow(a.index, cudaMemAccessFlagsProtNone));
  EXPECT_CODE(plain_copy(b, a, a.stream), cudaErrorInvalidValue);
  (void)cudaGetLastError();
}

void attributes(const Gpu& a, const Gpu& b) {
  cudaPointerAttributes found{};
  for (const Gpu* gpu : {&a, &b}) {
    OK(cudaPointerGetAttributes(&found, gpu->x));
    EXPECT(found.type == cudaMemoryTypeDevice && found.device == gpu->index);
  }
  int host = 0, *pinned = nullptr, *freed = nullptr;
  OK(cudaPointerGetAttributes(&found, &host));
  EXPECT(found.type == cudaMemoryTypeUnregistered);
  OK(cudaHostAlloc(&pinned, sizeof(int), cudaHostAllocDefault));
  OK(cudaPointerGetAttributes(&found, pinned));
  EXPECT(found.type == cudaMemoryTypeHost);
  a.use();
  OK(cudaMallocAsync(&freed, sizeof(int), a.stream));
  const cudaHostFn_t pause = [](void*) { usleep(20000); };
  OK(cudaLaunchHostFunc(a.stream, pause, nullptr));
  OK(cudaFreeAsync(freed, a.stream));
  EXPECT_CODE(cudaPointerGetAttributes(&found, freed), cudaErrorInvalidValue);
  (void)cudaGetLastError();
}

int main(int argc, char** argv) {
  const Gpu a(0), b(1);
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "kernel") {
    a.use();
    add<<<1, 1, 0, a.stream>>>(b.x, 1);
    OK(cudaStreamSynchronize(a.stream));
  }
  if (what == "host") std::printf("%d\n", *a.x);
  if (!what.empty()) return 0;
  attributes(a, b);
  without_access(a, b);
  int possible = -1;
  OK(cudaDeviceCanAccessPeer(&possible, 0, 1));
  std::printf("access %d\n", possible);
  if (possible) {
    with_access(a, b);
  } else {
    EXPECT_CODE(b.allow(0, cudaMemAccessFlagsProtReadWrite), cudaErrorInvalidDevice);
    EXPECT_CODE(cudaDeviceEnablePeerAccess(b.index, 0), cudaErrorPeerAccessUnsupported);
  }
  return expect_failures == 0 ? 0 : 1;
}
