#pragma once
// The number type of the whole project.
//
// `float` in the build that trains. The build option -Dprecision=double compiles everything in
// float64 on the reference engine: there, gradients and the equivalence of the stages can be
// asserted to 1e-12, because rounding no longer hides mistakes.

namespace lockstep {

#ifdef LOCKSTEP_DOUBLE
using Real = double;
#else
using Real = float;
#endif

}  // namespace lockstep
