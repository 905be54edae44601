#pragma once
// The engines that convolve and multiply matrices on CPU devices: oneDNN, and a readable one. The
// latter is the oracle of the tests, and is used where oneDNN is missing or float64 is asked for.

#include <memory>
#include <string>
#include <utility>

#include "common/core/cpu_stream.h"
#include "common/core/host.h"
#include "common/kernels/geometry.h"

namespace lockstep::cpu {

/// Computes for one stream's worker, which calls and destroys the engine. Shapes as in kernels.h.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual void conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias,
                      Real* y) = 0;
  virtual void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight,
                                     Real* dx) = 0;
  virtual void conv2d_backward_parameters(const Window2d& g, const Real* x, const Real* dy,
                                          Real* dweight, Real* dbias) = 0;
  virtual void matmul(const MatMul& shape, const Real* a, const Real* b, Real* c) = 0;
};

/// A kind of engine.
struct EngineMaker {
  std::string name;
  /// Called by a worker, for its stream; null in a build without this engine.
  std::unique_ptr<Engine> (*make)(CpuStream& stream) = nullptr;
};
/// Loops on Real.
EngineMaker reference_engine();
/// oneDNN; `make` is null in a build without oneDNN.
EngineMaker onednn_engine();

/// The catalogue, with convolution and matrix product by this engine.
std::unique_ptr<Kernels> make_kernels(EngineMaker engine);

/// Workspace of a stream's worker: grows to the largest request, counted on the device.
class Workspace {
 public:
  explicit Workspace(CpuStream& stream) : stream_(stream) {}
  ~Workspace() { release(); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  /// At least `bytes` bytes; the memory of the last call is no longer valid.
  void* at_least(size_t bytes) {
    if (bytes > bytes_) {
      release();  // first: the two need not exist side by side
      memory_ = allocate_aligned(bytes);
      stream_.count_workspace(static_cast<int64_t>(bytes));
      bytes_ = bytes;
    }
    return memory_;
  }

 private:
  void release() {
    if (memory_ == nullptr) return;
    release_aligned(std::exchange(memory_, nullptr));
    stream_.count_workspace(-static_cast<int64_t>(std::exchange(bytes_, 0)));
  }

  CpuStream& stream_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace lockstep::cpu
