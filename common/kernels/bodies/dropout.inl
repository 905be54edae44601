#pragma once
// Dropout from counter-based random numbers: no state, so the mask does not depend on how the batch
// is split over devices or on the order of work.

#include "common/core/sixteen_bits.h"
#include "common/kernels/bodies/portable.h"

namespace lockstep::bodies {

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten
/// rounds that mix a 128-bit counter with a 64-bit key into 128 random bits.
struct Philox {
  uint32_t word[4];

  /// word[i]. Spelled out: in a vectorised loop clang lets the iterations share an array that is
  /// read by an index.
  LOCKSTEP_BODY uint32_t at(int64_t i) const {
    return i == 0 ? word[0] : i == 1 ? word[1] : i == 2 ? word[2] : word[3];
  }

  LOCKSTEP_BODY static Philox generate(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                       uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
      c0 = uint32_t(b >> 32) ^ c1 ^ key0;
      c1 = uint32_t(b);
      c2 = uint32_t(a >> 32) ^ c3 ^ key1;
      c3 = uint32_t(a);
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
  }
};

/// Over (sample, feature) of mask [samples, features].
template <class T>
struct DropoutMask {
  const StepState* state;
  DropoutKey key;
  Real p;
  T* mask;
  using Arrays = Members<&DropoutMask::mask>;
  LOCKSTEP_BODY void operator()(int64_t i, int64_t n, int64_t f) const {
    const uint64_t position =
        state->first_position + (key.first_sample + n) * state->position_stride;
    const uint64_t step = state->step;
    const int64_t feature = key.first_feature + f;
    const Philox random = Philox::generate(
        uint32_t(feature / 4), uint32_t(position), uint32_t(step),
        uint32_t(position >> 32) ^ (uint32_t(step >> 32) << 16), key.seed, key.layer);
    // 24 bits: exact in float, so that both precisions draw the same mask.
    const Real uniform = Real(random.at(feature % 4) >> 8) / 16777216;
    mask[i] = uniform < p ? Real(0) : 1 / (1 - p);
  }
};

/// Over (row, feature); `rows_per_sample` rows share a sample's mask.
template <class T>
struct ApplyMask {
  const T* x;
  const T* mask;
  int64_t rows_per_sample, features;
  T* y;
  using Arrays = Members<&ApplyMask::x, &ApplyMask::y>;
  LOCKSTEP_BODY void operator()(int64_t i, int64_t row, int64_t f) const {
    y[i] = Real(x[i]) * Real(mask[row / rows_per_sample * features + f]);
  }
};

}  // namespace lockstep::bodies
