// Convolutions in guarded memory: every aligned allocation ends where a protected page begins, so
// that one byte too far ends the process. Prints the shapes whose computation died.
//
//   guarded-convolutions THREADS [all]
//
// Each shape is computed in a process and on a stream of its own: a workspace that has grown before
// would hide what is written past its end.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <new>
#include <string>
#include <vector>

#include "common/core/tensor.h"
#include "common/kernels/cpu/cpu_device.h"
#include "common/kernels/kernels.h"

namespace {

constexpr size_t kPage = 4096;

struct Block {
  size_t begin, bytes;  // of the mapping
};

size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

// Lockstep keeps tensors and workspaces in such memory. The size is rounded up to the alignment, so
// the gap after the memory is smaller than that.
void* operator new(size_t bytes, std::align_val_t alignment) {
  const size_t room = (bytes + size_t(alignment) - 1) / size_t(alignment) * size_t(alignment);
  const size_t whole = pages(room) + 2 * kPage;
  void* begin = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) throw std::bad_alloc();
  char* end = static_cast<char*>(begin) + whole - kPage;
  mprotect(end, kPage, PROT_NONE);
  const Block block{reinterpret_cast<size_t>(begin), whole};
  std::memcpy(begin, &block, sizeof block);
  return end - room;
}

void operator delete(void* memory, std::align_val_t) noexcept {
  if (memory == nullptr) return;
  // The first page holds the record; the memory begins in the second or, where it fills a page,
  // there.
  const size_t address = reinterpret_cast<size_t>(memory);
  Block block{};
  std::memcpy(&block, reinterpret_cast<const void*>((address / kPage - 1) * kPage), sizeof block);
  munmap(reinterpret_cast<void*>(block.begin), block.bytes);
}
void operator delete(void* memory, size_t, std::align_val_t alignment) noexcept {
  ::operator delete(memory, alignment);
}

namespace lockstep {
namespace {

/// One pass each, on memory of exactly the size it needs.
void compute(const Window2d& g, int threads) {
  const auto device = cpu::open_cpu_device(0, {.threads = threads});
  const Stream stream = device->create_stream("stream");
  Kernels& kernels = device->kernels();
  const auto zeros = [&](const Shape& shape) {
    const Tensor tensor = Tensor::empty(stream, shape);
    kernels.fill(stream, 0, tensor);
    return tensor;
  };
  const Tensor x = zeros(g.input()), dx = zeros(g.input()), y = zeros(g.output());
  const Tensor dy = zeros(g.output()), weight = zeros(g.weight()), dweight = zeros(g.weight());
  const Tensor bias = zeros({g.out_channels}), dbias = zeros({g.out_channels});
  kernels.conv2d_backward_parameters(stream, g, x, dy, dweight, dbias);
  stream.synchronize();
  const Stream forward = device->create_stream("forward");
  kernels.conv2d(forward, g, x, weight, bias, y);
  forward.synchronize();
  const Stream backward = device->create_stream("backward");
  kernels.conv2d_backward_input(backward, g, dy, weight, dx);
  backward.synchronize();
}

std::vector<Window2d> shapes(bool all) {
  std::vector<Window2d> found;
  const std::vector<int64_t> few_channels{1, 3, 7, 8, 9, 15, 16, 17, 24};
  for (const int64_t side :
       all ? std::vector<int64_t>{7, 14, 28, 32} : std::vector<int64_t>{14, 28})
    for (const int64_t batch :
         all ? std::vector<int64_t>{1, 2, 7, 32, 63} : std::vector<int64_t>{63})
      for (const int64_t in : few_channels)
        for (const int64_t out :
             all ? std::vector<int64_t>{8, 16, 20, 64} : std::vector<int64_t>{16})
          for (const int64_t stride : {2, 3}) {
            const int64_t after = (side - 1) / stride + 1;
            found.push_back({batch, side, side, in, after, after, out, 1, stride, 0});
          }
  return found;
}

/// Whether a separate process survives it.
bool survives(const Window2d& g, int threads) {
  const pid_t child = fork();
  if (child == 0) {
    compute(g, threads);
    _exit(0);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

int run(int threads, bool all) {
  int computed = 0;
  for (const Window2d& g : shapes(all)) {
    ++computed;
    if (!survives(g, threads)) {
      fmt::print("died: {} -> {}, stride {}\n", g.input().text(), g.output().text(), g.stride);
    }
  }
  fmt::print("{} shapes computed\n", computed);
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return argc < 2 ? 1 : lockstep::run(std::atoi(argv[1]), argc > 2);
}
