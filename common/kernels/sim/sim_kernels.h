#pragma once
// The catalogue of operations for simulated devices.

#include <memory>

#include "common/kernels/kernels.h"

namespace lockstep::sim {

std::unique_ptr<Kernels> make_kernels();

}  // namespace lockstep::sim
