#pragma once
// How ranks that share out the state of training save it: each writes its shard, rank 0 makes the
// shards a checkpoint.

#include <memory>

#include "05-syncbn-checkpoint/state_files.h"
#include "06-fully-sharded/fully_sharded.h"

namespace lockstep {

/// What sharded training changes. Both must outlive this object.
struct ShardedTraining {
  FullyShardedDataParallel& network;
  const Optimizer& optimizer;  // of its shards()
};

/// The files of a state that the ranks share out (sharded_checkpoint.h), on a disk that they share.
/// A rank writes as much with every ShardKind, and a run may resume with another kind, other units
/// and another number of ranks. Of the ten steps of a save (stage 05's README.md):
///   1. every rank looks for numbers that are not finite, and copies its shard to the host;
///   2. all ranks write, each a file of its own, by steps 5 to 8;
///   3. rank 0 removes leftovers before anyone writes;
///   4. rank 0 writes the checkpoint's own file when all shards are durable: that is the commit;
///   10. what failed on one rank has failed on all.
/// Where only the counters have changed since the last checkpoint (of the same step), its shards
/// stay as they are: they must not be exchanged one by one below a checkpoint that is there.
std::unique_ptr<StateFiles> files_of(const ShardedTraining& training);

}  // namespace lockstep
