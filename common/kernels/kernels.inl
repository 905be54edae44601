#pragma once
// The operations, defined once for all backends: each gives a body (bodies/) its numbers and
// memory, and a launcher runs it. Only convolution and matrix product are left to a backend.
// kernels.h says what each operation does.

#include <algorithm>
#include <type_traits>

#include "common/kernels/bodies/adam.inl"
#include "common/kernels/bodies/batch_norm.inl"
#include "common/kernels/bodies/dropout.inl"
#include "common/kernels/bodies/elementwise.inl"
#include "common/kernels/bodies/loss.inl"
#include "common/kernels/bodies/loss_scale.inl"
#include "common/kernels/bodies/pooling.inl"
#include "common/kernels/bodies/sgd.inl"
#include "common/kernels/kernels.h"

namespace lockstep {

/// `Launch` is how a body runs on a backend's devices (cpu/launch.h, cuda/launch.cuh): static
/// members for_each, for_each_marked, for_each_row, for_each_pixel, for_each_team, reduce_rows and
/// report_if_any, each taking (Stream, const char* op, extents..., body).
template <class Launch>
class BodyKernels : public Kernels {
 public:
  // --- Element by element ------------------------------------------------------------------------

  void fill(Stream s, Real value, const Tensor& y) override {
    Launch::for_each(s, "fill", y.elements(), bodies::Fill<Real>{value, y.on(s)});
  }

  void fill_count(Stream s, int64_t value, const CountTensor& y) override {
    Launch::for_each(s, "fill_count", y.elements(), bodies::Fill<int64_t>{value, y.on(s)});
  }

  void add(Stream s, const AnyTensor& x, const AnyTensor& y) override {
    with_numbers_of(x, [&](auto number) {
      using T = decltype(number);
      const auto launch = [&](auto body) { Launch::for_each(s, "add", y.elements(), body); };
      if (y.type() == kTypeOf<Real>) {
        launch(bodies::Add<T, Real>{x.on<T>(s), y.on<Real>(s)});
      } else {
        launch(bodies::Add<T, T>{x.on<T>(s), y.on<T>(s)});
      }
    });
  }

  void scale(Stream s, Real factor, const Tensor& y) override {
    Launch::for_each(s, "scale", y.elements(), bodies::Scale{factor, y.on(s)});
  }

  void to_sixteen_bits(Stream s, Real factor, const Tensor& x, const AnyTensor& y) override {
    with_sixteen_bits(y.type(), [&](auto number) {
      using T = decltype(number);
      Launch::for_each(s, "to_sixteen_bits", y.elements(),
                       bodies::Narrow<T>{factor, x.on(s), y.on<T>(s)});
    });
  }

  void from_sixteen_bits(Stream s, const AnyTensor& x, const Tensor& y) override {
    with_sixteen_bits(x.type(), [&](auto number) {
      using T = decltype(number);
      Launch::for_each(s, "from_sixteen_bits", y.elements(), bodies::Widen<T>{x.on<T>(s), y.on(s)});
    });
  }

  void normalize_images(Stream s, const ByteTensor& x, Real mean, Real stddev,
                        const AnyTensor& y) override {
    with_numbers_of(y, [&](auto number) {
      using T = decltype(number);
      Launch::for_each(s, "normalize_images", y.elements(),
                       bodies::NormalizeImage<T>{x.on(s), mean, stddev, y.on<T>(s)});
    });
  }

  void relu(Stream s, const AnyTensor& x, const AnyTensor& y) override {
    with_numbers_of(y, [&](auto number) {
      using T = decltype(number);
      Launch::for_each(s, "relu", y.elements(), bodies::Relu<T>{x.on<T>(s), y.on<T>(s)});
    });
  }

  void relu_backward(Stream s, const AnyTensor& y, const AnyTensor& dy,
                     const AnyTensor& dx) override {
    with_numbers_of(y, [&](auto number) {
      using T = decltype(number);
      Launch::for_each(s, "relu_backward", dx.elements(),
                       bodies::ReluBackward<T>{y.on<T>(s), dy.on<T>(s), dx.on<T>(s)});
    });
  }

  void to_channels_first(Stream s, const AnyTensor& x, const AnyTensor& y) override {
    with_numbers_of(x, [&](auto number) {
      using T = decltype(number);
      const Shape& nhwc = x.shape();
      Launch::for_each_pixel(
          s, "to_channels_first", nhwc,
          bodies::SwapChannels<T>{x.on<T>(s), nhwc[1], nhwc[2], nhwc[3], true, y.on<T>(s)});
    });
  }

