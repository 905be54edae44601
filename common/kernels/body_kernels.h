#pragma once
// The operations that are made from bodies: all but convolution and matrix product. Written once
// for all backends; `Launch` says how a body runs on a backend's devices (cpu/launch.h,
// cuda/launch.cuh). kernels.h says what each operation does.

#include "common/kernels/kernels.h"

namespace lockstep {

/// `Launch` has static members for_each, for_each_marked, for_each_row, for_each_pixel,
/// for_each_team, reduce_rows and report_if_any, each taking (Stream, const char* op, extents...,
/// body). A backend instantiates the template in one file, which includes body_kernels.inl.
template <class Launch>
class BodyKernels : public Kernels {
 public:
  void fill(Stream, Real value, const Tensor& y) override;
  void fill_count(Stream, int64_t value, const CountTensor& y) override;
  void add(Stream, const Tensor& x, const Tensor& y) override;
  void scale(Stream, Real factor, const Tensor& y) override;
  void normalize_images(Stream, const ByteTensor& x, Real mean, Real stddev,
                        const Tensor& y) override;
  void relu(Stream, const Tensor& x, const Tensor& y) override;
  void relu_backward(Stream, const Tensor& y, const Tensor& dy, const Tensor& dx) override;
  void add_relu(Stream, const Tensor& a, const Tensor& b, const Tensor& y) override;
  void to_channels_first(Stream, const Tensor& x, const Tensor& y) override;
  void to_channels_last(Stream, const Tensor& x, const Tensor& y) override;
  void add_bias(Stream, const Tensor& bias, bool relu, const Tensor& y) override;
  void add_column_sums(Stream, const Tensor& dy, const Tensor& dbias) override;
  void max_pool2d(Stream, const Window2d&, bool relu, const Tensor& x, const Tensor& y,
                  const IndexTensor& where) override;
  void max_pool2d_backward(Stream, const Window2d&, const Tensor& dy, const IndexTensor& where,
                           const Tensor& dx) override;
  void adaptive_avg_pool2d(Stream, const Tensor& x, const Tensor& y) override;
  void adaptive_avg_pool2d_backward(Stream, const Tensor& dy, const Tensor& dx) override;
  void batch_norm_statistics(Stream, const Tensor& x, const Tensor& statistics) override;
  void batch_norm_merge(Stream, const Tensor& gathered, const Tensor& statistics) override;
  void batch_norm_prepare(Stream, const Tensor& statistics, Real eps, Real momentum,
                          const Tensor& running_mean, const Tensor& running_var,
                          const Tensor& norm) override;
  void batch_norm_prepare_eval(Stream, const Tensor& running_mean, const Tensor& running_var,
                               Real eps, const Tensor& norm) override;
  void batch_norm(Stream, const Tensor& x, const Tensor& norm, const Tensor& weight,
                  const Tensor& bias, const Tensor& skip, bool relu, const Tensor& y) override;
  void batch_norm_backward_sums(Stream, const Tensor& x, const Tensor& dy, const Tensor& norm,
                                const Tensor& weight, const Tensor& bias, bool relu,
                                const Tensor& sums) override;
  void batch_norm_backward_parameters(Stream, const Tensor& norm, const Tensor& sums,
                                      const Tensor& dweight, const Tensor& dbias) override;
  void batch_norm_backward_input(Stream, const Tensor& x, const Tensor& dy, const Tensor& norm,
                                 const Tensor& weight, const Tensor& bias, bool relu,
                                 const Tensor& sums, const Tensor& dx) override;
  void dropout_mask(Stream, const StepStateTensor& state, DropoutKey key, Real p,
                    const Tensor& mask) override;
  void apply_mask(Stream, const Tensor& x, const Tensor& mask, const Tensor& y) override;
  void log_softmax(Stream, const Tensor& x, const Tensor& y) override;
  void log_softmax_backward(Stream, const Tensor& y, const Tensor& dy, const Tensor& dx) override;
  void nll_loss(Stream, const StepStateTensor& state, const Tensor& log_probabilities,
                const LabelTensor& labels, const Tensor& loss) override;
  void nll_loss_backward(Stream, const StepStateTensor& state, const LabelTensor& labels,
                         const Tensor& dx) override;
  void count_correct(Stream, const Tensor& scores, const LabelTensor& labels,
                     const CountTensor& count) override;
  void check_finite(Stream, const StepStateTensor& state, const Tensor& x,
                    const HealthTensor& health) override;
  void poison(Stream, const HealthTensor& health, const Tensor& x) override;
  void sum_squares(Stream, const Tensor& x, const Tensor& sums) override;
  void clip_to_norm(Stream, Real most, const Tensor& squares, const Tensor& x) override;
  void sgd_update(Stream, const StepStateTensor& state, const HealthTensor& health,
                  const Owners& owners, SgdRule rule, const Tensor& gradient,
                  const Tensor& velocity, const Tensor& weight) override;
  void adam_count(Stream, const StepStateTensor& state, const HealthTensor& health,
                  const Tensor& marks, const AdamRule& rule, const CountTensor& steps,
                  const Tensor& factors) override;
  void adam_update(Stream, const StepStateTensor& state, const HealthTensor& health,
                   const Owners& owners, const AdamRule& rule, const Tensor& factors,
                   const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                   const Tensor& weight) override;
};

}  // namespace lockstep
