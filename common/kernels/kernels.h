#pragma once
// The catalogue of operations: one pure virtual each, so that a backend that lacks one does not
// compile. Every operation is enqueued on the given stream and returns at once.
//
// Shapes: N batch, H W image, C channels, F features, K classes. Activations are [N,H,W,C] or
// [N,F]. An AnyTensor may have numbers of 16 bits; all of one call have the same. Then operations
// compute in Real, and round what they give; products add in Real.
// Operations that compute gradients of parameters ADD to them; all others overwrite. A batch
// may have no samples.
// Shapes are the callers' business (nn/ checks them); element-wise operations look only at
// elements.

#include <string>
#include <utility>

#include "common/core/any_tensor.h"
#include "common/kernels/geometry.h"
#include "common/kernels/step_state.h"

namespace lockstep {

using StepStateTensor = BasicTensor<StepState>;
using HealthTensor = BasicTensor<Health>;
using CountTensor = BasicTensor<int64_t>;

/// The positions of maxima: whole numbers as wide as the values.
struct Positions {
  Positions() = default;
  Positions(IndexTensor wide) : wide(std::move(wide)) {}
  Positions(BasicTensor<int16_t> narrow) : narrow(std::move(narrow)) {}

  /// The positions of maxima among values of type T.
  template <class T>
  auto* on(Stream s) const {
    if constexpr (sizeof(T) == 2) {
      return narrow.on(s);
    } else {
      return wide.on(s);
    }
  }

  IndexTensor wide{};
  BasicTensor<int16_t> narrow{};  // of 16 bits
};

/// The parameters whose numbers a flat buffer holds, and which of these numbers an update changes.
struct Owners {
  BasicTensor<Stretch> stretches{};  // all of the buffer's
  Tensor marks{};                    // [parameters]: above 0 for one that has a gradient
};

class Kernels {
 public:
  virtual ~Kernels() = default;

  /// The library that convolves and multiplies: "oneDNN 2.6.3", "reference", "cuDNN 9.19".
  virtual std::string engine() const = 0;

  // --- Element by element ------------------------------------------------------------------------
  virtual void fill(Stream, Real value, const Tensor& y) = 0;  // y = value
  virtual void fill_count(Stream, int64_t value, const CountTensor& y) = 0;
  /// y += x. Numbers of 16 bits may be added to Real ones.
  virtual void add(Stream, const AnyTensor& x, const AnyTensor& y) = 0;
  virtual void scale(Stream, Real factor, const Tensor& y) = 0;  // y *= factor
  /// y = factor x in 16 bits, rounded once; and the way back, which is exact.
  virtual void to_sixteen_bits(Stream, Real factor, const Tensor& x, const AnyTensor& y) = 0;
  virtual void from_sixteen_bits(Stream, const AnyTensor& x, const Tensor& y) = 0;
  /// y = (x / 255 - mean) / stddev, each division rounded as PyTorch does it.
  virtual void normalize_images(Stream, const ByteTensor& x, Real mean, Real stddev,
                                const AnyTensor& y) = 0;
  virtual void relu(Stream, const AnyTensor& x, const AnyTensor& y) = 0;
  /// dx = dy where the output y is positive, else 0.
  virtual void relu_backward(Stream, const AnyTensor& y, const AnyTensor& dy,
                             const AnyTensor& dx) = 0;
  /// [N,H,W,C] to [N,C,H,W] and back: the border between our layout and PyTorch's.
  virtual void to_channels_first(Stream, const AnyTensor& x, const AnyTensor& y) = 0;
  virtual void to_channels_last(Stream, const AnyTensor& x, const AnyTensor& y) = 0;

  // --- Convolution and matrix product (the engine's) -------------------------------------------
  virtual void conv2d(Stream, const Window2d&, const AnyTensor& x, const AnyTensor& weight,
                      const Tensor& bias, const AnyTensor& y) = 0;
  virtual void conv2d_backward_input(Stream, const Window2d&, const AnyTensor& dy,
                                     const AnyTensor& weight, const AnyTensor& dx) = 0;
  /// Adds to dweight [O,H,W,I] and dbias [O]. With 16 bits, the gradient of the weight is
  /// rounded to 16 bits before the addition.
  virtual void conv2d_backward_parameters(Stream, const Window2d&, const AnyTensor& x,
                                          const AnyTensor& dy, const Tensor& dweight,
                                          const Tensor& dbias) = 0;
  /// c may be Real where a and b have 16 bits. Then the product is rounded to 16 bits first.
  virtual void matmul(Stream, const MatMul&, const AnyTensor& a, const AnyTensor& b,
                      const AnyTensor& c) = 0;

