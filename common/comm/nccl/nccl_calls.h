#pragma once
// A Call in NCCL's terms.

#include <nccl.h>

#include <string>

#include "common/comm/communicator.h"

namespace lockstep {

/// Gives `call` of rank `rank` to NCCL, inside a group. Throws PeerLost, beginning with `who`, if
/// NCCL refuses it. A barrier is an all-reduce of its `mine`, whose value nobody needs.
void issue_to_nccl(const Call& call, int rank, int world_size, ncclComm_t comm, cudaStream_t stream,
                   const std::string& who);

}  // namespace lockstep
