// What the model proposes for a convolution: all that a caller may not take besides what it may, in
// a random order. Only one that looks at everything, and goes on when it is refused, gets through.

#include <algorithm>
#include <random>

#include "libraries/cudnn_internal.h"
#include "runtime/environment.h"

namespace cuda_model {
namespace {

std::vector<Algorithm> all_algorithms(Pass pass, size_t filter_bytes) {
  const auto tensor_op = CUDNN_TENSOR_OP_MATH, conversion = CUDNN_TENSOR_OP_MATH_ALLOW_CONVERSION;
  const auto never = Refused::never;
  if (pass == Pass::forward) {
    return {{CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED, false, 2 * filter_bytes},
            {CUDNN_CONVOLUTION_FWD_ALGO_FFT, true, 0, Refused::when_proposed},
            {CUDNN_CONVOLUTION_FWD_ALGO_GEMM, true, 64, Refused::when_queried},
            {CUDNN_CONVOLUTION_FWD_ALGO_DIRECT, true, 128, Refused::when_run},
            {CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD, true, filter_bytes, never, tensor_op, true},
            {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, true, filter_bytes + 1024},
            {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, true, 4 * filter_bytes + 4096, never,
             tensor_op},
            {CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING, true, 0, never, conversion},
            {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM, true, 0}};
  }
  if (pass == Pass::backward_data) {
    return {{CUDNN_CONVOLUTION_BWD_DATA_ALGO_0, false, 0},
            {CUDNN_CONVOLUTION_BWD_DATA_ALGO_FFT, true, 0, Refused::when_proposed},
            {CUDNN_CONVOLUTION_BWD_DATA_ALGO_FFT_TILING, true, 64, Refused::when_queried},
            {CUDNN_CONVOLUTION_BWD_DATA_ALGO_WINOGRAD, true, 128, Refused::when_run},
            {CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, true, 2 * filter_bytes + 512},
            {CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, true, 4 * filter_bytes + 512, never, tensor_op},
            {CUDNN_CONVOLUTION_BWD_DATA_ALGO_WINOGRAD_NONFUSED, true, 8 * filter_bytes}};
  }
  return {{CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0, false, 0},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_FFT, true, 0, Refused::when_proposed},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_FFT_TILING, true, 64, Refused::when_queried},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_WINOGRAD_NONFUSED, true, 128, Refused::when_run},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_3, false, filter_bytes},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, true, 3 * filter_bytes + 256},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, true, 5 * filter_bytes + 256, never, tensor_op},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_WINOGRAD, true, 8 * filter_bytes}};
}

/// What CUDA_MODEL_PROPOSALS says of cuDNN's heuristics.
enum class Proposals { usable = 1, none_in_float32 = 0, only_channels_first = -1 };

Proposals proposals() {
  return static_cast<Proposals>(integer_variable("CUDA_MODEL_PROPOSALS", 1));
}

/// Whether a row is for a descriptor with this math. A descriptor that allows tensor cores gets
/// them where the algorithm has them.
bool runs_with(const Algorithm& row, cudnnMathType_t math) {
  if (row.whatever_is_asked) return true;
  if (math == CUDNN_FMA_MATH) return row.math == CUDNN_FMA_MATH;
  return row.math != CUDNN_TENSOR_OP_MATH_ALLOW_CONVERSION || math == row.math;
}

}  // namespace

std::vector<Algorithm> algorithms(Pass pass, const ConvolutionShape& f) {
  auto rows = all_algorithms(pass, sizeof(float) * f.k * f.r * f.s * f.c);
  const int seed = integer_variable("CUDA_MODEL_SEED", 1);
  std::seed_seq question{seed, int(pass), f.n, f.h, f.w, f.c, f.k, f.r, f.s, f.stride_h};
  std::shuffle(rows.begin(), rows.end(), std::mt19937(question));
  return rows;
}

