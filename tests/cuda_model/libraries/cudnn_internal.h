#pragma once
// What the files of the modelled cuDNN share: handles, descriptors, checks.

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

/// When an algorithm turns out not to run, although that was known all along.
enum class Refused { never, when_proposed, when_queried, when_run };

/// What the model says about algorithm number `number` of a pass, with one kind of math.
struct Algorithm {
  int number;
  bool deterministic;
  size_t workspace;
  Refused refused = Refused::never;
  cudnnMathType_t math = CUDNN_FMA_MATH;  // TENSOR_OP: only where the descriptor allows it
  bool whatever_is_asked = false;  // of this math even where the descriptor does not allow it
};
/// In a random order, by CUDA_MODEL_SEED; always the same for the same pass and shape.
std::vector<Algorithm> algorithms(Pass pass, const ConvolutionShape& shape);

/// Checks that the descriptors fit each other and makes one shape of them.
cudnnStatus_t make_shape(cudnnHandle_t handle, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                         cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t y,
                         ConvolutionShape* shape);

/// The algorithm as it runs with the descriptor's math, or a status: it is unknown, or refused
/// `until` then.
cudnnStatus_t find_algorithm(Pass pass, const ConvolutionShape& shape, cudnnMathType_t math,
                             int number, Refused until, Algorithm* algorithm);

}  // namespace cuda_model
