#pragma once
// Convolutions of 3x3 with stride 1 by Winograd's F(4x4, 3x3): a quarter of the multiplications.
// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308.
//
// A convolution of a row with three weights is a product of polynomials, and a product needs one
// multiplication per point at which both factors are known. So tiles of 6x6 pixels and the weights
// are brought to 6x6 points (a few additions), multiplied there, and brought back to 4x4 outputs: 36
// multiplications for what takes 144. At each point the sum over the channels is a matrix product
// of all tiles with all weights.

#include <functional>

#include "common/kernels/geometry.h"

namespace lockstep::cpu::winograd {

/// C = op(A) op(B), whoever multiplies.
using Product = std::function<void(const MatMul&, const Real* a, const Real* b, Real* c)>;

/// Whether this way is made for these sizes, and faster than the direct one.
bool fits(const Window2d& g);

/// Bytes of workspace that the three functions below need.
size_t workspace_bytes(const Window2d& g);

/// As in Engine (engine.h), with the memory and the product to use.
void conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias, Real* y,
            Real* workspace, const Product& product);
void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx,
                           Real* workspace, const Product& product);
void conv2d_backward_parameters(const Window2d& g, const Real* x, const Real* dy, Real* dweight,
                                Real* dbias, Real* workspace, const Product& product);

}  // namespace lockstep::cpu::winograd
