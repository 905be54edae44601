#include <cstdio>

#include "libraries/cudnn_internal.h"
#include "runtime/environment.h"

namespace {

thread_local std::string last_message;

bool is_known(cudnnDataType_t type) {
  return type == CUDNN_DATA_FLOAT || type == CUDNN_DATA_HALF || type == CUDNN_DATA_BFLOAT16;
}

}  // namespace

namespace cuda_model {

cudnnStatus_t refuse(cudnnStatus_t status, const std::string& message) {
  last_message = message;
  return status;
}

}  // namespace cuda_model

using namespace cuda_model;

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() {
  return integer_variable("CUDA_MODEL_CUDNN_CUDART", CUDART_VERSION);
}

const char* cudnnGetErrorString(cudnnStatus_t status) {
  switch (status) {
    case CUDNN_STATUS_SUCCESS:
      return "CUDNN_STATUS_SUCCESS";
    case CUDNN_STATUS_NOT_INITIALIZED:
      return "CUDNN_STATUS_NOT_INITIALIZED";
    case CUDNN_STATUS_BAD_PARAM:
      return "CUDNN_STATUS_BAD_PARAM";
    case CUDNN_STATUS_NOT_SUPPORTED:
      return "CUDNN_STATUS_NOT_SUPPORTED";
    case CUDNN_STATUS_INTERNAL_ERROR:
      return "CUDNN_STATUS_INTERNAL_ERROR";
    case CUDNN_STATUS_EXECUTION_FAILED:
      return "CUDNN_STATUS_EXECUTION_FAILED";
  }
  return "CUDNN_STATUS_UNKNOWN";
}

void cudnnGetLastErrorString(char* message, size_t max_size) {
  std::snprintf(message, max_size, "%s", last_message.c_str());
  last_message.clear();
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  return cudnn_call("cudnnCreate", [&] {
    if (handle == nullptr) return refuse(CUDNN_STATUS_BAD_PARAM, "cudnnCreate: handle is null");
    if (admit("") != cudaSuccess || current_device() == nullptr || sticky_error() != cudaSuccess) {
      return refuse(CUDNN_STATUS_NOT_INITIALIZED, "cudnnCreate: no usable GPU");
    }
    *handle = new cudnnContext{current_device()};
    return CUDNN_STATUS_SUCCESS;
  });
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t handle_of_stream) {
  return cudnn_call("cudnnSetStream", [&] {
    const auto stream = find_stream(handle_of_stream);
    if (handle == nullptr || stream == nullptr || &stream->device != handle->device) {
      return refuse(CUDNN_STATUS_BAD_PARAM, "cudnnSetStream: the stream is not of this device");
    }
    handle->stream = handle_of_stream;
    return CUDNN_STATUS_SUCCESS;
  });
}

#define CUDA_MODEL_DESCRIPTOR(Name)                                              \
  cudnnStatus_t cudnnCreate##Name##Descriptor(cudnn##Name##Descriptor_t* desc) { \
    return cudnn_call("cudnnCreate" #Name "Descriptor", [&] {                    \
      *desc = new cudnn##Name##Struct;                                           \
      return CUDNN_STATUS_SUCCESS;                                               \
    });                                                                          \
  }                                                                              \
  cudnnStatus_t cudnnDestroy##Name##Descriptor(cudnn##Name##Descriptor_t desc) { \
    delete desc;                                                                 \
    return CUDNN_STATUS_SUCCESS;                                                 \
  }
CUDA_MODEL_DESCRIPTOR(Tensor)
CUDA_MODEL_DESCRIPTOR(Filter)
CUDA_MODEL_DESCRIPTOR(Convolution)
CUDA_MODEL_DESCRIPTOR(Activation)
#undef CUDA_MODEL_DESCRIPTOR