  void to_channels_last(Stream s, const AnyTensor& x, const AnyTensor& y) override {
    with_numbers_of(x, [&](auto number) {
      using T = decltype(number);
      const Shape& nhwc = y.shape();
      Launch::for_each_pixel(
          s, "to_channels_last", nhwc,
          bodies::SwapChannels<T>{x.on<T>(s), nhwc[1], nhwc[2], nhwc[3], false, y.on<T>(s)});
    });
  }

  // --- Bias --------------------------------------------------------------------------------------

  void add_bias(Stream s, const Tensor& bias, bool relu, const AnyTensor& y) override {
    with_numbers_of(y, [&](auto number) {
      using T = decltype(number);
      Launch::for_each_row(s, "add_bias", rows_of(y), channels_of(y),
                           bodies::AddBias<T>{bias.on(s), relu, y.on<T>(s)});
    });
  }

  void add_column_sums(Stream s, const AnyTensor& dy, const Tensor& dbias) override {
    with_numbers_of(dy, [&](auto number) {
      using T = decltype(number);
      Launch::reduce_rows(s, "add_column_sums", rows_of(dy), channels_of(dy),
                          bodies::AddColumnSums<T>{dy.on<T>(s), dbias.on(s)});
    });
  }

  // --- Pooling -----------------------------------------------------------------------------------

  void max_pool2d(Stream s, const Window2d& g, bool relu, const AnyTensor& x, const AnyTensor& y,
                  const Positions& where) override {
    with_numbers_of(y, [&](auto number) {
      using T = decltype(number);
      const auto launch = [&](auto body) {
        Launch::for_each_pixel(s, "max_pool2d", g.output(), body);
      };
      if (g.kernel == 2) {
        launch(bodies::MaxPool2d<T, 2>{g, relu, x.on<T>(s), y.on<T>(s), where.on<T>(s)});
      } else {
        launch(bodies::MaxPool2d<T, 0>{g, relu, x.on<T>(s), y.on<T>(s), where.on<T>(s)});
      }
    });
  }

  void max_pool2d_backward(Stream s, const Window2d& g, const AnyTensor& dy, const Positions& where,
                           const AnyTensor& dx) override {
    with_numbers_of(dx, [&](auto number) {
      using T = decltype(number);
      const auto launch = [&](auto body) {
        Launch::for_each_pixel(s, "max_pool2d_backward", g.input(), body);
      };
      using Tiled = bodies::MaxPool2dBackwardTiled<T, 2>;
      if (Tiled::fits(g)) {
        launch(Tiled{g, dy.on<T>(s), where.on<T>(s), dx.on<T>(s)});
      } else {
        launch(bodies::MaxPool2dBackward<T>{g, dy.on<T>(s), where.on<T>(s), dx.on<T>(s)});
      }
    });
  }

  void adaptive_avg_pool2d(Stream s, const AnyTensor& x, const AnyTensor& y) override {
    with_numbers_of(y, [&](auto number) {
      using T = decltype(number);
      Launch::for_each_pixel(
          s, "adaptive_avg_pool2d", y.shape(),
          bodies::AdaptiveAvgPool2d<T>{adaptive_range(x, y, 1), adaptive_range(x, y, 2),
                                       channels_of(x), x.on<T>(s), y.on<T>(s)});
    });
  }

  void adaptive_avg_pool2d_backward(Stream s, const AnyTensor& dy, const AnyTensor& dx) override {
    with_numbers_of(dx, [&](auto number) {
      using T = decltype(number);
      const Shape& in = dx.shape();
      const auto launch = [&](auto body) {
        Launch::for_each_pixel(s, "adaptive_avg_pool2d_backward", in, body);
      };
      if (dy.shape()[1] == 1 && dy.shape()[2] == 1) {
        launch(bodies::GlobalAvgPool2dBackward<T>{in[1], in[2], in[3], dy.on<T>(s), dx.on<T>(s)});
      } else {
        launch(bodies::AdaptiveAvgPool2dBackward<T>{adaptive_range(dx, dy, 1),
                                                    adaptive_range(dx, dy, 2), channels_of(dx),
                                                    dy.on<T>(s), dx.on<T>(s)});
      }
    });
  }