  // --- Bias ------------------------------------------------------------------------------------
  /// y[i,f] += bias[f]; with `relu` max(0, .) of that.
  virtual void add_bias(Stream, const Tensor& bias, bool relu, const AnyTensor& y) = 0;
  /// dbias[f] += sum over i of dy[i,f]
  virtual void add_column_sums(Stream, const AnyTensor& dy, const Tensor& dbias) = 0;

  // --- Pooling ---------------------------------------------------------------------------------
  /// y = maximum of each window, with `relu` max(0, .) of that. `where` gets the position of the
  /// maximum within the window (row by row; -1: none, the gradient stops at the ReLU).
  virtual void max_pool2d(Stream, const Window2d&, bool relu, const AnyTensor& x,
                          const AnyTensor& y, const Positions& where) = 0;
  virtual void max_pool2d_backward(Stream, const Window2d&, const AnyTensor& dy,
                                   const Positions& where, const AnyTensor& dx) = 0;
  /// [N,H,W,C] to [N,OH,OW,C]: output o averages inputs floor(o H/OH) to ceil((o+1) H/OH) - 1.
  virtual void adaptive_avg_pool2d(Stream, const AnyTensor& x, const AnyTensor& y) = 0;
  virtual void adaptive_avg_pool2d_backward(Stream, const AnyTensor& dy, const AnyTensor& dx) = 0;

  // --- Batch normalisation, in the pieces that SyncBatchNorm needs -----------------------------
  /// statistics [2C+1] = means over the rows (N H W), M2s (sums of squared distances from them),
  /// and the number of rows. All zeros for no rows.
  virtual void batch_norm_statistics(Stream, const AnyTensor& x, const Tensor& statistics) = 0;
  /// Merges gathered [P, 2C+1], the statistics of P parts of a batch, into statistics [2C+1] of the
  /// whole batch.
  virtual void batch_norm_merge(Stream, const Tensor& gathered, const Tensor& statistics) = 0;
  /// From statistics: norm [2C+1] = means, 1/sqrt(M2/rows + eps), and 1/rows. With `momentum` > 0
  /// the running mean and (unbiased) variance move by that share. Without rows: norm is finite, and
  /// the running statistics stay.
  virtual void batch_norm_prepare(Stream, const Tensor& statistics, Real eps, Real momentum,
                                  const Tensor& running_mean, const Tensor& running_var,
                                  const Tensor& norm) = 0;
  /// The same from x itself, in one pass: for a batch that this device sees as a whole.
  virtual void batch_norm_measure(Stream, const AnyTensor& x, Real eps, Real momentum,
                                  const Tensor& running_mean, const Tensor& running_var,
                                  const Tensor& norm) = 0;
  /// norm [2C] from the running statistics (evaluation, which has no backward).
  virtual void batch_norm_prepare_eval(Stream, const Tensor& running_mean,
                                       const Tensor& running_var, Real eps, const Tensor& norm) = 0;
  /// y = (x - mean) invstd weight + bias; plus `skip` if that is defined; `relu` of that if asked.
  virtual void batch_norm(Stream, const AnyTensor& x, const Tensor& norm, const Tensor& weight,
                          const Tensor& bias, const AnyTensor& skip, bool relu,
                          const AnyTensor& y) = 0;
  /// sums [2,C] = sum of dy, sum of dy (x - mean), dy masked where a fused ReLU cut. Also the
  /// parameters' gradients: dweight += sums[1] invstd, dbias += sums[0].
  virtual void batch_norm_backward_sums(Stream, const AnyTensor& x, const AnyTensor& dy,
                                        const Tensor& norm, const Tensor& weight,
                                        const Tensor& bias, bool relu, const Tensor& sums,
                                        const Tensor& dweight, const Tensor& dbias) = 0;
  /// dx = weight invstd (dy - sums[0]/rows - (x - mean) invstd^2 sums[1]/rows)
  virtual void batch_norm_backward_input(Stream, const AnyTensor& x, const AnyTensor& dy,
                                         const Tensor& norm, const Tensor& weight,
                                         const Tensor& bias, bool relu, const Tensor& sums,
                                         const AnyTensor& dx) = 0;

