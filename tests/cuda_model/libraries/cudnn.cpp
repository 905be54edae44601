// The convolutions of the modelled cuDNN: each a task of the handle's stream.

#include <cmath>

#include "libraries/cudnn_internal.h"
#include "libraries/sixteen.h"
#include "libraries/tf32.h"

using namespace cuda_model;

namespace {

Number kind_of(cudnnDataType_t type) {
  if (type == CUDNN_DATA_BFLOAT16) return Number::bf16;
  return type == CUDNN_DATA_HALF ? Number::fp16 : Number::real;
}

/// Position of (n, c, h, w) in memory of the tensor's format, and the type of its numbers; filters
/// count k as n.
struct Layout {
  cudnnDataType_t type;
  bool nhwc;
  size_t n, c, h, w;
  explicit Layout(const cudnnTensorStruct& t)
      : type(t.type), nhwc(t.nhwc), n(t.n), c(t.c), h(t.h), w(t.w) {}
  explicit Layout(const cudnnFilterStruct& f)
      : type(f.type), nhwc(f.nhwc), n(f.k), c(f.c), h(f.h), w(f.w) {}
  /// visit(position in memory, position in packed NHWC order) of every element.
  template <class Visit>
  void each(Visit visit) const {
    if (nhwc || c == 1) {  // the same order
      for (size_t i = 0; i < n * c * h * w; ++i) visit(i, i);
      return;
    }
    size_t packed = 0;
    for (size_t in = 0; in < n; ++in) {
      for (size_t ih = 0; ih < h; ++ih) {
        for (size_t iw = 0; iw < w; ++iw) {
          for (size_t ic = 0; ic < c; ++ic, ++packed) {
            visit(((in * c + ic) * h + ih) * w + iw, packed);
          }
        }
      }
    }
  }
};

Values pack(const Layout& layout, const void* data, bool tf32) {
  Values packed(layout.n * layout.c * layout.h * layout.w);
  layout.each([&](size_t at, size_t i) {
    const float value = load(kind_of(layout.type), data, at);
    packed[i] = tf32 ? to_tf32(value) : value;  // numbers of 16 bits have no more digits
  });
  return packed;
}

/// data = alpha * result + beta * data; where beta is 0, data is not read.
void blend(const Layout& layout, const Values& result, float alpha, float beta, void* data) {
  const Number kind = kind_of(layout.type);
  layout.each([&](size_t at, size_t i) {
    store(kind, alpha * result[i] + (beta == 0 ? 0.0f : beta * load(kind, data, at)), data, at);
  });
}

/// The error that an algorithm with any order of adding makes in a sum, large enough to be seen.
void add_noise(Values& values) {
  static std::atomic<unsigned> calls{0};
  uint64_t state = 0x9e3779b97f4a7c15u * (++calls);
  for (float& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value *= 1 + 1e-3f * (float(state >> 40) / float(1 << 23) - 1);
  }
}

/// One pass, when it is enqueued. `run` gets no handles or descriptors: they may be gone by then.
struct Call {
  cudnnHandle_t handle;
  Algorithm algorithm;
  void* workspace;
  size_t workspace_bytes;

  template <class Run>
  cudnnStatus_t enqueue(Run run) const {
    if (workspace_bytes < algorithm.workspace ||
        (workspace == nullptr && algorithm.workspace > 0)) {
      return refuse(CUDNN_STATUS_BAD_PARAM,
                    "the workspace has " + std::to_string(workspace ? workspace_bytes : 0) +
                        " bytes, the algorithm needs " + std::to_string(algorithm.workspace));
    }
    const bool noisy = !algorithm.deterministic;
    const auto task = [=, memory = workspace, bytes = algorithm.workspace] {
      if (bytes > 0) std::memset(memory, 0xa5, bytes);
      run([noisy](Values values) {
        if (noisy) add_noise(values);
        return values;
      });
    };
    if (enqueue_kernel(handle->stream, task) == cudaSuccess) return CUDNN_STATUS_SUCCESS;
    return refuse(CUDNN_STATUS_EXECUTION_FAILED, "the convolution could not be enqueued");
  }
};

/// Whether a pass rounds its operands: the descriptor allows it, or the algorithm does not ask.
bool rounds_to_tf32(const Algorithm& algorithm, const cudnnConvolutionStruct& convolution) {
  return convolution.math != CUDNN_FMA_MATH || algorithm.math != CUDNN_FMA_MATH;
}

float scalar(const void* pointer) { return *static_cast<const float*>(pointer); }
const float* input(const void* pointer) { return static_cast<const float*>(pointer); }

float activate(const cudnnActivationStruct& activation, float value) {
  if (activation.mode == CUDNN_ACTIVATION_IDENTITY) return value;
  if (std::isnan(value)) return activation.propagates_nan ? value : 0;
  return value > 0 ? value : 0;
}

}  // namespace

cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t handle, const void* alpha,
                                      const cudnnTensorDescriptor_t x_desc, const void* x,
                                      const cudnnFilterDescriptor_t w_desc, const void* w,
                                      const cudnnConvolutionDescriptor_t conv,
                                      cudnnConvolutionFwdAlgo_t algo, void* workspace, size_t bytes,
                                      const void* beta, const cudnnTensorDescriptor_t y_desc,
                                      void* y) {
  return cudnn_call("cudnnConvolutionForward", [&] {
    ConvolutionShape shape{};
    Algorithm algorithm{};
    if (const auto bad = make_shape(handle, x_desc, w_desc, conv, y_desc, &shape)) return bad;
    if (const auto bad =
            find_algorithm(Pass::forward, shape, conv->math, algo, Refused::when_run, &algorithm))
      return bad;
    const Layout x_layout(*x_desc), w_layout(*w_desc), y_layout(*y_desc);
    const bool tf32 = rounds_to_tf32(algorithm, *conv);
    const float a = scalar(alpha), b = scalar(beta);
    return Call{handle, algorithm, workspace, bytes}.enqueue([=](auto finish) {
      const Values result =
          finish(convolve(shape, pack(x_layout, x, tf32), pack(w_layout, w, tf32)));
      blend(y_layout, result, a, b, y);
    });
  });
}

cudnnStatus_t cudnnConvolutionBiasActivationForward(
    cudnnHandle_t handle, const void* alpha1, const cudnnTensorDescriptor_t x_desc, const void* x,
    const cudnnFilterDescriptor_t w_desc, const void* w, const cudnnConvolutionDescriptor_t conv,
    cudnnConvolutionFwdAlgo_t algo, void* workspace, size_t bytes, const void* alpha2,
    const cudnnTensorDescriptor_t z_desc, const void* z, const cudnnTensorDescriptor_t bias_desc,
    const void* bias, const cudnnActivationDescriptor_t activation_desc,
    const cudnnTensorDescriptor_t y_desc, void* y) {
  return cudnn_call("cudnnConvolutionBiasActivationForward", [&] {
    ConvolutionShape shape{};
    Algorithm algorithm{};
    if (const auto bad = make_shape(handle, x_desc, w_desc, conv, y_desc, &shape)) return bad;
    if (!z_desc || !z || !bias_desc || !bias || !activation_desc || bias_desc->c != shape.k ||
        bias_desc->elements() != size_t(shape.k) || bias_desc->type != y_desc->type ||
        z_desc->elements() != y_desc->elements()) {
      return refuse(CUDNN_STATUS_BAD_PARAM, "z, bias or activation is null or does not fit");
    }
    const cudnnActivationStruct activation = *activation_desc;
    if (algo != CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM ||
        (activation.mode != CUDNN_ACTIVATION_IDENTITY &&
         activation.mode != CUDNN_ACTIVATION_RELU)) {
      return refuse(CUDNN_STATUS_NOT_SUPPORTED,
                    "bias and activation need IMPLICIT_PRECOMP_GEMM, and ReLU or identity");
    }
    if (const auto bad =
            find_algorithm(Pass::forward, shape, conv->math, algo, Refused::when_run, &algorithm))
      return bad;
    const Layout x_layout(*x_desc), w_layout(*w_desc), y_layout(*y_desc), z_layout(*z_desc);
    const bool tf32 = rounds_to_tf32(algorithm, *conv);
    const float a = scalar(alpha1), of_z = scalar(alpha2);
    return Call{handle, algorithm, workspace, bytes}.enqueue([=](auto finish) {
      Values result = finish(convolve(shape, pack(x_layout, x, tf32), pack(w_layout, w, tf32)));
      const Values added = of_z == 0 ? Values(result.size(), 0.0f) : pack(z_layout, z, false);
      for (size_t i = 0; i < result.size(); ++i) {
        const float sum = a * result[i] + of_z * added[i] + input(bias)[i % shape.k];
        result[i] = activate(activation, sum);
      }
      blend(y_layout, result, 1, 0, y);
    });
  });
}

cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t handle, const void* alpha,
                                           const cudnnFilterDescriptor_t w_desc, const void* w,
                                           const cudnnTensorDescriptor_t dy_desc, const void* dy,
                                           const cudnnConvolutionDescriptor_t conv,
                                           cudnnConvolutionBwdDataAlgo_t algo, void* workspace,
                                           size_t bytes, const void* beta,
                                           const cudnnTensorDescriptor_t dx_desc, void* dx) {
  return cudnn_call("cudnnConvolutionBackwardData", [&] {
    ConvolutionShape shape{};
    Algorithm algorithm{};
    if (const auto bad = make_shape(handle, dx_desc, w_desc, conv, dy_desc, &shape)) return bad;
    if (const auto bad = find_algorithm(Pass::backward_data, shape, conv->math, algo,
                                        Refused::when_run, &algorithm))
      return bad;
    const Layout w_layout(*w_desc), dy_layout(*dy_desc), dx_layout(*dx_desc);
    const bool tf32 = rounds_to_tf32(algorithm, *conv);
    const float a = scalar(alpha), b = scalar(beta);
    return Call{handle, algorithm, workspace, bytes}.enqueue([=](auto finish) {
      const Values result =
          finish(convolve_backward_data(shape, pack(w_layout, w, tf32), pack(dy_layout, dy, tf32)));
      blend(dx_layout, result, a, b, dx);
    });
  });
}

cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t handle, const void* alpha,
                                             const cudnnTensorDescriptor_t x_desc, const void* x,
                                             const cudnnTensorDescriptor_t dy_desc, const void* dy,
                                             const cudnnConvolutionDescriptor_t conv,
                                             cudnnConvolutionBwdFilterAlgo_t algo, void* workspace,
                                             size_t bytes, const void* beta,
                                             const cudnnFilterDescriptor_t dw_desc, void* dw) {
  return cudnn_call("cudnnConvolutionBackwardFilter", [&] {
    ConvolutionShape shape{};
    Algorithm algorithm{};
    if (const auto bad = make_shape(handle, x_desc, dw_desc, conv, dy_desc, &shape)) return bad;
    if (const auto bad = find_algorithm(Pass::backward_filter, shape, conv->math, algo,
                                        Refused::when_run, &algorithm))
      return bad;
    const Layout x_layout(*x_desc), dy_layout(*dy_desc), dw_layout(*dw_desc);
    const bool tf32 = rounds_to_tf32(algorithm, *conv);
    const float a = scalar(alpha), b = scalar(beta);
    return Call{handle, algorithm, workspace, bytes}.enqueue([=](auto finish) {
      const Values result = finish(
          convolve_backward_filter(shape, pack(x_layout, x, tf32), pack(dy_layout, dy, tf32)));
      blend(dw_layout, result, a, b, dw);
    });
  });
}

cudnnStatus_t cudnnConvolutionBackwardBias(cudnnHandle_t handle, const void* alpha,
                                           const cudnnTensorDescriptor_t dy_desc, const void* dy,
                                           const void* beta, const cudnnTensorDescriptor_t db_desc,
                                           void* db) {
  return cudnn_call("cudnnConvolutionBackwardBias", [&] {
    if (!handle || !dy_desc || !db_desc || db_desc->elements() != size_t(dy_desc->c)) {
      return refuse(CUDNN_STATUS_BAD_PARAM, "db needs one element for each channel of dy");
    }
    const Layout dy_layout(*dy_desc), db_layout(*db_desc);
    const float a = scalar(alpha), b = scalar(beta);
    return Call{handle, {0, true, 0}, nullptr, 0}.enqueue([=](auto) {
      std::vector<double> sums(dy_layout.c, 0.0);
      dy_layout.each([&](size_t at, size_t i) { sums[i % dy_layout.c] += input(dy)[at]; });
      blend(db_layout, Values(sums.begin(), sums.end()), a, b, db);
    });
  });
}

cudnnStatus_t cudnnAddTensor(cudnnHandle_t handle, const void* alpha,
                             const cudnnTensorDescriptor_t a_desc, const void* a, const void* beta,
                             const cudnnTensorDescriptor_t c_desc, void* c) {
  return cudnn_call("cudnnAddTensor", [&] {
    if (!handle || !a_desc || !c_desc || a_desc->c != c_desc->c ||
        a_desc->elements() != size_t(a_desc->c)) {
      return refuse(CUDNN_STATUS_NOT_SUPPORTED, "the CUDA model adds one value for each channel");
    }
    const Layout layout(*c_desc);
    const float of_a = scalar(alpha), of_c = scalar(beta);
    return Call{handle, {0, true, 0}, nullptr, 0}.enqueue([=](auto) {
      auto* out = static_cast<float*>(c);
      layout.each([&](size_t at, size_t i) {
        out[at] = of_a * input(a)[i % layout.c] + (of_c == 0 ? 0.0f : of_c * out[at]);
      });
    });
  });
}

cudnnStatus_t cudnnTransformTensor(cudnnHandle_t handle, const void* alpha,
                                   const cudnnTensorDescriptor_t x_desc, const void* x,
                                   const void* beta, const cudnnTensorDescriptor_t y_desc,
                                   void* y) {
  return cudnn_call("cudnnTransformTensor", [&] {
    if (!handle || !x_desc || !y_desc || x_desc->n != y_desc->n || x_desc->c != y_desc->c ||
        x_desc->h != y_desc->h || x_desc->w != y_desc->w || x == y) {
      return refuse(CUDNN_STATUS_BAD_PARAM, "x and y need the same sizes and different memory");
    }
    const Layout from(*x_desc), to(*y_desc);
    const float a = scalar(alpha), b = scalar(beta);
    return Call{handle, {0, true, 0}, nullptr, 0}.enqueue(
        [=](auto) { blend(to, pack(from, x, false), a, b, y); });
  });
}