  // --- Batch normalisation -----------------------------------------------------------------------

  void batch_norm_statistics(Stream s, const AnyTensor& x, const Tensor& statistics) override {
    with_numbers_of(x, [&](auto number) {
      using T = decltype(number);
      Launch::reduce_rows(s, "batch_norm_statistics", rows_of(x), channels_of(x),
                          bodies::BatchNormStatistics<T>{x.on<T>(s), x.on<T>(s), rows_of(x),
                                                         channels_of(x), statistics.on(s)});
    });
  }

  void batch_norm_merge(Stream s, const Tensor& gathered, const Tensor& statistics) override {
    const int64_t channels = statistics.elements() / 2;
    Launch::for_each(
        s, "batch_norm_merge", channels,
        bodies::BatchNormMerge{gathered.on(s), rows_of(gathered), channels, statistics.on(s)});
  }

  void batch_norm_prepare(Stream s, const Tensor& statistics, Real eps, Real momentum,
                          const Tensor& running_mean, const Tensor& running_var,
                          const Tensor& norm) override {
    const int64_t channels = running_mean.elements();
    Launch::for_each(s, "batch_norm_prepare", channels,
                     bodies::BatchNormPrepare{statistics.on(s), channels, eps, momentum,
                                              running_mean.on(s), running_var.on(s), norm.on(s)});
  }

  void batch_norm_measure(Stream s, const AnyTensor& x, Real eps, Real momentum,
                          const Tensor& running_mean, const Tensor& running_var,
                          const Tensor& norm) override {
    with_numbers_of(x, [&](auto number) {
      using T = decltype(number);
      const int64_t channels = channels_of(x);
      Launch::reduce_rows(
          s, "batch_norm_measure", rows_of(x), channels,
          bodies::BatchNormMeasure<T>{{x.on<T>(s), x.on<T>(s), rows_of(x), channels, nullptr},
                                      {nullptr, channels, eps, momentum, running_mean.on(s),
                                       running_var.on(s), norm.on(s)}});
    });
  }

  void batch_norm_prepare_eval(Stream s, const Tensor& running_mean, const Tensor& running_var,
                               Real eps, const Tensor& norm) override {
    const int64_t channels = running_mean.elements();
    Launch::for_each(s, "batch_norm_prepare_eval", channels,
                     bodies::BatchNormPrepareEval{running_mean.on(s), running_var.on(s), channels,
                                                  eps, norm.on(s)});
  }

  void batch_norm(Stream s, const AnyTensor& x, const Tensor& norm, const Tensor& weight,
                  const Tensor& bias, const AnyTensor& skip, bool relu,
                  const AnyTensor& y) override {
    with_numbers_of(y, [&](auto number) {
      using T = decltype(number);
      const auto launch = [&](auto with_relu, auto with_skip) {
        Launch::for_each_row(s, "batch_norm", rows_of(x), channels_of(x),
                             bodies::BatchNorm<T, with_relu.value, with_skip.value>{
                                 affine_of(s, norm, weight, bias), x.on<T>(s),
                                 skip.defined() ? skip.on<T>(s) : nullptr, y.on<T>(s)});
      };
      using std::true_type, std::false_type;
      if (skip.defined()) {
        relu ? launch(true_type(), true_type()) : launch(false_type(), true_type());
      } else {
        relu ? launch(true_type(), false_type()) : launch(false_type(), false_type());
      }
    });
  }

  void batch_norm_backward_sums(Stream s, const AnyTensor& x, const AnyTensor& dy,
                                const Tensor& norm, const Tensor& weight, const Tensor& bias,
                                bool relu, const Tensor& sums, const Tensor& dweight,
                                const Tensor& dbias) override {
    with_numbers_of(x, [&](auto number) {
      using T = decltype(number);
      const auto launch = [&](auto with_relu) {
        Launch::reduce_rows(s, "batch_norm_backward_sums", rows_of(x), channels_of(x),
                            bodies::BatchNormBackwardSums<T, with_relu.value>{
                                affine_of(s, norm, weight, bias), x.on<T>(s), dy.on<T>(s),
                                channels_of(x), sums.on(s), dweight.on(s), dbias.on(s)});
      };
      relu ? launch(std::true_type()) : launch(std::false_type());
    });
  }

