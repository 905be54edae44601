#pragma once
// Members of BodyKernels for the layers and the loss: operations on activations, whose last extent
// is the channels, or the classes, and whose other extents are rows.

#include <type_traits>

#include "common/kernels/bodies/batch_norm.inl"
#include "common/kernels/bodies/dropout.inl"
#include "common/kernels/bodies/elementwise.inl"
#include "common/kernels/bodies/loss.inl"
#include "common/kernels/bodies/pooling.inl"
#include "common/kernels/body_kernels.h"

namespace lockstep {

/// Rows of an activation seen as [rows, channels]: everything but the last extent.
inline int64_t rows_of(const Tensor& x) {
  const Shape& shape = x.shape();
  return x.elements() / std::max<int64_t>(1, shape[shape.axes() - 1]);
}

inline int64_t channels_of(const Tensor& x) { return x.shape()[x.shape().axes() - 1]; }

inline bodies::BatchNormAffine affine_of(Stream s, const Tensor& norm, const Tensor& weight,
                                         const Tensor& bias) {
  return {norm.on(s), weight.on(s), bias.on(s), weight.elements()};
}

inline bodies::AdaptiveRange adaptive_range(const Tensor& in, const Tensor& out, int axis) {
  return {in.shape()[axis], out.shape()[axis]};
}

// --- Bias ---------------------------------------------------------------------------------------

template <class Launch>
void BodyKernels<Launch>::add_bias(Stream s, const Tensor& bias, bool relu, const Tensor& y) {
  Launch::for_each_row(s, "add_bias", rows_of(y), channels_of(y),
                       bodies::AddBias{bias.on(s), channels_of(y), relu, y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::add_column_sums(Stream s, const Tensor& dy, const Tensor& dbias) {
  Launch::reduce_rows(s, "add_column_sums", rows_of(dy), channels_of(dy),
                      bodies::AddColumnSums{dy.on(s), channels_of(dy), dbias.on(s)});
}

// --- Pooling -----------------------------------------------------------------------------------

template <class Launch>
void BodyKernels<Launch>::max_pool2d(Stream s, const Window2d& g, bool relu, const Tensor& x,
                                     const Tensor& y, const IndexTensor& where) {
  const auto launch = [&](auto body) { Launch::for_each_pixel(s, "max_pool2d", g.output(), body); };
  if (g.kernel == 2) {
    launch(bodies::MaxPool2d<2>{g, relu, x.on(s), y.on(s), where.on(s)});
  } else {
    launch(bodies::MaxPool2d<0>{g, relu, x.on(s), y.on(s), where.on(s)});
  }
}

template <class Launch>
void BodyKernels<Launch>::max_pool2d_backward(Stream s, const Window2d& g, const Tensor& dy,
                                              const IndexTensor& where, const Tensor& dx) {
  const auto launch = [&](auto body) {
    Launch::for_each_pixel(s, "max_pool2d_backward", g.input(), body);
  };
  using Tiled = bodies::MaxPool2dBackwardTiled<2>;
  if (Tiled::fits(g)) {
    launch(Tiled{g, dy.on(s), where.on(s), dx.on(s)});
  } else {
    launch(bodies::MaxPool2dBackward{g, dy.on(s), where.on(s), dx.on(s)});
  }
}

template <class Launch>
void BodyKernels<Launch>::adaptive_avg_pool2d(Stream s, const Tensor& x, const Tensor& y) {
  Launch::for_each_pixel(s, "adaptive_avg_pool2d", y.shape(),
                         bodies::AdaptiveAvgPool2d{adaptive_range(x, y, 1), adaptive_range(x, y, 2),
                                                   channels_of(x), x.on(s), y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::adaptive_avg_pool2d_backward(Stream s, const Tensor& dy,
                                                       const Tensor& dx) {
  const Shape& in = dx.shape();
  if (dy.shape()[1] == 1 && dy.shape()[2] == 1) {
    Launch::for_each_pixel(
        s, "adaptive_avg_pool2d_backward", in,
        bodies::GlobalAvgPool2dBackward{in[1], in[2], in[3], dy.on(s), dx.on(s)});
    return;
  }
  Launch::for_each_pixel(
      s, "adaptive_avg_pool2d_backward", dx.shape(),
      bodies::AdaptiveAvgPool2dBackward{adaptive_range(dx, dy, 1), adaptive_range(dx, dy, 2),
                                        channels_of(dx), dy.on(s), dx.on(s)});
}

// --- Batch normalisation -----------------------------------------------------------------------

template <class Launch>
void BodyKernels<Launch>::batch_norm_statistics(Stream s, const Tensor& x,
                                                const Tensor& statistics) {
  Launch::reduce_rows(
      s, "batch_norm_statistics", rows_of(x), channels_of(x),
      bodies::BatchNormStatistics{x.on(s), rows_of(x), channels_of(x), statistics.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::batch_norm_merge(Stream s, const Tensor& gathered,
                                           const Tensor& statistics) {
  const int64_t channels = statistics.elements() / 2;
  Launch::for_each(
      s, "batch_norm_merge", channels,
      bodies::BatchNormMerge{gathered.on(s), rows_of(gathered), channels, statistics.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::batch_norm_prepare(Stream s, const Tensor& statistics, Real eps,
                                             Real momentum, const Tensor& running_mean,
                                             const Tensor& running_var, const Tensor& norm) {
  const int64_t channels = running_mean.elements();
  Launch::for_each(s, "batch_norm_prepare", channels,
                   bodies::BatchNormPrepare{statistics.on(s), channels, eps, momentum,
                                            running_mean.on(s), running_var.on(s), norm.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::batch_norm_prepare_eval(Stream s, const Tensor& running_mean,
                                                  const Tensor& running_var, Real eps,
                                                  const Tensor& norm) {
  const int64_t channels = running_mean.elements();
  Launch::for_each(s, "batch_norm_prepare_eval", channels,
                   bodies::BatchNormPrepareEval{running_mean.on(s), running_var.on(s), channels,
                                                eps, norm.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::batch_norm(Stream s, const Tensor& x, const Tensor& norm,
                                     const Tensor& weight, const Tensor& bias, const Tensor& skip,
                                     bool relu, const Tensor& y) {
  const auto launch = [&](auto with_relu, auto with_skip) {
    Launch::for_each_row(s, "batch_norm", rows_of(x), channels_of(x),
                         bodies::BatchNorm<with_relu.value, with_skip.value>{
                             x.on(s), affine_of(s, norm, weight, bias),
                             skip.defined() ? skip.on(s) : nullptr, y.on(s)});
  };
  using std::true_type, std::false_type;
  if (skip.defined()) {
    relu ? launch(true_type(), true_type()) : launch(false_type(), true_type());
  } else {
    relu ? launch(true_type(), false_type()) : launch(false_type(), false_type());
  }
}

template <class Launch>
void BodyKernels<Launch>::batch_norm_backward_sums(Stream s, const Tensor& x, const Tensor& dy,
                                                   const Tensor& norm, const Tensor& weight,
                                                   const Tensor& bias, bool relu,
                                                   const Tensor& sums) {
  const auto launch = [&](auto with_relu) {
    Launch::reduce_rows(s, "batch_norm_backward_sums", rows_of(x), channels_of(x),
                        bodies::BatchNormBackwardSums<with_relu.value>{
                            x.on(s), dy.on(s), affine_of(s, norm, weight, bias), sums.on(s)});
  };
  relu ? launch(std::true_type()) : launch(std::false_type());
}

template <class Launch>
void BodyKernels<Launch>::batch_norm_backward_parameters(Stream s, const Tensor& norm,
                                                         const Tensor& sums, const Tensor& dweight,
                                                         const Tensor& dbias) {
  const int64_t channels = dweight.elements();
  Launch::for_each(s, "batch_norm_backward_parameters", channels,
                   bodies::BatchNormBackwardParameters{norm.on(s), sums.on(s), channels,
                                                       dweight.on(s), dbias.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::batch_norm_backward_input(Stream s, const Tensor& x, const Tensor& dy,
                                                    const Tensor& norm, const Tensor& weight,
                                                    const Tensor& bias, bool relu,
                                                    const Tensor& sums, const Tensor& dx) {
  const auto launch = [&](auto with_relu) {
    Launch::for_each_row(
        s, "batch_norm_backward_input", rows_of(x), channels_of(x),
        bodies::BatchNormBackwardInput<with_relu.value>{
            x.on(s), dy.on(s), affine_of(s, norm, weight, bias), sums.on(s), dx.on(s)});
  };
  relu ? launch(std::true_type()) : launch(std::false_type());
}

// --- Dropout -----------------------------------------------------------------------------------

template <class Launch>
void BodyKernels<Launch>::dropout_mask(Stream s, const StepStateTensor& state, DropoutKey key,
                                       Real p, const Tensor& mask) {
  Launch::for_each_row(s, "dropout_mask", rows_of(mask), channels_of(mask),
                       bodies::DropoutMask{state.on(s), key, p, channels_of(mask), mask.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::apply_mask(Stream s, const Tensor& x, const Tensor& mask,
                                     const Tensor& y) {
  const int64_t rows_per_sample = rows_of(x) / std::max<int64_t>(1, rows_of(mask));
  Launch::for_each_row(
      s, "apply_mask", rows_of(x), channels_of(x),
      bodies::ApplyMask{x.on(s), mask.on(s), rows_per_sample, channels_of(x), y.on(s)});
}

// --- Loss and metrics --------------------------------------------------------------------------

template <class Launch>
void BodyKernels<Launch>::log_softmax(Stream s, const Tensor& x, const Tensor& y) {
  Launch::for_each_team(s, "log_softmax", rows_of(x), channels_of(x),
                        bodies::LogSoftmax{x.on(s), channels_of(x), y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::log_softmax_backward(Stream s, const Tensor& y, const Tensor& dy,
                                               const Tensor& dx) {
  Launch::for_each_team(s, "log_softmax_backward", rows_of(y), channels_of(y),
                        bodies::LogSoftmaxBackward{y.on(s), dy.on(s), channels_of(y), dx.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::nll_loss(Stream s, const StepStateTensor& state,
                                   const Tensor& log_probabilities, const LabelTensor& labels,
                                   const Tensor& loss) {
  Launch::for_each_team(
      s, "nll_loss", 1, labels.elements(),
      bodies::NllLoss{state.on(s), log_probabilities.on(s), labels.on(s), labels.elements(),
                      channels_of(log_probabilities), loss.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::nll_loss_backward(Stream s, const StepStateTensor& state,
                                            const LabelTensor& labels, const Tensor& dx) {
  Launch::for_each_row(
      s, "nll_loss_backward", rows_of(dx), channels_of(dx),
      bodies::NllLossBackward{state.on(s), labels.on(s), channels_of(dx), dx.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::count_correct(Stream s, const Tensor& scores, const LabelTensor& labels,
                                        const CountTensor& count) {
  Launch::for_each_team(s, "count_correct", 1, labels.elements(),
                        bodies::CountCorrect{scores.on(s), labels.on(s), labels.elements(),
                                             channels_of(scores), count.on(s)});
}

}  // namespace lockstep
