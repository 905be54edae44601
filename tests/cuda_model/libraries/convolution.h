#pragma once
// Convolutions in plain loops over packed data: activations NHWC, filters KRSC.

#include <vector>

namespace cuda_model {

using Values = std::vector<float>;

/// Sizes in cuDNN's letters: x[n,h,w,c], w[k,r,s,c], y[n,p,q,k].
struct ConvolutionShape {
  int n, h, w, c, k, r, s, p, q;
  int pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
  bool channels_last;
};

Values convolve(const ConvolutionShape& shape, const Values& x, const Values& filter);
Values convolve_backward_data(const ConvolutionShape& shape, const Values& filter,
                              const Values& dy);
Values convolve_backward_filter(const ConvolutionShape& shape, const Values& x, const Values& dy);

}  // namespace cuda_model
