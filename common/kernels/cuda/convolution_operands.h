#pragma once
// In which layout cuDNN is given the tensors of a convolution. Ours have the channels last; with
// --nchw it gets copies that have them first.

#include <initializer_list>

#include "common/core/real.h"
#include "common/core/tensor.h"
#include "common/kernels/cuda/check.h"

namespace lockstep::cuda {

class CudaStream;

/// How a tensor or a filter (O,H,W,I) looks in memory.
struct Operand {
  TensorDescriptor given;  // to cuDNN
  TensorDescriptor ours;   // null: the same
  size_t bytes;            // of a copy; 0: none is made

  Operand() = default;
  /// `shape` is [n, height, width, channels]; `device` is for error texts.
  Operand(const Shape& shape, bool channels_first, const std::string& device);
};

/// Scratch memory of one pass: the copies of its operands, if there are any, and the workspace of
/// its algorithm.
class PassMemory {
 public:
  PassMemory(CudaStream& stream, cudnnHandle_t handle,
             std::initializer_list<const Operand*> operands, size_t workspace);

  void* workspace() const { return next_; }
  /// What cuDNN reads: the tensor itself, or a copy made here.
  const Real* read(const Operand& operand, const Real* tensor);
  /// Where cuDNN writes: the tensor itself, or room for a copy.
  Real* write(const Operand& operand, Real* tensor);
  /// tensor = written + beta * tensor, unless cuDNN wrote there itself.
  void take_back(const Operand& operand, const Real* written, Real* tensor, float beta) const;

 private:
  CudaStream& stream_;
  cudnnHandle_t handle_;
  char* next_;  // free memory; after all copies it is the workspace
};

}  // namespace lockstep::cuda
