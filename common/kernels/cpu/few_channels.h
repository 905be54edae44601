#pragma once
// Convolutions of 5x5 with few channels, a vector of samples at a time: vectors of 10 or 20
// channels would be filled by less than two thirds.

#include "common/kernels/cpu/vectors.h"
#include "common/kernels/geometry.h"

namespace lockstep::cpu::few_channels {

/// Whether this way is made for these sizes, and faster than oneDNN's.
inline bool fits(const Window2d& g) {
  return kWideVectors && g.kernel == 5 && g.stride == 1 && g.padding == 0 &&
         g.batch % kLanes == 0 && g.out_width >= 4 && g.in_channels <= 10 &&
         (g.out_channels == 10 || g.out_channels == 20);
}

inline bool fits_backward_input(const Window2d& g) { return fits(g) && g.in_channels == 10; }

/// Bytes of workspace that the three functions below need.
size_t workspace_bytes(const Window2d& g);

/// As in Engine (engine.h).
void conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias, Real* y,
            void* workspace);
void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx,
                           void* workspace);
void conv2d_backward_parameters(const Window2d& g, const Real* x, const Real* dy, Real* dweight,
                                Real* dbias, void* workspace);

}  // namespace lockstep::cpu::few_channels
