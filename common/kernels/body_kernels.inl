#pragma once
// Members of BodyKernels (body_kernels.h), for the one file of each backend that instantiates it:
// here those that take their tensors as plain numbers; layer_kernels.inl has those that know a
// layer's tensors.

#include <type_traits>

#include "common/kernels/bodies/adam.inl"
#include "common/kernels/bodies/elementwise.inl"
#include "common/kernels/bodies/sgd.inl"
#include "common/kernels/body_kernels.h"
#include "common/kernels/layer_kernels.inl"

namespace lockstep {

// --- Element by element ------------------------------------------------------------------------

template <class Launch>
void BodyKernels<Launch>::fill(Stream s, Real value, const Tensor& y) {
  Launch::for_each(s, "fill", y.elements(), bodies::Fill<Real>{value, y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::fill_count(Stream s, int64_t value, const CountTensor& y) {
  Launch::for_each(s, "fill_count", y.elements(), bodies::Fill<int64_t>{value, y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::add(Stream s, const Tensor& x, const Tensor& y) {
  Launch::for_each(s, "add", y.elements(), bodies::Add{x.on(s), y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::scale(Stream s, Real factor, const Tensor& y) {
  Launch::for_each(s, "scale", y.elements(), bodies::Scale{factor, y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::normalize_images(Stream s, const ByteTensor& x, Real mean, Real stddev,
                                           const Tensor& y) {
  Launch::for_each(s, "normalize_images", y.elements(),
                   bodies::NormalizeImage{x.on(s), mean, stddev, y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::relu(Stream s, const Tensor& x, const Tensor& y) {
  Launch::for_each(s, "relu", y.elements(), bodies::Relu{x.on(s), y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::relu_backward(Stream s, const Tensor& y, const Tensor& dy,
                                        const Tensor& dx) {
  Launch::for_each(s, "relu_backward", dx.elements(),
                   bodies::ReluBackward{y.on(s), dy.on(s), dx.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::add_relu(Stream s, const Tensor& a, const Tensor& b, const Tensor& y) {
  Launch::for_each(s, "add_relu", y.elements(), bodies::AddRelu{a.on(s), b.on(s), y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::to_channels_first(Stream s, const Tensor& x, const Tensor& y) {
  const Shape& nhwc = x.shape();
  Launch::for_each_pixel(s, "to_channels_first", nhwc,
                         bodies::SwapChannels{x.on(s), nhwc[1], nhwc[2], nhwc[3], true, y.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::to_channels_last(Stream s, const Tensor& x, const Tensor& y) {
  const Shape& nhwc = y.shape();
  Launch::for_each_pixel(s, "to_channels_last", nhwc,
                         bodies::SwapChannels{x.on(s), nhwc[1], nhwc[2], nhwc[3], false, y.on(s)});
}

// --- Optimizer ---------------------------------------------------------------------------------

namespace {

bodies::Marked marked(Stream s, const Owners& owners) {
  return {owners.stretches.on(s), owners.marks.on(s)};
}

}  // namespace

template <class Launch>
void BodyKernels<Launch>::check_finite(Stream s, const StepStateTensor& state, const Tensor& x,
                                       const HealthTensor& health) {
  Launch::report_if_any(s, "check_finite", x.elements(),
                        bodies::CheckFinite{state.on(s), x.on(s), health.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::poison(Stream s, const HealthTensor& health, const Tensor& x) {
  Launch::for_each(s, "poison", 1, bodies::Poison{health.on(s), x.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::sum_squares(Stream s, const Tensor& x, const Tensor& sums) {
  const int64_t count = x.elements(), parts = sums.elements() - 1;
  Launch::for_each_team(s, "sum_squares_parts", parts, kSumPart,
                        bodies::SumSquares{x.on(s), count, kSumPart, sums.on(s) + 1});
  Launch::for_each_team(s, "sum_squares", 1, parts, bodies::SumOfParts{parts, sums.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::clip_to_norm(Stream s, Real most, const Tensor& squares,
                                       const Tensor& x) {
  Launch::for_each(s, "clip_to_norm", x.elements(),
                   bodies::ClipToNorm{squares.on(s), most, x.on(s)});
}

template <class Launch>
void BodyKernels<Launch>::sgd_update(Stream s, const StepStateTensor& state,
                                     const HealthTensor& health, const Owners& owners, SgdRule rule,
                                     const Tensor& gradient, const Tensor& velocity,
                                     const Tensor& weight) {
  const auto launch = [&](auto with_momentum) {
    Launch::for_each_marked(s, "sgd_update", weight.elements(), marked(s, owners),
                            bodies::SgdUpdate<with_momentum.value>{
                                state.on(s), health.on(s), rule, gradient.on(s),
                                velocity.defined() ? velocity.on(s) : nullptr, weight.on(s)});
  };
  velocity.defined() ? launch(std::true_type()) : launch(std::false_type());
}

template <class Launch>
void BodyKernels<Launch>::adam_count(Stream s, const StepStateTensor& state,
                                     const HealthTensor& health, const Tensor& marks,
                                     const AdamRule& rule, const CountTensor& steps,
                                     const Tensor& factors) {
  Launch::for_each(
      s, "adam_count", steps.elements(),
      bodies::AdamCount(state.on(s), health.on(s), marks.on(s), rule, steps.on(s), factors.on(s)));
}

template <class Launch>
void BodyKernels<Launch>::adam_update(Stream s, const StepStateTensor& state,
                                      const HealthTensor& health, const Owners& owners,
                                      const AdamRule& rule, const Tensor& factors,
                                      const Tensor& gradient, const Tensor& exp_avg,
                                      const Tensor& exp_avg_sq, const Tensor& weight) {
  Launch::for_each_marked(
      s, "adam_update", weight.elements(), marked(s, owners),
      bodies::AdamUpdate(state.on(s), health.on(s), rule, factors.on(s), gradient.on(s),
                         exp_avg.on(s), exp_avg_sq.on(s), weight.on(s)));
}

}  // namespace lockstep
