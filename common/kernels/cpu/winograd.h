#pragma once
// Convolutions of 3x3 with stride 1 by Winograd's F(4x4, 3x3): a quarter of the multiplications.
// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308.
//
// A convolution is a product of polynomials, and polynomials are multiplied point by point: known
// at six points, a row of four outputs needs six multiplications instead of twelve. So tiles of 6x6
// pixels and the weights are evaluated at 6x6 points (a few additions) and multiplied there, and
// the products brought back to 4x4 outputs: 36 multiplications for what takes 144. At each point
// the sum over the channels is a matrix product, of all tiles with all weights.

#include "common/kernels/cpu/engine.h"
#include "common/kernels/cpu/vectors.h"
#include "common/kernels/geometry.h"

namespace lockstep::cpu::winograd {

constexpr int64_t kTile = 4;  // outputs along a tile's side

inline int64_t tiles_along(int64_t extent) { return (extent + kTile - 1) / kTile; }

/// Whether this way is made for these sizes, and faster than oneDNN's direct one. With few channels
/// the additions outweigh the multiplications, and with few tiles the work on the weights does.
inline bool fits(const Window2d& g) {
  const int64_t tiles = g.batch * tiles_along(g.out_height) * tiles_along(g.out_width);
  const bool covered = g.batch * g.out_height * g.out_width >= kTile * kTile / 2 * tiles;
  const auto many = [](int64_t channels) { return channels >= 64 && channels % 16 == 0; };
  return kWideVectors && g.kernel == 3 && g.stride == 1 && g.padding <= 2 && many(g.in_channels) &&
         many(g.out_channels) && tiles >= 32 && covered;
}

/// Bytes of workspace that the three functions below need.
size_t workspace_bytes(const Window2d& g);

/// As in Engine (engine.h), with the memory to use and the engine that multiplies the matrices.
void conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias, Real* y,
            void* workspace, Engine& engine);
void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx,
                           void* workspace, Engine& engine);
void conv2d_backward_parameters(const Window2d& g, const Real* x, const Real* dy, Real* dweight,
                                Real* dbias, void* workspace, Engine& engine);

}  // namespace lockstep::cpu::winograd