  void batch_norm_backward_input(Stream s, const AnyTensor& x, const AnyTensor& dy,
                                 const Tensor& norm, const Tensor& weight, const Tensor& bias,
                                 bool relu, const Tensor& sums, const AnyTensor& dx) override {
    with_numbers_of(x, [&](auto number) {
      using T = decltype(number);
      const int64_t channels = channels_of(x);
      const auto launch = [&](auto with_relu) {
        Launch::for_each_row(
            s, "batch_norm_backward_input", rows_of(x), channels,
            bodies::BatchNormBackwardInput<T, with_relu.value>{
                affine_of(s, norm, weight, bias), x.on<T>(s), dy.on<T>(s), sums.on(s),
                sums.on(s) + channels, norm.on(s) + 2 * channels, dx.on<T>(s)});
      };
      relu ? launch(std::true_type()) : launch(std::false_type());
    });
  }

  // --- Dropout -----------------------------------------------------------------------------------

  void dropout_mask(Stream s, const StepStateTensor& state, DropoutKey key, Real p,
                    const AnyTensor& mask) override {
    with_numbers_of(mask, [&](auto number) {
      using T = decltype(number);
      Launch::for_each_row(s, "dropout_mask", rows_of(mask), channels_of(mask),
                           bodies::DropoutMask<T>{state.on(s), key, p, mask.on<T>(s)});
    });
  }

  void apply_mask(Stream s, const AnyTensor& x, const AnyTensor& mask,
                  const AnyTensor& y) override {
    with_numbers_of(y, [&](auto number) {
      using T = decltype(number);
      const int64_t rows_per_sample = rows_of(x) / std::max<int64_t>(1, rows_of(mask));
      Launch::for_each_row(s, "apply_mask", rows_of(x), channels_of(x),
                           bodies::ApplyMask<T>{x.on<T>(s), mask.on<T>(s), rows_per_sample,
                                                channels_of(x), y.on<T>(s)});
    });
  }

  // --- Loss and metrics --------------------------------------------------------------------------

  void log_softmax(Stream s, const AnyTensor& x, const Tensor& y) override {
    with_numbers_of(x, [&](auto number) {
      using T = decltype(number);
      Launch::for_each_team(s, "log_softmax", rows_of(x), channels_of(x),
                            bodies::LogSoftmax<T>{x.on<T>(s), channels_of(x), y.on(s)});
    });
  }

  void log_softmax_backward(Stream s, const Tensor& y, const Tensor& dy,
                            const AnyTensor& dx) override {
    with_numbers_of(dx, [&](auto number) {
      using T = decltype(number);
      Launch::for_each_team(
          s, "log_softmax_backward", rows_of(y), channels_of(y),
          bodies::LogSoftmaxBackward<T>{y.on(s), dy.on(s), channels_of(y), dx.on<T>(s)});
    });
  }

  void nll_loss(Stream s, const StepStateTensor& state, const Tensor& log_probabilities,
                const LabelTensor& labels, const Tensor& loss) override {
    Launch::for_each_team(
        s, "nll_loss", 1, labels.elements(),
        bodies::NllLoss{state.on(s), log_probabilities.on(s), labels.on(s), labels.elements(),
                        channels_of(log_probabilities), loss.on(s)});
  }

  void nll_loss_backward(Stream s, const StepStateTensor& state, const LabelTensor& labels,
                         const Tensor& dx) override {
    Launch::for_each_row(s, "nll_loss_backward", rows_of(dx), channels_of(dx),
                         bodies::NllLossBackward{state.on(s), labels.on(s), dx.on(s)});
  }

  void count_correct(Stream s, const AnyTensor& scores, const LabelTensor& labels,
                     const CountTensor& count) override {
    with_numbers_of(scores, [&](auto number) {
      using T = decltype(number);
      Launch::for_each_team(
          s, "count_correct", 1, labels.elements(),
          bodies::CountCorrect<T>{scores.on<T>(s), labels.on(s), labels.elements(),
                                  channels_of(scores), count.on(s)});
    });
  }

  // --- Optimizer ---------------------------------------------------------------------------------

  void check_finite(Stream s, const StepStateTensor& state, const Tensor& x,
                    const HealthTensor& health) override {
    Launch::report_if_any(s, "check_finite", x.elements(),
                          bodies::CheckFinite{state.on(s), x.on(s), health.on(s)});
  }

  void scale_loss(Stream s, const HealthTensor& health, const Tensor& x) override {
    Launch::for_each(s, "scale_loss", x.elements(), bodies::ScaleLoss{health.on(s), x.on(s)});
  }

