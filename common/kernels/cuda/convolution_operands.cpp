#include "common/kernels/cuda/convolution_operands.h"

#include "common/core/device.h"
#include "common/kernels/cuda/cuda_stream.h"

namespace lockstep::cuda {
namespace {

TensorDescriptor describe_tensor(const Shape& shape, cudnnTensorFormat_t format,
                                 const std::string& device) {
  cudnnTensorDescriptor_t made = nullptr;
  check(cudnnCreateTensorDescriptor(&made), "cudnnCreateTensorDescriptor", device);
  TensorDescriptor descriptor(made);
  const int n = int(shape[0]), height = int(shape[1]), width = int(shape[2]);
  const int channels = int(shape[3]);
  check(cudnnSetTensor4dDescriptor(made, format, CUDNN_DATA_FLOAT, n, channels, height, width),
        "cudnnSetTensor4dDescriptor", device);
  return descriptor;
}

/// The copies and the workspace begin where cuDNN's vector loads want them.
size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Operand::Operand(const Shape& shape, bool channels_first, const std::string& device)
    : given(describe_tensor(shape, channels_first ? CUDNN_TENSOR_NCHW : CUDNN_TENSOR_NHWC, device)),
      ours(channels_first ? describe_tensor(shape, CUDNN_TENSOR_NHWC, device) : nullptr),
      bytes(channels_first ? aligned(shape.elements() * sizeof(Real)) : 0) {}

PassMemory::PassMemory(CudaStream& stream, cudnnHandle_t handle,
                       std::initializer_list<const Operand*> operands, size_t workspace)
    : stream_(stream), handle_(handle) {
  size_t bytes = workspace;
  for (const Operand* operand : operands) bytes += operand->bytes;
  next_ = static_cast<char*>(stream_.scratch(bytes));
}

Real* PassMemory::write(const Operand& operand, Real* tensor) {
  if (!operand.ours) return tensor;
  char* const copy = next_;
  next_ += operand.bytes;
  return reinterpret_cast<Real*>(copy);
}

const Real* PassMemory::read(const Operand& operand, const Real* tensor) {
  if (!operand.ours) return tensor;
  Real* const copy = write(operand, nullptr);
  const float one = 1, zero = 0;
  check(cudnnTransformTensor(handle_, &one, operand.ours.get(), tensor, &zero, operand.given.get(),
                             copy),
        "cudnnTransformTensor", stream_.device().name());
  return copy;
}

void PassMemory::take_back(const Operand& operand, const Real* written, Real* tensor,
                           float beta) const {
  if (!operand.ours) return;
  const float one = 1;
  check(cudnnTransformTensor(handle_, &one, operand.given.get(), written, &beta, operand.ours.get(),
                             tensor),
        "cudnnTransformTensor", stream_.device().name());
}

}  // namespace lockstep::cuda
