// cuBLAS and cuDNN against plain loops.

#include <cublas_v2.h>
#include <cudnn.h>
#include <nvtx3/nvToolsExt.h>

#include <cmath>
#include <vector>

#include "expect.h"

using Floats = std::vector<float>;

/// Numbers in [-1, 1] with more digits than TF32 keeps.
Floats numbers(size_t n, unsigned seed) {
  Floats values(n);
  for (float& v : values) {
    seed = seed * 1664525u + 1013904223u;
    v = float(seed >> 8) / float(1 << 23) - 1;
  }
  return values;
}

/// |a - b| / |b|, both as vectors.
double relative(const Floats& a, const Floats& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(double(a[i]) - b[i], 2);
    norm += std::pow(double(b[i]), 2);
  }
  return std::sqrt(difference / norm);
}

void gemm(cudaStream_t stream) {
  cublasHandle_t handle = nullptr;
  EXPECT(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
  EXPECT(cublasSetStream(handle, stream) == CUBLAS_STATUS_SUCCESS);
  const int m = 5, n = 3, k = 67, lda = 71, ldb = 70, ldc = 6;
  const Floats a = numbers(lda * 71, 1), b = numbers(ldb * 71, 2), c = numbers(ldc * n, 3);
  float *da = upload<float>(a, stream), *db = upload<float>(b, stream);
  const float alpha = 2, beta = -1;
  for (const bool tf32 : {false, true}) {
    cublasSetMathMode(handle, tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH);
    for (int transposes = 0; transposes < 4; ++transposes) {
      const bool ta = transposes & 1, tb = transposes & 2;
      float* dc = upload<float>(c, stream);
      EXPECT(cublasSgemm(handle, ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb ? CUBLAS_OP_T : CUBLAS_OP_N, m,
                         n, k, &alpha, da, lda, db, ldb, &beta, dc, ldc) == CUBLAS_STATUS_SUCCESS);
      Floats expected = c;
      for (int j = 0; j < n; ++j) {
        for (int i = 0; i < m; ++i) {
          double sum = 0;
          for (int p = 0; p < k; ++p) {
            sum += double(ta ? a[i * lda + p] : a[p * lda + i]) *
                   double(tb ? b[p * ldb + j] : b[j * ldb + p]);
          }
          expected[j * ldc + i] = float(2 * sum) - c[j * ldc + i];
        }
      }
      const double error = relative(download<Floats>(dc, c.size(), stream), expected);
      EXPECT(tf32 ? error > 1e-5 && error < 1e-2 : error < 1e-6);
    }
  }
  EXPECT(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &alpha, da, m - 1, db, ldb, &beta,
                     da, ldc) == CUBLAS_STATUS_INVALID_VALUE);
  EXPECT(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS);
}

/// A convolution with all its descriptors: x[2,5,6,3] (NHWC or NCHW), 4 filters of 3x2.
struct Problem {
  static constexpr int n = 2, h = 5, w = 6, c = 3, k = 4, r = 3, s = 2, p = 3, q = 4;
  static constexpr int pad_h = 1, pad_w = 1, stride = 2;
  cudnnTensorFormat_t format;
  cudnnHandle_t handle = nullptr;
  cudnnTensorDescriptor_t x = nullptr, y = nullptr, bias = nullptr;
  cudnnFilterDescriptor_t filter = nullptr;
  cudnnConvolutionDescriptor_t conv = nullptr;
  cudnnActivationDescriptor_t relu = nullptr;

