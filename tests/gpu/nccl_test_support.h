#pragma once
// Ranks that meet by NCCL.

#include "common/group/process_group.h"
#include "tests/gpu/gpu_test_support.h"
#include "tests/support/comm_trial.h"

namespace lockstep::testing::nccl {

constexpr auto kCuda = DeviceId::Kind::cuda;

/// Faults can be planted in the CUDA model only.
#define LOCKSTEP_NEEDS_THE_MODEL(ranks)                    \
  if (!::lockstep::testing::is_model(*(ranks).devices[0])) \
  LOCKSTEP_SKIP("not the CUDA model: a real NCCL fails when it wants")

inline Ranks nccl_ranks(int world_size) {
  return Ranks(device_ids(world_size, kCuda), LocalBackend::nccl);
}

inline void all_reduce(const Ranks& ranks, const std::vector<BasicTensor<float>>& x) {
  ranks.together([&](Communicator& rank, Stream s) { rank.all_reduce(s, x[rank.rank()]); });
}

}  // namespace lockstep::testing::nccl