cudnnStatus_t find_algorithm(Pass pass, const ConvolutionShape& shape, cudnnMathType_t math,
                             int number, Refused until, Algorithm* algorithm) {
  const Algorithm* best = nullptr;
  if (shape.channels_last && proposals() == Proposals::only_channels_first)
    return refuse(CUDNN_STATUS_NOT_SUPPORTED, "nothing runs with the channels last");
  const auto rows = algorithms(pass, shape);
  for (const Algorithm& row : rows) {
    if (row.number != number || !runs_with(row, math)) continue;
    if (row.refused != Refused::never && row.refused <= until) continue;
    if (best == nullptr || row.math != CUDNN_FMA_MATH) best = &row;
  }
  if (best == nullptr) {
    return refuse(CUDNN_STATUS_NOT_SUPPORTED,
                  "algorithm " + std::to_string(number) + " does not run this convolution");
  }
  *algorithm = *best;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t make_shape(cudnnHandle_t handle, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                         cudnnConvolutionDescriptor_t conv, cudnnTensorDescriptor_t y,
                         ConvolutionShape* shape) {
  if (!handle || !x || !w || !conv || !y || x->n == 0 || w->k == 0 || y->n == 0 ||
      conv->stride_h == 0) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "a handle or descriptor is null or not set");
  }
  if (x->type != w->type || x->type != y->type) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "input, filter and output have different types");
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
            conv->dilation_w,
            x->nhwc};
  return CUDNN_STATUS_SUCCESS;
}

namespace {

template <class Perf>
cudnnStatus_t propose(Pass pass, const ConvolutionShape& shape, int requested, int* returned,
                      Perf* results) {
  if (requested < 1 || returned == nullptr || results == nullptr) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "no room for proposals");
  }
  *returned = 0;
  for (const Algorithm& a : algorithms(pass, shape)) {
    if (*returned == requested) break;
    if (a.math == CUDNN_FMA_MATH && proposals() != Proposals::usable) continue;
    Perf& perf = results[*returned];
    perf = {};
    perf.algo = static_cast<decltype(perf.algo)>(a.number);
    const bool known = a.refused != Refused::when_proposed;
    perf.status = known ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_NOT_SUPPORTED;
    perf.time = known ? 0.1f * float(*returned + 1) : -1.0f;
    perf.memory = a.workspace;
    perf.determinism = a.deterministic ? CUDNN_DETERMINISTIC : CUDNN_NON_DETERMINISTIC;
    perf.mathType = a.math;
    ++*returned;
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t workspace_size(Pass pass, const ConvolutionShape& shape, cudnnMathType_t math,
                             int number, size_t* bytes) {
  Algorithm algorithm{};
  const cudnnStatus_t status =
      find_algorithm(pass, shape, math, number, Refused::when_queried, &algorithm);
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
    return propose(Pass::forward, shape, requested, returned, results);
  });
}

cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(
    cudnnHandle_t handle, const cudnnFilterDescriptor_t w, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t conv, const cudnnTensorDescriptor_t dx, const int requested,
    int* returned, cudnnConvolutionBwdDataAlgoPerf_t* results) {
  return cudnn_call("cudnnGetConvolutionBackwardDataAlgorithm_v7", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, dx, w, conv, dy, &shape)) return bad;
    return propose(Pass::backward_data, shape, requested, returned, results);
  });
}

cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t conv, const cudnnFilterDescriptor_t dw, const int requested,
    int* returned, cudnnConvolutionBwdFilterAlgoPerf_t* results) {
  return cudnn_call("cudnnGetConvolutionBackwardFilterAlgorithm_v7", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, x, dw, conv, dy, &shape)) return bad;
    return propose(Pass::backward_filter, shape, requested, returned, results);
  });
}

cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnFilterDescriptor_t w,
    const cudnnConvolutionDescriptor_t conv, const cudnnTensorDescriptor_t y,
    cudnnConvolutionFwdAlgo_t algo, size_t* bytes) {
  return cudnn_call("cudnnGetConvolutionForwardWorkspaceSize", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, x, w, conv, y, &shape)) return bad;
    return workspace_size(Pass::forward, shape, conv->math, algo, bytes);
  });
}

cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(
    cudnnHandle_t handle, const cudnnFilterDescriptor_t w, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t conv, const cudnnTensorDescriptor_t dx,
    cudnnConvolutionBwdDataAlgo_t algo, size_t* bytes) {
  return cudnn_call("cudnnGetConvolutionBackwardDataWorkspaceSize", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, dx, w, conv, dy, &shape)) return bad;
    return workspace_size(Pass::backward_data, shape, conv->math, algo, bytes);
  });
}

cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t conv, const cudnnFilterDescriptor_t dw,
    cudnnConvolutionBwdFilterAlgo_t algo, size_t* bytes) {
  return cudnn_call("cudnnGetConvolutionBackwardFilterWorkspaceSize", [&] {
    ConvolutionShape shape{};
    if (const auto bad = make_shape(handle, x, dw, conv, dy, &shape)) return bad;
    return workspace_size(Pass::backward_filter, shape, conv->math, algo, bytes);
  });
}