  // --- Dropout ---------------------------------------------------------------------------------
  /// mask [N,F] = 0 with probability p, else 1/(1-p).
  virtual void dropout_mask(Stream, const StepStateTensor& state, DropoutKey key, Real p,
                            const AnyTensor& mask) = 0;
  /// y[n,...,f] = x[n,...,f] mask[n,f]. Forward and backward alike.
  virtual void apply_mask(Stream, const AnyTensor& x, const AnyTensor& mask,
                          const AnyTensor& y) = 0;

  // --- Loss and metrics ------------------------------------------------------------------------
  /// y[n,k] = x[n,k] - log(sum over j of exp(x[n,j])), without overflow.
  virtual void log_softmax(Stream, const AnyTensor& x, const Tensor& y) = 0;
  /// dx = dy - exp(y) (sum of dy over the row)
  virtual void log_softmax_backward(Stream, const Tensor& y, const Tensor& dy,
                                    const AnyTensor& dx) = 0;
  /// loss[0] -= loss_weight * sum over n of log_probabilities[n, labels[n]]
  virtual void nll_loss(Stream, const StepStateTensor& state, const Tensor& log_probabilities,
                        const LabelTensor& labels, const Tensor& loss) = 0;
  /// dx[n,k] = -loss_weight where k = labels[n], else 0.
  virtual void nll_loss_backward(Stream, const StepStateTensor& state, const LabelTensor& labels,
                                 const Tensor& dx) = 0;
  /// count[0] += samples whose largest score is at their label (the first of equals wins).
  virtual void count_correct(Stream, const AnyTensor& scores, const LabelTensor& labels,
                             const CountTensor& count) = 0;

  // --- Optimizer: flat buffers of gradients and weights ------------------------------------------
  /// Writes state.step into `health` if any element of x is NaN or infinite and `health` was sound.
  virtual void check_finite(Stream, const StepStateTensor& state, const Tensor& x,
                            const HealthTensor& health) = 0;
  // These three scale a loss, as torch.amp.GradScaler does (nn/optimizer.h says when).
  /// x *= health.scale
  virtual void scale_loss(Stream, const HealthTensor& health, const Tensor& x) = 0;
  /// x /= health.scale. If any element of x is NaN or infinite, state.step becomes the step that
  /// `health` skips.
  virtual void unscale(Stream, const StepStateTensor& state, const HealthTensor& health,
                       const Tensor& x) = 0;
  /// At the end of a step: half the scale if the step is skipped. Twice the scale after
  /// `growth_interval` steps, one after another, that were not.
  virtual void update_scale(Stream, int64_t growth_interval, const HealthTensor& health) = 0;
  /// x[0] becomes NaN once `health` has failed, else it stays: a number that ranks add up then
  /// tells all of them.
  virtual void poison(Stream, const HealthTensor& health, const Tensor& x) = 0;

  // These two together are torch.nn.utils.clip_grad_norm_.
  /// sums[0] = sum over i of x[i]^2. sums has 1 + ceil(n / kSumPart) elements; the others become
  /// the sums of parts.
  virtual void sum_squares(Stream, const Tensor& x, const Tensor& sums) = 0;
  static constexpr int64_t kSumPart = 16384;
  /// x *= min(1, most / (norm + 1e-6)), where norm is the root of squares[0].
  virtual void clip_to_norm(Stream, Real most, const Tensor& squares, const Tensor& x) = 0;

  // One step over flat buffers, in one pass, at state.learning_rate; does nothing once `health` has
  // failed, and nothing to parameters without a gradient.
  /// As SgdRule says. `velocity` may be undefined when momentum is 0.
  virtual void sgd_update(Stream, const StepStateTensor& state, const HealthTensor& health,
                          const Owners& owners, SgdRule rule, const Tensor& gradient,
                          const Tensor& velocity, const Tensor& weight) = 0;
  /// Call it before the updates. For each parameter that has a gradient, adds one to t of AdamRule,
  /// `steps` [parameters]. Sets the parameter's two `factors` [parameters,2]: the first to
  /// lr / (1 - beta1^t), the second to sqrt(1 - beta2^t).
  virtual void adam_count(Stream, const StepStateTensor& state, const HealthTensor& health,
                          const Tensor& marks, const AdamRule& rule, const CountTensor& steps,
                          const Tensor& factors) = 0;
  /// As AdamRule says, with these factors. `exp_avg` is m and `exp_avg_sq` is v: zeros at first.
  virtual void adam_update(Stream, const StepStateTensor& state, const HealthTensor& health,
                           const Owners& owners, const AdamRule& rule, const Tensor& factors,
                           const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                           const Tensor& weight) = 0;
};

}  // namespace lockstep
