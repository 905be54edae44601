#pragma once
// The inputs of kernels besides tensors. StepState and Health change from step to step: they are in
// device memory, never kernel arguments, so a step that was captured as a graph can be replayed
// with new values. StepState is copied there at the start of each step. The keys and rules further
// down stay the same, and are kernel arguments.

#include <cstdint>

#include "common/core/body.h"
#include "common/core/real.h"

namespace lockstep {

/// The facts about one pass over one (micro-)batch that kernels need.
struct StepState {
  int64_t step = 0;             // optimizer steps made before this one
  int64_t first_position = 0;   // of this pass's first sample in the global batch
  int64_t position_stride = 1;  // from one sample of this pass to the next
  Real learning_rate = 0;
  Real loss_weight = 0;  // of one sample: 1/N for the mean over a global batch of N
};

/// Whether training is still sound. The first non-finite loss or gradient writes its step here.
/// From then on no update changes the weights, so that what is saved is the last good state.
struct Health {
  int64_t failed_step = -1;  // -1: sound
  // For fp16, whose gradients are scaled. A gradient that is not finite was scaled too much: its
  // step is skipped, and nothing has failed.
  Real scale = 1;             // of the loss
  int64_t good_steps = 0;     // since the scale last changed
  int64_t skips = 0;          // 1: in this step an update changes nothing
  int64_t skipped_step = -1;  // the last one
  int64_t skipped = 0;        // so many steps

  LOCKSTEP_BODY bool updates() const { return failed_step < 0 && skips == 0; }
};

/// Identifies the random numbers of one dropout layer. They depend on the seed, the layer's name,
/// the step and the sample's position in the global batch, not on how the batch is split.
struct DropoutKey {
  uint32_t seed = 0;
  uint32_t layer = 0;
  int64_t first_sample = 0;   // of this mask among the pass's samples: a replica has a part of them
  int64_t first_feature = 0;  // of this mask among the layer's: a shard has a part of them
};

/// Numbers of a flat buffer that belong to one parameter. They begin where the stretch before ends,
/// or at the buffer's first number, and go up to `end`.
struct Stretch {
  int64_t end = 0;
  int64_t parameter = 0;  // its place among the parameters
};

/// SGD as torch.optim.SGD does it: g += weight_decay w; v = momentum v + g; w -= lr v.
struct SgdRule {
  Real momentum = 0;
  Real weight_decay = 0;
};

/// Adam as torch.optim.Adam and AdamW do it, in a parameter's step t = 1, 2, ...:
///   m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g g;
///   w -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps).
/// Before that, weight decay is added to the gradient, g += weight_decay w, or, decoupled, shrinks
/// the weights, w *= 1 - lr weight_decay. Not Real: as a float, 1 - 0.999 has four digits.
struct AdamRule {
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled = false;  // AdamW
};

}  // namespace lockstep