  void unscale(Stream s, const StepStateTensor& state, const HealthTensor& health,
               const Tensor& x) override {
    Launch::for_each(s, "unscale", x.elements(), bodies::Unscale{health.on(s), x.on(s)});
    Launch::report_if_any(s, "find_overflow", x.elements(),
                          bodies::FindOverflow{state.on(s), x.on(s), health.on(s)});
  }

  void update_scale(Stream s, int64_t growth_interval, const HealthTensor& health) override {
    Launch::for_each(s, "update_scale", 1, bodies::UpdateScale{growth_interval, health.on(s)});
  }

  void poison(Stream s, const HealthTensor& health, const Tensor& x) override {
    Launch::for_each(s, "poison", 1, bodies::Poison{health.on(s), x.on(s)});
  }

  void sum_squares(Stream s, const Tensor& x, const Tensor& sums) override {
    const int64_t count = x.elements(), parts = sums.elements() - 1;
    Launch::for_each_team(s, "sum_squares_parts", parts, kSumPart,
                          bodies::SumSquares{x.on(s), count, kSumPart, sums.on(s) + 1});
    Launch::for_each_team(s, "sum_squares", 1, parts, bodies::SumOfParts{parts, sums.on(s)});
  }

  void clip_to_norm(Stream s, Real most, const Tensor& squares, const Tensor& x) override {
    Launch::for_each(s, "clip_to_norm", x.elements(),
                     bodies::ClipToNorm{squares.on(s), most, x.on(s)});
  }

  void sgd_update(Stream s, const StepStateTensor& state, const HealthTensor& health,
                  const Owners& owners, SgdRule rule, const Tensor& gradient,
                  const Tensor& velocity, const Tensor& weight) override {
    const auto launch = [&](auto with_momentum) {
      Launch::for_each_marked(s, "sgd_update", weight.elements(), marked(s, owners),
                              bodies::SgdUpdate<with_momentum.value>{
                                  state.on(s), health.on(s), rule, gradient.on(s),
                                  velocity.defined() ? velocity.on(s) : nullptr, weight.on(s)});
    };
    velocity.defined() ? launch(std::true_type()) : launch(std::false_type());
  }

  void adam_count(Stream s, const StepStateTensor& state, const HealthTensor& health,
                  const Tensor& marks, const AdamRule& rule, const CountTensor& steps,
                  const Tensor& factors) override {
    Launch::for_each(s, "adam_count", steps.elements(),
                     bodies::AdamCount(state.on(s), health.on(s), marks.on(s), rule, steps.on(s),
                                       factors.on(s)));
  }

  void adam_update(Stream s, const StepStateTensor& state, const HealthTensor& health,
                   const Owners& owners, const AdamRule& rule, const Tensor& factors,
                   const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                   const Tensor& weight) override {
    Launch::for_each_marked(
        s, "adam_update", weight.elements(), marked(s, owners),
        bodies::AdamUpdate(state.on(s), health.on(s), rule, factors.on(s), gradient.on(s),
                           exp_avg.on(s), exp_avg_sq.on(s), weight.on(s)));
  }

 private:
  /// Calls work(T()) with the type of x's numbers.
  template <class Work>
  static void with_numbers_of(const AnyTensor& x, Work work) {
    with_numbers(x.type(), work);
  }

  // An activation is [rows, channels]: its last extent is the channels (features, classes), all
  // others are rows.
  template <class AnyKind>
  static int64_t channels_of(const AnyKind& x) {
    return x.shape()[x.shape().axes() - 1];
  }
  template <class AnyKind>
  static int64_t rows_of(const AnyKind& x) {
    return x.elements() / std::max<int64_t>(1, channels_of(x));
  }
  static bodies::BatchNormAffine affine_of(Stream s, const Tensor& norm, const Tensor& weight,
                                           const Tensor& bias) {
    return {norm.on(s), norm.on(s) + weight.elements(), weight.on(s), bias.on(s)};
  }
  static bodies::AdaptiveRange adaptive_range(const AnyTensor& in, const AnyTensor& out, int axis) {
    return {in.shape()[axis], out.shape()[axis]};
  }
  static bodies::Marked marked(Stream s, const Owners& owners) {
    return {owners.stretches.on(s), owners.marks.on(s)};
  }
};

}  // namespace lockstep