  Problem(cudaStream_t stream, cudnnTensorFormat_t format, cudnnMathType_t math) : format(format) {
    EXPECT(cudnnCreate(&handle) == CUDNN_STATUS_SUCCESS);
    EXPECT(cudnnSetStream(handle, stream) == CUDNN_STATUS_SUCCESS);
    for (cudnnTensorDescriptor_t* desc : {&x, &y, &bias}) cudnnCreateTensorDescriptor(desc);
    cudnnSetTensor4dDescriptor(x, format, CUDNN_DATA_FLOAT, n, c, h, w);
    cudnnSetTensor4dDescriptor(y, format, CUDNN_DATA_FLOAT, n, k, p, q);
    cudnnSetTensor4dDescriptor(bias, format, CUDNN_DATA_FLOAT, 1, k, 1, 1);
    cudnnCreateFilterDescriptor(&filter);
    cudnnSetFilter4dDescriptor(filter, CUDNN_DATA_FLOAT, format, k, c, r, s);
    cudnnCreateConvolutionDescriptor(&conv);
    cudnnSetConvolution2dDescriptor(conv, pad_h, pad_w, stride, stride, 1, 1,
                                    CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT);
    cudnnSetConvolutionMathType(conv, math);
    cudnnCreateActivationDescriptor(&relu);
    cudnnSetActivationDescriptor(relu, CUDNN_ACTIVATION_RELU, CUDNN_NOT_PROPAGATE_NAN, 0);
  }
  ~Problem() {
    cudnnDestroyActivationDescriptor(relu);
    cudnnDestroyConvolutionDescriptor(conv);
    cudnnDestroyFilterDescriptor(filter);
    for (cudnnTensorDescriptor_t desc : {x, y, bias}) cudnnDestroyTensorDescriptor(desc);
    cudnnDestroy(handle);
  }

  /// Position in memory of (image, channel, row, column) of a tensor with these sizes.
  size_t at(int i, int ch, int row, int col, int channels, int rows, int cols) const {
    return format == CUDNN_TENSOR_NHWC ? ((i * rows + row) * cols + col) * channels + ch
                                       : ((i * channels + ch) * rows + row) * cols + col;
  }
  /// visit(index of y, of x, of the filter) for each product that the convolution sums.
  template <class Visit>
  void each_product(Visit visit) const {
    for (int i = 0; i < n * k * p * q * r * s * c; ++i) {
      const int ch = i % c, fc = i / c % s, fr = i / c / s % r, oc = i / c / s / r % q;
      const int orow = i / c / s / r / q % p, o = i / c / s / r / q / p % k;
      const int image = i / c / s / r / q / p / k;
      const int row = orow * stride - pad_h + fr, col = oc * stride - pad_w + fc;
      if (row < 0 || row >= h || col < 0 || col >= w) continue;
      visit(at(image, o, orow, oc, k, p, q), at(image, ch, row, col, c, h, w),
            at(o, ch, fr, fc, c, r, s));
    }
  }
};

/// The proposal of this algorithm in float32 throughout; among the others is every kind that a
/// caller may not take.
template <class Perf, class Algorithm>
Perf find(const Perf* perfs, int count, Algorithm algorithm, bool deterministic = true) {
  const Perf* found = nullptr;
  bool known = false, unknown = false, noisy = false, tensor_op = false;
  for (const Perf* p = perfs; p < perfs + count; ++p) {
    known = known || p->status == CUDNN_STATUS_SUCCESS;
    unknown = unknown || p->status == CUDNN_STATUS_NOT_SUPPORTED;
    noisy = noisy || p->determinism == CUDNN_NON_DETERMINISTIC;
    tensor_op = tensor_op || p->mathType == CUDNN_TENSOR_OP_MATH;
    if (p->algo == algorithm && p->mathType == CUDNN_FMA_MATH) found = p;
  }
  EXPECT(known && unknown && noisy && tensor_op && found);
  EXPECT(found->determinism == (deterministic ? CUDNN_DETERMINISTIC : CUDNN_NON_DETERMINISTIC));
  return *found;
}

