#pragma once
// The turns in which GPUs may touch memory, where the program is built with AddressSanitizer.

#include <cstddef>

#include "runtime/model.h"

namespace cuda_model {

/// While a Turn lives, the calling thread works for `device` (null: for the driver, which reaches
/// everything). Memory that this GPU cannot reach is poisoned meanwhile, so GPUs take turns;
/// between turns all memory of GPUs is poisoned, against the host. Does nothing without
/// AddressSanitizer.
class Turn {
 public:
  explicit Turn(const Device* device);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
};

/// A block of a GPU's memory is new: whoever has the turn may touch it or not. `reached_by` has a
/// bit per physical device. With model_mutex() held.
void protect_new(const void* address, size_t bytes, unsigned reached_by);

}  // namespace cuda_model
