// What the model proposes for a convolution. The first proposal of each pass is not deterministic,
// the second does not run: this catches a caller that takes the first proposal.

#include "libraries/cudnn_internal.h"

namespace cuda_model {

std::vector<Algorithm> algorithms(Pass pass, const ConvolutionShape& f) {
  const size_t filter_bytes = sizeof(float) * f.k * f.r * f.s * f.c;
  if (pass == Pass::forward) {
    return {{CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED, true, false, 2 * filter_bytes},
            {CUDNN_CONVOLUTION_FWD_ALGO_FFT, false, true, 0},
            {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, true, true, filter_bytes + 1024},
            {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM, true, true, 0}};
  }
  if (pass == Pass::backward_data) {
    return {{CUDNN_CONVOLUTION_BWD_DATA_ALGO_0, true, false, 0},
            {CUDNN_CONVOLUTION_BWD_DATA_ALGO_FFT, false, true, 0},
            {CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, true, true, 2 * filter_bytes + 512},
            {CUDNN_CONVOLUTION_BWD_DATA_ALGO_WINOGRAD_NONFUSED, true, true, 8 * filter_bytes}};
  }
  return {{CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0, true, false, 0},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_FFT, false, true, 0},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_3, true, false, filter_bytes},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, true, true, 3 * filter_bytes + 256}};
}

cudnnStatus_t find_algorithm(Pass pass, const ConvolutionShape& shape, int number,
                             Algorithm* algorithm) {
  for (const Algorithm& known : algorithms(pass, shape)) {
    if (known.number != number || !known.supported) continue;
    *algorithm = known;
    return CUDNN_STATUS_SUCCESS;
  }
  return refuse(CUDNN_STATUS_NOT_SUPPORTED,
                "algorithm " + std::to_string(number) + " does not run this convolution");
}

cudnnStatus_t make_shape(cudnnHandle_t handle, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                         cudnnConvolutionDescriptor_t conv, cudnnTensorDescriptor_t y,
                         ConvolutionShape* shape) {
  if (!handle || !x || !w || !conv || !y || x->n == 0 || w->k == 0 || y->n == 0 ||
      conv->stride_h == 0) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "a handle or descriptor is null or not set");
  }
  const int window_h = (w->h - 1) * conv->dilation_h + 1;
  const int window_w = (w->w - 1) * conv->dilation_w + 1;
  const int room_h = x->h + 2 * conv->pad_h - window_h, room_w = x->w + 2 * conv->pad_w - window_w;
  if (room_h < 0 || room_w < 0 || y->h != room_h / conv->stride_h + 1 ||
      y->w != room_w / conv->stride_w + 1 || x->c != w->c || y->c != w->k || x->n != y->n) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "the shapes of input, filter and output do not fit");
  }
  *shape = {x->n,
            x->h,
            x->w,
            x->c,
            w->k,
            w->h,
            w->w,
            y->h,
            y->w,
            conv->pad_h,
            conv->pad_w,
            conv->stride_h,
            conv->stride_w,
            conv->dilation_h,
            conv->dilation_w};
  return CUDNN_STATUS_SUCCESS;
}

namespace {

template <class Perf>
cudnnStatus_t propose(Pass pass, const ConvolutionShape& shape, cudnnMathType_t math, int requested,
                      int* returned, Perf* results) {
  if (requested < 1 || returned == nullptr || results == nullptr) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "no room for proposals");
  }
  *returned = 0;
  for (const Algorithm& a : algorithms(pass, shape)) {
    if (*returned == requested) break;
    Perf& perf = results[*returned];
    perf = {};
    perf.algo = static_cast<decltype(perf.algo)>(a.number);
    perf.status = a.supported ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_NOT_SUPPORTED;
    perf.time = a.supported ? 0.1f * float(*returned + 1) : -1.0f;
    perf.memory = a.workspace;
    perf.determinism = a.deterministic ? CUDNN_DETERMINISTIC : CUDNN_NON_DETERMINISTIC;
    perf.mathType = math;
    ++*returned;
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t workspace_size(Pass pass, const ConvolutionShape& shape, int number, size_t* bytes) {
  Algorithm algorithm{};
  const cudnnStatus_t status = find_algorithm(pass, shape, number, &algorithm);
  if (status == CUDNN_STATUS_SUCCESS) *bytes = algorithm.workspace;
  return status;
}

}  // namespace
}  // namespace cuda_model

using namespace cuda_model;

cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnFilterDescriptor_t w,
    const cudnnConvolutionDescriptor_t conv, const cudnnTensorDescriptor_t y, const int requested,
    int* returned, cudnnConvolutionFwdAlgoPerf_t* results) {
  return cudnn_call("cudnnGetConvolutionForwardAlgorithm_v7", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, x, w, conv, y, &shape)) return bad;
    return propose(Pass::forward, shape, conv->math, requested, returned, results);
  });
}

cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(
    cudnnHandle_t handle, const cudnnFilterDescriptor_t w, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t conv, const cudnnTensorDescriptor_t dx, const int requested,
    int* returned, cudnnConvolutionBwdDataAlgoPerf_t* results) {
  return cudnn_call("cudnnGetConvolutionBackwardDataAlgorithm_v7", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, dx, w, conv, dy, &shape)) return bad;
    return propose(Pass::backward_data, shape, conv->math, requested, returned, results);
  });
}

cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t conv, const cudnnFilterDescriptor_t dw, const int requested,
    int* returned, cudnnConvolutionBwdFilterAlgoPerf_t* results) {
  return cudnn_call("cudnnGetConvolutionBackwardFilterAlgorithm_v7", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, x, dw, conv, dy, &shape)) return bad;
    return propose(Pass::backward_filter, shape, conv->math, requested, returned, results);
  });
}

cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnFilterDescriptor_t w,
    const cudnnConvolutionDescriptor_t conv, const cudnnTensorDescriptor_t y,
    cudnnConvolutionFwdAlgo_t algo, size_t* bytes) {
  return cudnn_call("cudnnGetConvolutionForwardWorkspaceSize", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, x, w, conv, y, &shape)) return bad;
    return workspace_size(Pass::forward, shape, algo, bytes);
  });
}

cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(
    cudnnHandle_t handle, const cudnnFilterDescriptor_t w, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t conv, const cudnnTensorDescriptor_t dx,
    cudnnConvolutionBwdDataAlgo_t algo, size_t* bytes) {
  return cudnn_call("cudnnGetConvolutionBackwardDataWorkspaceSize", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, dx, w, conv, dy, &shape)) return bad;
    return workspace_size(Pass::backward_data, shape, algo, bytes);
  });
}

cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t conv, const cudnnFilterDescriptor_t dw,
    cudnnConvolutionBwdFilterAlgo_t algo, size_t* bytes) {
  return cudnn_call("cudnnGetConvolutionBackwardFilterWorkspaceSize", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, x, dw, conv, dy, &shape)) return bad;
    return workspace_size(Pass::backward_filter, shape, algo, bytes);
  });
}
