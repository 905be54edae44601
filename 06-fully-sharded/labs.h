#pragma once
// The labs of this stage (labs.cpp), each with its mistake or, `fixed`, without it.

#include <memory>

#include "06-fully-sharded/fully_sharded.h"
#include "common/data/synthetic.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"
#include "common/training/feeder.h"
#include "common/training/lab.h"

namespace lockstep {

/// What a rank has before it has a network: one CPU device.
struct RankDevice {
  explicit RankDevice(ProcessGroup& of)
      : group(of),
        device(open_device({DeviceId::Kind::cpu, of.local_rank()}, {})),
        stream(device->create_stream("compute")),
        communication(device->create_stream("communication")),
        communicator(of.connect(*device)),
        comm(*communicator) {}

  ProcessGroup& group;
  std::unique_ptr<Device> device;
  Stream stream, communication;
  std::unique_ptr<Communicator> communicator;
  Communicator& comm;
};

// update_labs.cpp
void stale_parameters(ProcessGroup& group, bool fixed);
void norm_of_one_shard(ProcessGroup& group, bool fixed);
void summed_for_averaged(ProcessGroup& group, bool fixed);

// memory_labs.cpp
void freed_too_early(ProcessGroup& group, bool fixed);
void all_initialise_in_full(ProcessGroup& group, bool fixed);

}  // namespace lockstep