cudnnStatus_t cudnnSetTensor4dDescriptor(cudnnTensorDescriptor_t desc, cudnnTensorFormat_t format,
                                         cudnnDataType_t type, int n, int c, int h, int w) {
  return cudnn_call("cudnnSetTensor4dDescriptor", [&] {
    if (desc == nullptr || n <= 0 || c <= 0 || h <= 0 || w <= 0) {
      return refuse(CUDNN_STATUS_BAD_PARAM, "cudnnSetTensor4dDescriptor: a size is not positive");
    }
    if (!is_known(type)) {
      return refuse(CUDNN_STATUS_NOT_SUPPORTED, "the CUDA model knows FLOAT, HALF and BFLOAT16");
    }
    *desc = {type, format == CUDNN_TENSOR_NHWC, n, c, h, w};
    return CUDNN_STATUS_SUCCESS;
  });
}

cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t desc, cudnnDataType_t type,
                                         cudnnTensorFormat_t format, int k, int c, int h, int w) {
  return cudnn_call("cudnnSetFilter4dDescriptor", [&] {
    if (desc == nullptr || k <= 0 || c <= 0 || h <= 0 || w <= 0) {
      return refuse(CUDNN_STATUS_BAD_PARAM, "cudnnSetFilter4dDescriptor: a size is not positive");
    }
    if (!is_known(type)) {
      return refuse(CUDNN_STATUS_NOT_SUPPORTED, "the CUDA model knows FLOAT, HALF and BFLOAT16");
    }
    *desc = {type, format == CUDNN_TENSOR_NHWC, k, c, h, w};
    return CUDNN_STATUS_SUCCESS;
  });
}

cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t desc, int pad_h,
                                              int pad_w, int u, int v, int dilation_h,
                                              int dilation_w, cudnnConvolutionMode_t mode,
                                              cudnnDataType_t type) {
  return cudnn_call("cudnnSetConvolution2dDescriptor", [&] {
    if (desc == nullptr || pad_h < 0 || pad_w < 0 || u <= 0 || v <= 0 || dilation_h <= 0 ||
        dilation_w <= 0) {
      return refuse(CUDNN_STATUS_BAD_PARAM,
                    "cudnnSetConvolution2dDescriptor: negative padding, or stride or dilation 0");
    }
    if (mode != CUDNN_CROSS_CORRELATION || type != CUDNN_DATA_FLOAT) {
      return refuse(CUDNN_STATUS_NOT_SUPPORTED,
                    "the CUDA model knows CUDNN_CROSS_CORRELATION of CUDNN_DATA_FLOAT only");
    }
    *desc = {pad_h, pad_w, u, v, dilation_h, dilation_w, desc->math};
    return CUDNN_STATUS_SUCCESS;
  });
}

cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t desc, cudnnMathType_t math) {
  return cudnn_call("cudnnSetConvolutionMathType", [&] {
    if (desc == nullptr) return refuse(CUDNN_STATUS_BAD_PARAM, "the descriptor is null");
    desc->math = math;
    return CUDNN_STATUS_SUCCESS;
  });
}

cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t desc, int groups) {
  return cudnn_call("cudnnSetConvolutionGroupCount", [&] {
    if (desc == nullptr || groups < 1) return refuse(CUDNN_STATUS_BAD_PARAM, "no group");
    if (groups == 1) return CUDNN_STATUS_SUCCESS;
    return refuse(CUDNN_STATUS_NOT_SUPPORTED, "the CUDA model knows one group only");
  });
}

cudnnStatus_t cudnnSetActivationDescriptor(cudnnActivationDescriptor_t desc,
                                           cudnnActivationMode_t mode, cudnnNanPropagation_t nan,
                                           double) {
  return cudnn_call("cudnnSetActivationDescriptor", [&] {
    if (desc == nullptr) return refuse(CUDNN_STATUS_BAD_PARAM, "the descriptor is null");
    *desc = {mode, nan == CUDNN_PROPAGATE_NAN};
    return CUDNN_STATUS_SUCCESS;
  });
}
