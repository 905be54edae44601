#include "common/comm/nccl/nccl_world.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "common/core/error.h"
#include "common/kernels/cuda/check.h"

namespace lockstep {
namespace {

// --- Which GPU -----------------------------------------------------------------------------------

cudaDeviceProp properties_of(const Device& device) {
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, device.id().index), "cudaGetDeviceProperties",
              device.name());
  return properties;
}

/// Where NCCL, too, sees that two ranks mean the same GPU.
auto place_of(const cudaDeviceProp& gpu) {
  return std::tuple(gpu.pciDomainID, gpu.pciBusID, gpu.pciDeviceID);
}

/// NCCL up to 2.29 refuses two ranks on one GPU, in the middle of its set-up and in its own words.
std::vector<Device*> each_gpu_once(std::vector<Device*> devices) {
  std::vector<cudaDeviceProp> gpus;
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    gpus.push_back(properties_of(*devices[rank]));
    for (size_t other = 0; other < rank; ++other) {
      require(
          place_of(gpus[rank]) != place_of(gpus[other]),
          "rank {} ({}) and rank {} ({}) are on the same GPU, {}, {}: NCCL serves each GPU once; "
          "name different GPUs, or let the ranks meet in-process",
          other, devices[other]->name(), rank, devices[rank]->name(), gpus[rank].name,
          devices[rank]->hardware());
    }
  }
  return devices;
}

// --- What goes together --------------------------------------------------------------------------

bool overlap(const Elements& a, const Elements& b) {
  const auto end = [](const Elements& x) {
    return static_cast<char*>(x.data) + x.count * size_of(x.type);
  };
  return a.count > 0 && b.count > 0 && a.data < end(b) && b.data < end(a);
}

bool use_same_memory(const Call& a, const Call& b) {
  return overlap(a.mine, b.mine) || overlap(a.mine, b.all) || overlap(a.all, b.mine) ||
         overlap(a.all, b.all);
}

}  // namespace

NcclWorld::NcclWorld(std::vector<Device*> devices, double deadline_seconds)
    : SingleProcessWorld(each_gpu_once(std::move(devices)), kCountedInNcclCalls),
      queue_({devices_, 0, world_size(), new_nccl_id()}, deadline_seconds,
             std::numeric_limits<double>::infinity(),
             [this](const std::string& why) { recorder_.break_world(why); }) {}

std::string NcclWorld::description() const {
  int version = 0;
  check_nccl(ncclGetVersion(&version), "ncclGetVersion", "NCCL");
  return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void NcclWorld::enqueue(const GroupCalls& calls) {
  for (const NcclQueue::CallList& batch : call_lists(calls)) {
    queue_.launch(batch, fmt::format("group {} of collectives ({})", recorder_.group(),
                                     NcclQueue::text_of(batch)));
    for (const IssuedCall& issued : batch) {
      recorder_.sent(issued.rank)
          .add(issued.call.purpose, issued.call.ring_bytes(issued.rank, world_size()));
    }
  }
}

void NcclWorld::wait(double timeout_seconds) {
  recorder_.refuse_if_broken();
  queue_.wait(timeout_seconds);
}

/// NCCL runs the calls of one of its groups in whatever order suits it. So a call that uses the
/// memory of an earlier call starts a new group.
std::vector<NcclQueue::CallList> NcclWorld::call_lists(const GroupCalls& calls) {
  std::vector<NcclQueue::CallList> found(1);
  for (const std::vector<IssuedCall>& together : in_order(calls)) {
    NcclQueue::CallList row;
    for (const IssuedCall& issued : together) queue_.append(row, issued);
    const auto depends = [&](const IssuedCall& earlier) {
      return std::any_of(row.begin(), row.end(), [&](const IssuedCall& later) {
        return use_same_memory(earlier.call, later.call);
      });
    };
    if (std::any_of(found.back().begin(), found.back().end(), depends)) found.emplace_back();
    found.back().insert(found.back().end(), row.begin(), row.end());
  }
  std::erase_if(found, [](const NcclQueue::CallList& batch) { return batch.empty(); });
  return found;
}

}  // namespace lockstep
