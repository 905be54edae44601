#pragma once
// --load and --save of a network that no rank has whole: a unit at a time.

#include <string>

#include "06-fully-sharded/fully_sharded.h"
#include "common/comm/process_group.h"

namespace lockstep {

/// Rank 0 reads the file, a parameter at a time, and sends each unit's values to all ranks, which
/// keep what they keep of it. Errors as in lockstep::load_weights(), on all ranks. Does nothing if
/// the path is empty.
void load_weights(ProcessGroup& group, Communicator& comm, const std::string& path,
                  FullyShardedDataParallel& network);

/// Gathers one unit after another on the devices; rank 0 keeps them in host memory, and writes the
/// file that stage 01 and PyTorch read. All ranks call it.
void save_weights(ProcessGroup& group, const std::string& path, FullyShardedDataParallel& network);

}  // namespace lockstep
