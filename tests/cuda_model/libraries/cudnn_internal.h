#pragma once
// Shared by the files of the modelled cuDNN: handles, descriptors, checks.

#include <string>

#include "cudnn.h"
#include "libraries/convolution.h"
#include "runtime/model.h"

struct cudnnContext {
  cuda_model::Device* device;
  cudaStream_t stream = nullptr;
};
struct cudnnTensorStruct {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  bool nhwc = false;
  int n = 0, c = 0, h = 0, w = 0;  // 0: not set
  size_t elements() const { return size_t(n) * c * h * w; }
};
struct cudnnFilterStruct {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  bool nhwc = false;
  int k = 0, c = 0, h = 0, w = 0;
  size_t elements() const { return size_t(k) * c * h * w; }
};
struct cudnnConvolutionStruct {
  int pad_h = 0, pad_w = 0, stride_h = 0, stride_w = 0, dilation_h = 1, dilation_w = 1;
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;
};
struct cudnnActivationStruct {
  cudnnActivationMode_t mode = CUDNN_ACTIVATION_IDENTITY;
  bool propagates_nan = false;
};

namespace cuda_model {

/// Keeps `message` for cudnnGetLastErrorString and returns `status`.
cudnnStatus_t refuse(cudnnStatus_t status, const std::string& message);

/// The frame of a call: a planted fault, then `body`.
template <class Body>
cudnnStatus_t cudnn_call(const char* function, Body body) {
  if (const int code = planted_code(function)) return static_cast<cudnnStatus_t>(code);
  return body();
}

enum class Pass { forward, backward_data, backward_filter };

/// The moment at which cuDNN says that an algorithm does not run; it could have said so earlier.
enum class Refused { never, when_proposed, when_queried, when_run };

/// The model's answer about algorithm `number` of a pass, with one kind of math.
struct Algorithm {
  int number;
  bool deterministic;
  size_t workspace;
  Refused refused = Refused::never;
  cudnnMathType_t math = CUDNN_FMA_MATH;  // TENSOR_OP: only where the descriptor allows it
  bool whatever_is_asked = false;  // of this math even where the descriptor does not allow it
};
/// All algorithms in a random order, by CUDA_MODEL_SEED; the same for the same pass and shape.
std::vector<Algorithm> algorithms(Pass pass, const ConvolutionShape& shape);

/// Checks that the descriptors fit each other and makes one shape of them.
cudnnStatus_t make_shape(cudnnHandle_t handle, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                         cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t y,
                         ConvolutionShape* shape);

/// Finds the algorithm as it runs with the descriptor's math. Returns an error if it is unknown, or
/// refused at the moment `until` or before.
cudnnStatus_t find_algorithm(Pass pass, const ConvolutionShape& shape, cudnnMathType_t math,
                             int number, Refused until, Algorithm* algorithm);

}  // namespace cuda_model