/// All passes of one layout and math. Errors stay below `limit` and above `least`.
void convolution(cudaStream_t stream, cudnnTensorFormat_t format, cudnnMathType_t math,
                 double least, double limit) {
  const Problem P(stream, format, math);
  const Floats x = numbers(180, 1), w = numbers(72, 2), dy = numbers(96, 3), b = numbers(4, 4);
  float *dx_ = upload<float>(Floats(180), stream), *dw_ = upload<float>(w, stream);
  float *y_ = upload<float>(Floats(96, NAN), stream), *x_ = upload<float>(x, stream);
  float *w_ = upload<float>(w, stream), *dy_ = upload<float>(dy, stream);
  float* b_ = upload<float>(b, stream);
  void* space = upload<float>(Floats(4096), stream);
  const float one = 1, zero = 0;
  Floats y(96), dx(180), dw = w, fused(96);
  P.each_product([&](size_t iy, size_t ix, size_t iw) {
    y[iy] += x[ix] * w[iw];
    dx[ix] += dy[iy] * w[iw];
    dw[iw] += dy[iy] * x[ix];
  });
  const auto close = [&](const float* found, const Floats& expected) {
    const double error = relative(download<Floats>(found, expected.size(), stream), expected);
    EXPECT(error <= limit && error >= least);
  };

  int count = 0;
  cudnnConvolutionFwdAlgoPerf_t forward[16];
  cudnnGetConvolutionForwardAlgorithm_v7(P.handle, P.x, P.filter, P.conv, P.y, 16, &count, forward);
  auto f = find(forward, count, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM);
  const size_t proposed = f.memory;
  EXPECT(cudnnGetConvolutionForwardWorkspaceSize(P.handle, P.x, P.filter, P.conv, P.y, f.algo,
                                                 &f.memory) == CUDNN_STATUS_SUCCESS);
  EXPECT((f.memory > proposed) == (math == CUDNN_DEFAULT_MATH));  // tensor cores need more
  const auto run = [&](cudnnConvolutionFwdAlgo_t algorithm, size_t bytes) {
    return cudnnConvolutionForward(P.handle, &one, P.x, x_, P.filter, w_, P.conv, algorithm, space,
                                   bytes, &zero, P.y, y_);
  };
  EXPECT(run(f.algo, f.memory) == CUDNN_STATUS_SUCCESS);
  close(y_, y);
  EXPECT(run(f.algo, f.memory - 1) == CUDNN_STATUS_BAD_PARAM);
  const auto noisy =
      find(forward, count, CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED, /*deterministic=*/false);
  EXPECT(run(noisy.algo, noisy.memory) == CUDNN_STATUS_SUCCESS);
  EXPECT(relative(download<Floats>(y_, 96, stream), y) > 1e-4);  // the noise of its sums
  // One is refused when its workspace is asked for, one only when it runs. One rounds to TF32
  // whatever the descriptor says: only its proposal tells.
  size_t bytes = 0;
  for (const auto algorithm : {CUDNN_CONVOLUTION_FWD_ALGO_GEMM, CUDNN_CONVOLUTION_FWD_ALGO_DIRECT,
                               CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD}) {
    const auto asked = cudnnGetConvolutionForwardWorkspaceSize(P.handle, P.x, P.filter, P.conv, P.y,
                                                               algorithm, &bytes);
    const bool runs = algorithm == CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD;
    EXPECT((asked == CUDNN_STATUS_SUCCESS) ==
           (runs || algorithm == CUDNN_CONVOLUTION_FWD_ALGO_DIRECT));
    EXPECT(run(algorithm, 16384) == (runs ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_NOT_SUPPORTED));
  }
  EXPECT(relative(download<Floats>(y_, 96, stream), y) > 1e-5);

  for (int i = 0; i < 96; ++i) {
    const int channel = format == CUDNN_TENSOR_NHWC ? i % 4 : i / 12 % 4;
    fused[i] = std::fmax(0.0f, y[i] + b[channel]);
  }
  EXPECT(cudnnConvolutionBiasActivationForward(P.handle, &one, P.x, x_, P.filter, w_, P.conv,
                                               f.algo, space, f.memory, &zero, P.y, y_, P.bias, b_,
                                               P.relu, P.y, y_) == CUDNN_STATUS_SUCCESS);
  close(y_, fused);
  EXPECT(cudnnConvolutionBiasActivationForward(P.handle, &one, P.x, x_, P.filter, w_, P.conv,
                                               CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM, space,
                                               f.memory, &zero, P.y, y_, P.bias, b_, P.relu, P.y,
                                               y_) == CUDNN_STATUS_NOT_SUPPORTED);

  cudnnConvolutionBwdDataAlgoPerf_t data[16];
  cudnnGetConvolutionBackwardDataAlgorithm_v7(P.handle, P.filter, P.y, P.conv, P.x, 16, &count,
                                              data);
  auto d = find(data, count, CUDNN_CONVOLUTION_BWD_DATA_ALGO_1);
  cudnnGetConvolutionBackwardDataWorkspaceSize(P.handle, P.filter, P.y, P.conv, P.x, d.algo,
                                               &d.memory);
  EXPECT(cudnnConvolutionBackwardData(P.handle, &one, P.filter, w_, P.y, dy_, P.conv, d.algo, space,
                                      d.memory, &zero, P.x, dx_) == CUDNN_STATUS_SUCCESS);
  close(dx_, dx);
  cudnnConvolutionBwdFilterAlgoPerf_t weights[16];
  cudnnGetConvolutionBackwardFilterAlgorithm_v7(P.handle, P.x, P.y, P.conv, P.filter, 16, &count,
                                                weights);
  auto g = find(weights, count, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1);
  cudnnGetConvolutionBackwardFilterWorkspaceSize(P.handle, P.x, P.y, P.conv, P.filter, g.algo,
                                                 &g.memory);
  EXPECT(cudnnConvolutionBackwardFilter(P.handle, &one, P.x, x_, P.y, dy_, P.conv, g.algo, space,
                                        g.memory, &one, P.filter, dw_) == CUDNN_STATUS_SUCCESS);
  close(dw_, dw);  // added to what was there
}

