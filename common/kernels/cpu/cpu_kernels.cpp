#include "common/kernels/cpu/cpu_kernels.h"

#include "common/kernels/bodies/batch_norm.inl"
#include "common/kernels/bodies/dropout.inl"
#include "common/kernels/bodies/elementwise.inl"
#include "common/kernels/bodies/loss.inl"
#include "common/kernels/bodies/pooling.inl"
#include "common/kernels/bodies/sgd.inl"
#include "common/kernels/cpu/reduce.h"

namespace lockstep::cpu {
namespace {

/// Rows of an activation seen as [rows, channels]: everything but the last extent.
int64_t rows_of(const Tensor& x) {
  const Shape& shape = x.shape();
  return x.elements() / std::max<int64_t>(1, shape[shape.rank() - 1]);
}

int64_t channels_of(const Tensor& x) { return x.shape()[x.shape().rank() - 1]; }

bodies::BatchNormAffine affine(const Tensor& norm, const Tensor& weight, const Tensor& bias) {
  return {norm.data(), weight.data(), bias.data(), weight.elements()};
}

bodies::AdaptiveRange range(const Tensor& in, const Tensor& out, int axis) {
  return {in.shape()[axis], out.shape()[axis]};
}

}  // namespace

// --- Element by element ------------------------------------------------------------------------

void CpuKernels::fill(Stream s, Real value, const Tensor& y) {
  for_each(s, "fill", y.elements(), bodies::Fill<Real>{value, y.data()});
}

void CpuKernels::fill_count(Stream s, int64_t value, const CountTensor& y) {
  for_each(s, "fill_count", y.elements(), bodies::Fill<int64_t>{value, y.data()});
}

void CpuKernels::add(Stream s, const Tensor& x, const Tensor& y) {
  for_each(s, "add", y.elements(), bodies::Add{x.data(), y.data()});
}

void CpuKernels::scale(Stream s, Real factor, const Tensor& y) {
  for_each(s, "scale", y.elements(), bodies::Scale{factor, y.data()});
}

void CpuKernels::normalize_images(Stream s, const ByteTensor& x, Real mean, Real stddev,
                                  const Tensor& y) {
  for_each(s, "normalize_images", y.elements(),
           bodies::NormalizeImage{x.data(), mean, stddev, y.data()});
}

void CpuKernels::relu(Stream s, const Tensor& x, const Tensor& y) {
  for_each(s, "relu", y.elements(), bodies::Relu{x.data(), y.data()});
}

void CpuKernels::relu_backward(Stream s, const Tensor& y, const Tensor& dy, const Tensor& dx) {
  for_each(s, "relu_backward", dx.elements(), bodies::ReluBackward{y.data(), dy.data(), dx.data()});
}

void CpuKernels::add_relu(Stream s, const Tensor& a, const Tensor& b, const Tensor& y) {
  for_each(s, "add_relu", y.elements(), bodies::AddRelu{a.data(), b.data(), y.data()});
}

void CpuKernels::to_channels_first(Stream s, const Tensor& x, const Tensor& y) {
  const Shape& nhwc = x.shape();
  for_each_pixel(s, "to_channels_first", nhwc,
                 bodies::SwapChannels{x.data(), nhwc[1], nhwc[2], nhwc[3], true, y.data()});
}

void CpuKernels::to_channels_last(Stream s, const Tensor& x, const Tensor& y) {
  const Shape& nhwc = y.shape();
  for_each_pixel(s, "to_channels_last", nhwc,
                 bodies::SwapChannels{x.data(), nhwc[1], nhwc[2], nhwc[3], false, y.data()});
}

// --- Convolution and matrix product ------------------------------------------------------------

void CpuKernels::conv2d(Stream s, const Window2d& g, const Tensor& x, const Tensor& weight,
                        const Tensor& bias, const Tensor& y) {
  cpu_stream(s).enqueue("conv2d", [=, stream = &cpu_stream(s), engine = engine_.get(), x = x.data(),
                                   w = weight.data(), b = bias.data(),
                                   y = y.data()] { engine->conv2d(*stream, g, x, w, b, y); });
}

void CpuKernels::conv2d_backward_input(Stream s, const Window2d& g, const Tensor& dy,
                                       const Tensor& weight, const Tensor& dx) {
  cpu_stream(s).enqueue(
      "conv2d_backward_input",
      [=, stream = &cpu_stream(s), engine = engine_.get(), dy = dy.data(), w = weight.data(),
       dx = dx.data()] { engine->conv2d_backward_input(*stream, g, dy, w, dx); });
}

void CpuKernels::conv2d_backward_parameters(Stream s, const Window2d& g, const Tensor& x,
                                            const Tensor& dy, const Tensor& dweight,
                                            const Tensor& dbias) {
  cpu_stream(s).enqueue("conv2d_backward_parameters",
                        [=, stream = &cpu_stream(s), engine = engine_.get(), x = x.data(),
                         dy = dy.data(), dw = dweight.data(), db = dbias.data()] {
                          engine->conv2d_backward_parameters(*stream, g, x, dy, dw, db);
                        });
}

void CpuKernels::matmul(Stream s, const MatMul& shape, const Tensor& a, const Tensor& b,
                        const Tensor& c) {
  cpu_stream(s).enqueue(
      "matmul", [=, stream = &cpu_stream(s), engine = engine_.get(), a = a.data(), b = b.data(),
                 c = c.data()] { engine->matmul(*stream, shape, a, b, c); });
}

void CpuKernels::add_bias(Stream s, const Tensor& bias, bool relu, const Tensor& y) {
  for_each_row(s, "add_bias", rows_of(y), channels_of(y),
               bodies::AddBias{bias.data(), channels_of(y), relu, y.data()});
}

void CpuKernels::add_column_sums(Stream s, const Tensor& dy, const Tensor& dbias) {
  reduce_rows(s, "add_column_sums", rows_of(dy), channels_of(dy),
              bodies::AddColumnSums{dy.data(), channels_of(dy), dbias.data()});
}

// --- Pooling -----------------------------------------------------------------------------------

void CpuKernels::max_pool2d(Stream s, const Window2d& g, bool relu, const Tensor& x,
                            const Tensor& y, const IndexTensor& where) {
  const auto launch = [&](auto body) { for_each_pixel(s, "max_pool2d", g.output(), body); };
  if (g.kernel == 2) {
    launch(bodies::MaxPool2d<2>{g, relu, x.data(), y.data(), where.data()});
  } else {
    launch(bodies::MaxPool2d<0>{g, relu, x.data(), y.data(), where.data()});
  }
}

void CpuKernels::max_pool2d_backward(Stream s, const Window2d& g, const Tensor& dy,
                                     const IndexTensor& where, const Tensor& dx) {
  const auto launch = [&](auto body) { for_each_pixel(s, "max_pool2d_backward", g.input(), body); };
  using Tiled = bodies::MaxPool2dBackwardTiled<2>;
  if (Tiled::fits(g)) {
    launch(Tiled{g, dy.data(), where.data(), dx.data()});
  } else {
    launch(bodies::MaxPool2dBackward{g, dy.data(), where.data(), dx.data()});
  }
}

void CpuKernels::adaptive_avg_pool2d(Stream s, const Tensor& x, const Tensor& y) {
  for_each_pixel(s, "adaptive_avg_pool2d", y.shape(),
                 bodies::AdaptiveAvgPool2d{range(x, y, 1), range(x, y, 2), channels_of(x), x.data(),
                                           y.data()});
}

void CpuKernels::adaptive_avg_pool2d_backward(Stream s, const Tensor& dy, const Tensor& dx) {
  const Shape& in = dx.shape();
  if (dy.shape()[1] == 1 && dy.shape()[2] == 1) {
    for_each_pixel(s, "adaptive_avg_pool2d_backward", in,
                   bodies::GlobalAvgPool2dBackward{in[1], in[2], in[3], dy.data(), dx.data()});
    return;
  }
  for_each_pixel(s, "adaptive_avg_pool2d_backward", dx.shape(),
                 bodies::AdaptiveAvgPool2dBackward{range(dx, dy, 1), range(dx, dy, 2),
                                                   channels_of(dx), dy.data(), dx.data()});
}

// --- Batch normalisation -----------------------------------------------------------------------

void CpuKernels::batch_norm_statistics(Stream s, const Tensor& x, const Tensor& statistics) {
  reduce_rows(s, "batch_norm_statistics", rows_of(x), channels_of(x),
              bodies::BatchNormStatistics{x.data(), rows_of(x), channels_of(x), statistics.data()});
}

void CpuKernels::batch_norm_prepare(Stream s, const Tensor& statistics, int64_t count, Real eps,
                                    Real momentum, const Tensor& running_mean,
                                    const Tensor& running_var, const Tensor& norm) {
  const int64_t channels = channels_of(norm);
  for_each(s, "batch_norm_prepare", channels,
           bodies::BatchNormPrepare{statistics.data(), channels, count, eps, momentum,
                                    running_mean.data(), running_var.data(), norm.data()});
}

void CpuKernels::batch_norm_prepare_eval(Stream s, const Tensor& running_mean,
                                         const Tensor& running_var, Real eps, const Tensor& norm) {
  const int64_t channels = channels_of(norm);
  for_each(s, "batch_norm_prepare_eval", channels,
           bodies::BatchNormPrepareEval{running_mean.data(), running_var.data(), channels, eps,
                                        norm.data()});
}

void CpuKernels::batch_norm(Stream s, const Tensor& x, const Tensor& norm, const Tensor& weight,
                            const Tensor& bias, const Tensor& skip, bool relu, const Tensor& y) {
  const auto launch = [&](auto with_relu, auto with_skip) {
    for_each_row(s, "batch_norm", rows_of(x), channels_of(x),
                 bodies::BatchNorm<with_relu.value, with_skip.value>{
                     x.data(), affine(norm, weight, bias), skip.defined() ? skip.data() : nullptr,
                     y.data()});
  };
  using std::true_type, std::false_type;
  if (skip.defined()) {
    relu ? launch(true_type(), true_type()) : launch(false_type(), true_type());
  } else {
    relu ? launch(true_type(), false_type()) : launch(false_type(), false_type());
  }
}

void CpuKernels::batch_norm_backward_sums(Stream s, const Tensor& x, const Tensor& dy,
                                          const Tensor& norm, const Tensor& weight,
                                          const Tensor& bias, bool relu, const Tensor& sums) {
  const auto launch = [&](auto with_relu) {
    reduce_rows(s, "batch_norm_backward_sums", rows_of(x), channels_of(x),
                bodies::BatchNormBackwardSums<with_relu.value>{
                    x.data(), dy.data(), affine(norm, weight, bias), sums.data()});
  };
  relu ? launch(std::true_type()) : launch(std::false_type());
}

void CpuKernels::batch_norm_backward_parameters(Stream s, const Tensor& norm, const Tensor& sums,
                                                const Tensor& dweight, const Tensor& dbias) {
  const int64_t channels = channels_of(norm);
  for_each(s, "batch_norm_backward_parameters", channels,
           bodies::BatchNormBackwardParameters{norm.data(), sums.data(), channels, dweight.data(),
                                               dbias.data()});
}

void CpuKernels::batch_norm_backward_input(Stream s, const Tensor& x, const Tensor& dy,
                                           const Tensor& norm, const Tensor& weight,
                                           const Tensor& bias, bool relu, const Tensor& sums,
                                           int64_t count, const Tensor& dx) {
  const auto launch = [&](auto with_relu) {
    for_each_row(s, "batch_norm_backward_input", rows_of(x), channels_of(x),
                 bodies::BatchNormBackwardInput<with_relu.value>{
                     x.data(), dy.data(), affine(norm, weight, bias), sums.data(),
                     Real(1) / Real(count), dx.data()});
  };
  relu ? launch(std::true_type()) : launch(std::false_type());
}

// --- Dropout -----------------------------------------------------------------------------------

void CpuKernels::dropout_mask(Stream s, const StepStateTensor& state, DropoutKey key, Real p,
                              const Tensor& mask) {
  for_each_row(s, "dropout_mask", rows_of(mask), channels_of(mask),
               bodies::DropoutMask{state.data(), key, p, channels_of(mask), mask.data()});
}

void CpuKernels::apply_mask(Stream s, const Tensor& x, const Tensor& mask, const Tensor& y) {
  const int64_t rows_per_sample = rows_of(x) / std::max<int64_t>(1, rows_of(mask));
  for_each_row(s, "apply_mask", rows_of(x), channels_of(x),
               bodies::ApplyMask{x.data(), mask.data(), rows_per_sample, channels_of(x), y.data()});
}

// --- Loss and metrics --------------------------------------------------------------------------

void CpuKernels::log_softmax(Stream s, const Tensor& x, const Tensor& y) {
  for_each_team(s, "log_softmax", rows_of(x),
                bodies::LogSoftmax{x.data(), channels_of(x), y.data()});
}

void CpuKernels::log_softmax_backward(Stream s, const Tensor& y, const Tensor& dy,
                                      const Tensor& dx) {
  for_each_team(s, "log_softmax_backward", rows_of(y),
                bodies::LogSoftmaxBackward{y.data(), dy.data(), channels_of(y), dx.data()});
}

void CpuKernels::nll_loss(Stream s, const StepStateTensor& state, const Tensor& log_probabilities,
                          const LabelTensor& labels, const Tensor& loss) {
  for_each_team(s, "nll_loss", 1,
                bodies::NllLoss{state.data(), log_probabilities.data(), labels.data(),
                                labels.elements(), channels_of(log_probabilities), loss.data()});
}

void CpuKernels::nll_loss_backward(Stream s, const StepStateTensor& state,
                                   const LabelTensor& labels, const Tensor& dx) {
  for_each_row(s, "nll_loss_backward", rows_of(dx), channels_of(dx),
               bodies::NllLossBackward{state.data(), labels.data(), channels_of(dx), dx.data()});
}

void CpuKernels::count_correct(Stream s, const Tensor& scores, const LabelTensor& labels,
                               const CountTensor& count) {
  for_each_team(s, "count_correct", 1,
                bodies::CountCorrect{scores.data(), labels.data(), labels.elements(),
                                     channels_of(scores), count.data()});
}

// --- Optimizer ---------------------------------------------------------------------------------

void CpuKernels::check_finite(Stream s, const StepStateTensor& state, const Tensor& x,
                              const HealthTensor& health) {
  report_if_any(s, "check_finite", x.elements(),
                bodies::CheckFinite{state.data(), x.data(), health.data()});
}

void CpuKernels::sgd_update(Stream s, const StepStateTensor& state, const HealthTensor& health,
                            SgdRule rule, const Tensor& gradient, const Tensor& velocity,
                            const Tensor& weight) {
  const auto launch = [&](auto with_momentum) {
    for_each(s, "sgd_update", weight.elements(),
             bodies::SgdUpdate<with_momentum.value>{
                 state.data(), health.data(), rule, gradient.data(),
                 velocity.defined() ? velocity.data() : nullptr, weight.data()});
  };
  velocity.defined() ? launch(std::true_type()) : launch(std::false_type());
}

}  // namespace lockstep::cpu
