#pragma once
// The difference between the two APIs of oneDNN: version 2 (Debian 12) makes an operation
// descriptor and from it a primitive descriptor, version 3 makes the primitive descriptor at once.

#include <oneapi/dnnl/dnnl.hpp>

namespace lockstep::cpu::onednn {

using Dims = dnnl::memory::dims;
using Desc = dnnl::memory::desc;

struct ConvDescs {
  Desc x, weight, bias, y;
  Dims strides, padding;
};

#if DNNL_VERSION_MAJOR >= 3
inline auto forward_pd(const dnnl::engine& e, const ConvDescs& d, const dnnl::primitive_attr& a) {
  return dnnl::convolution_forward::primitive_desc(
      e, dnnl::prop_kind::forward_training, dnnl::algorithm::convolution_direct, d.x, d.weight,
      d.bias, d.y, d.strides, d.padding, d.padding, a);
}
inline auto backward_data_pd(const dnnl::engine& e, const ConvDescs& d,
                             const dnnl::convolution_forward::primitive_desc& forward,
                             const dnnl::primitive_attr& a) {
  return dnnl::convolution_backward_data::primitive_desc(e, dnnl::algorithm::convolution_direct,
                                                         d.x, d.weight, d.y, d.strides, d.padding,
                                                         d.padding, forward, a);
}
inline auto backward_weights_pd(const dnnl::engine& e, const ConvDescs& d,
                                const dnnl::convolution_forward::primitive_desc& forward,
                                const dnnl::primitive_attr& a) {
  return dnnl::convolution_backward_weights::primitive_desc(e, dnnl::algorithm::convolution_direct,
                                                            d.x, d.weight, d.bias, d.y, d.strides,
                                                            d.padding, d.padding, forward, a);
}
inline auto matmul_pd(const dnnl::engine& e, const Desc& a, const Desc& b, const Desc& c,
                      const dnnl::primitive_attr& attr) {
  return dnnl::matmul::primitive_desc(e, a, b, c, attr);
}
#else
inline auto forward_pd(const dnnl::engine& e, const ConvDescs& d, const dnnl::primitive_attr& a) {
  const dnnl::convolution_forward::desc op(dnnl::prop_kind::forward_training,
                                           dnnl::algorithm::convolution_direct, d.x, d.weight,
                                           d.bias, d.y, d.strides, d.padding, d.padding);
  return dnnl::convolution_forward::primitive_desc(op, a, e);
}
inline auto backward_data_pd(const dnnl::engine& e, const ConvDescs& d,
                             const dnnl::convolution_forward::primitive_desc& forward,
                             const dnnl::primitive_attr& a) {
  const dnnl::convolution_backward_data::desc op(dnnl::algorithm::convolution_direct, d.x, d.weight,
                                                 d.y, d.strides, d.padding, d.padding);
  return dnnl::convolution_backward_data::primitive_desc(op, a, e, forward);
}
inline auto backward_weights_pd(const dnnl::engine& e, const ConvDescs& d,
                                const dnnl::convolution_forward::primitive_desc& forward,
                                const dnnl::primitive_attr& a) {
  const dnnl::convolution_backward_weights::desc op(dnnl::algorithm::convolution_direct, d.x,
                                                    d.weight, d.bias, d.y, d.strides, d.padding,
                                                    d.padding);
  return dnnl::convolution_backward_weights::primitive_desc(op, a, e, forward);
}
inline auto matmul_pd(const dnnl::engine& e, const Desc& a, const Desc& b, const Desc& c,
                      const dnnl::primitive_attr& attr) {
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attr, e);
}
#endif

}  // namespace lockstep::cpu::onednn
