#pragma once
// oneDNN's plans for a shape, made once and run by onednn_engine.cpp.

#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

#include "common/kernels/geometry.h"

namespace lockstep::cpu::onednn {

using Arguments = std::unordered_map<int, dnnl::memory>;
static_assert(sizeof(Real) == 4, "oneDNN computes in float32; the double build has no oneDNN");

/// One step of a plan: a primitive and the memories it works on, whose addresses are filled in per
/// call.
struct Step {
  dnnl::primitive primitive;
  Arguments arguments;
};

/// A convolution pass: the primitive, and reorders of the weights before or after it where needed.
struct Pass {
  Step main;
  int weight_argument = 0;  // DNNL_ARG_WEIGHTS, or DNNL_ARG_DIFF_WEIGHTS for the weights' gradient
  size_t reordered_bytes = 0;  // 0: the plan takes OHWI as it is
  Step reorder;
  size_t scratch_bytes = 0;
};

struct ConvPlan {
  Pass forward, backward_data, backward_weights;
  size_t dweight_elements = 0;
};

struct MatMulPlan {
  Step step;
  size_t scratch_bytes = 0;
};

/// Makes the plans of a shape; called by the thread that runs them. Throws where the system has no
/// memory for them.
ConvPlan make_plan(const dnnl::engine& engine, const Window2d& g);
MatMulPlan make_plan(const dnnl::engine& engine, const MatMul& shape);

}  // namespace lockstep::cpu::onednn