/// From one layout to the other, and back onto what is there.
void transform(cudaStream_t stream) {
  const Problem last(stream, CUDNN_TENSOR_NHWC, CUDNN_FMA_MATH);
  const Problem first(stream, CUDNN_TENSOR_NCHW, CUDNN_FMA_MATH);
  constexpr int channels = Problem::c, height = Problem::h, width = Problem::w;
  const Floats x = numbers(size_t(Problem::n) * channels * height * width, 1);
  float *x_ = upload<float>(x, stream), *copy_ = upload<float>(numbers(x.size(), 2), stream);
  const float one = 1, zero = 0;
  EXPECT(cudnnTransformTensor(last.handle, &one, last.x, x_, &zero, first.x, copy_) ==
         CUDNN_STATUS_SUCCESS);
  const Floats copy = download<Floats>(copy_, x.size(), stream);
  for (size_t i = 0; i < x.size(); ++i) {
    const int ch = i % channels, col = i / channels % width, row = i / channels / width % height;
    const int image = i / channels / width / height;
    EXPECT(copy[first.at(image, ch, row, col, channels, height, width)] == x[i]);
  }
  EXPECT(cudnnTransformTensor(last.handle, &one, first.x, copy_, &one, last.x, x_) ==
         CUDNN_STATUS_SUCCESS);
  const Floats twice = download<Floats>(x_, x.size(), stream);
  for (size_t i = 0; i < x.size(); ++i) EXPECT(twice[i] == 2 * x[i]);
  EXPECT(cudnnTransformTensor(last.handle, &one, last.x, x_, &zero, first.y, copy_) ==
         CUDNN_STATUS_BAD_PARAM);  // another shape
  EXPECT(cudnnTransformTensor(last.handle, &one, last.x, x_, &zero, first.x, x_) ==
         CUDNN_STATUS_BAD_PARAM);  // not in place
}

int main() {
  cudaStream_t stream = make_stream();
  gemm(stream);
  for (const auto format : {CUDNN_TENSOR_NHWC, CUDNN_TENSOR_NCHW}) {
    convolution(stream, format, CUDNN_FMA_MATH, 0, 1e-6);
    convolution(stream, format, CUDNN_DEFAULT_MATH, 1e-5, 1e-2);
  }
  transform(stream);
  EXPECT(nvtxRangePushA("outer") == 0);
  EXPECT(nvtxRangePushA("inner") == 1);
  EXPECT(nvtxRangePop() == 1);
  EXPECT(nvtxRangePop() == 0);
  EXPECT(nvtxRangePop() < 0);
  return expect_failures == 0 ? 0 : 1;
}
