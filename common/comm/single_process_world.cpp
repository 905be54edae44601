#include "common/comm/single_process_world.h"

#include <exception>
#include <set>

#include "common/comm/copy_world.h"
#include "common/comm/nccl/nccl.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

bool all_different(const std::vector<Device*>& devices) {
  std::set<int> indices;
  for (const Device* device : devices) indices.insert(device->id().index);
  return indices.size() == devices.size();
}

void require_in_process(const std::vector<Device*>& devices) {
  const DeviceId& first = devices.front()->id();
  for (size_t rank = 1; rank < devices.size(); ++rank) {
    require(
        first.kind == DeviceId::Kind::cpu || devices[rank]->id() == first,
        "rank 0 is on {}, rank {} on {}: without NCCL, replicas in one process share one GPU; use "
        "one GPU{}",
        first.name(), rank, devices[rank]->name(),
        nccl_availability().empty() ? ", or each GPU once"
                                    : fmt::format(" ({})", nccl_availability()));
  }
}

}  // namespace

int64_t SingleProcessWorld::bytes_sent() const {
  int64_t bytes = 0;
  for (const auto& rank : ranks_) bytes += rank->bytes_sent();
  return bytes;
}

CollectiveGroup::CollectiveGroup(SingleProcessWorld& world)
    : world_(world), exceptions_(std::uncaught_exceptions()) {
  world_.open_group();
}

CollectiveGroup::~CollectiveGroup() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_) {
    world_.abandon_group();
  } else {
    world_.close_group();
  }
}

std::unique_ptr<SingleProcessWorld> make_single_process_world(const std::vector<Device*>& devices,
                                                              LocalBackend backend) {
  require(!devices.empty(), "a world of collectives without devices; give at least one");
  for (const Device* device : devices) {
    require(device->id().kind == devices.front()->id().kind,
            "{} and {} are of different kinds; all devices of a run are of one kind",
            devices.front()->name(), device->name());
  }
  const bool gpus = devices.front()->id().kind == DeviceId::Kind::cuda;
  require(gpus || backend != LocalBackend::nccl,
          "NCCL serves GPUs, rank 0 is on {}; give --devices cuda:0,...", devices.front()->name());
  const bool several = gpus && devices.size() > 1 && all_different(devices);
  if (backend == LocalBackend::nccl ||
      (backend == LocalBackend::automatic && several && nccl_availability().empty())) {
    return make_nccl_world(devices);
  }
  require_in_process(devices);
  return std::make_unique<CopyWorld>(devices);
}

}  // namespace lockstep
