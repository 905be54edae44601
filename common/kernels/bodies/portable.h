#pragma once
// The definitions with which one body compiles for both processors.
//
// A body is a functor at namespace scope: pointers and numbers in, one element (or row) of work per
// call. g++ compiles it into the loops of cpu/launch.h, nvcc into the kernels of cuda/. Only the
// launchers differ, so tests on the CPU cover the very formulas that a GPU runs.

#include <cstdint>

#include "common/core/body.h"  // LOCKSTEP_BODY, before every function of a body
#include "common/core/open_task.h"
#include "common/core/real.h"
#include "common/kernels/step_state.h"

// Before a short loop of known length: once unrolled, it does not keep the loop around it from
// being vectorised.
#ifndef LOCKSTEP_UNROLL
#define LOCKSTEP_UNROLL _Pragma("GCC unroll 4")
#endif

namespace lockstep::bodies {

/// A NaN stays a NaN: `x < 0` is false for it.
LOCKSTEP_BODY Real positive_part(Real x) { return x < 0 ? Real(0) : x; }

/// Names the members of a body that point to its arrays, so that a launcher can redirect them. On a
/// GPU they go to registers, into which the launcher has loaded several neighbours at once
/// (cuda/packs.cuh). `Arrays` have an element for each call. `FeatureArrays` have one for each
/// feature of a row, and are only read. The formula stays that of one element.
template <auto... member>
struct Members {};

/// The body that a launcher calls for each element. A body may have a member prepared(), which
/// computes what is the same for all elements and returns another body with it. prepared() runs
/// when the operation runs, once per launch or once per thread, and may read device memory.
template <class Body>
LOCKSTEP_BODY auto prepared(const Body& body) {
  if constexpr (requires { body.prepared(); }) {
    return body.prepared();
  } else {
    return body;
  }
}

/// The same for a body that has prepared(parameter): for the numbers of one parameter.
template <class Body>
LOCKSTEP_BODY auto prepared_for(const Body& body, int64_t parameter) {
  if constexpr (requires { body.prepared(parameter); }) {
    return body.prepared(parameter);
  } else {
    return body;
  }
}

/// Reductions over rows are bodies with two sums per channel. terms(i, c) gives the addends of
/// element i of channel c. finish(c, sum0, sum1) turns the totals (in double) into the result.
struct Terms {
  Real first, second;
};

/// The marks of parameters: an update skips the stretches of parameters that are not marked.
struct Marked {
  const Stretch* stretches;
  const Real* marks;
  LOCKSTEP_BODY bool updates(const Stretch& stretch) const { return marks[stretch.parameter] > 0; }
};

}  // namespace lockstep::bodies
