#include "common/comm/nccl/nccl_world.h"

#include <algorithm>
#include <span>
#include <tuple>
#include <utility>

#include "common/comm/nccl/backend.h"
#include "common/comm/nccl/nccl_calls.h"
#include "common/core/error.h"
#include "common/kernels/cuda/cuda_stream.h"

namespace lockstep {
namespace {

using Op = Call::Op;
using cuda::cuda_stream;

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

/// "NVIDIA H100, GPU-0123abcd-...", the name and number that nvidia-smi -L gives it.
std::string text_of(const cudaDeviceProp& gpu) {
  std::string text = fmt::format("{}, GPU", gpu.name);
  for (int i = 0; i < 16; ++i) {
    const bool dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    text += fmt::format("{}{:02x}", dash ? "-" : "", static_cast<unsigned char>(gpu.uuid.bytes[i]));
  }
  return text;
}

/// NCCL up to 2.29 refuses two ranks on one GPU, in the middle of its set-up and in its own words.
std::vector<Device*> each_gpu_once(std::vector<Device*> devices) {
  std::vector<cudaDeviceProp> gpus;
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    gpus.push_back(properties_of(*devices[rank]));
    for (size_t other = 0; other < rank; ++other) {
      require(place_of(gpus[rank]) != place_of(gpus[other]),
              "rank {} ({}) and rank {} ({}) are on the same GPU, {}: NCCL serves each GPU once; "
              "name different GPUs, or let the ranks meet in-process",
              other, devices[other]->name(), rank, devices[rank]->name(), text_of(gpus[rank]));
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

/// Runs `launch` as one operation, named `op`, of each of these streams.
void enqueue_on(std::span<const Stream> streams, const char* op,
                const std::function<void()>& launch) {
  if (streams.empty()) return launch();
  const Device& device = streams.front().device();
  cuda_stream(streams.front()).enqueue(op, [&](cudaStream_t) {
    enqueue_on(streams.subspan(1), op, launch);
    // Those behind it made their GPUs the current ones.
    cuda::check(cudaSetDevice(device.id().index), "cudaSetDevice", device.name());
  });
}

}  // namespace

NcclWorld::NcclWorld(std::vector<Device*> devices, double deadline_seconds)
    : LocalWorld(each_gpu_once(std::move(devices))), nccl_(devices_, deadline_seconds) {}

NcclWorld::~NcclWorld() {
  for (const Stream& stream : watched_) cuda_stream(stream).watch(nullptr);
}

std::string NcclWorld::description() const {
  int version = 0;
  check_nccl(ncclGetVersion(&version), "ncclGetVersion", "NCCL");
  return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

// --- Groups --------------------------------------------------------------------------------------

void NcclWorld::enqueue(const GroupCalls& calls) {
  forget_finished();
  try {
    for (const Batch& batch : batches(calls)) launch(batch);
  } catch (const BadInput&) {
    throw;  // a stream that is being captured, say: nothing has reached NCCL
  } catch (const Error& error) {
    give_up(error.what());
  }
}

/// NCCL runs the calls of one of its groups in whatever order suits it. So a call that uses memory
/// of one before it starts a new group.
std::vector<NcclWorld::Batch> NcclWorld::batches(const GroupCalls& calls) {
  std::vector<Batch> found(1);
  for (const std::vector<IssuedCall>& together : in_order(calls)) {
    Batch row;
    for (const IssuedCall& issued : together) append(row, issued);
    const auto depends = [&](const IssuedCall& earlier) {
      return std::any_of(row.begin(), row.end(), [&](const IssuedCall& later) {
        return use_same_memory(earlier.call, later.call);
      });
    };
    if (std::any_of(found.back().begin(), found.back().end(), depends)) found.emplace_back();
    found.back().insert(found.back().end(), row.begin(), row.end());
  }
  std::erase_if(found, [](const Batch& batch) { return batch.empty(); });
  return found;
}

/// Nothing for a call of no elements. A barrier gets one to reduce.
void NcclWorld::append(Batch& batch, IssuedCall issued) {
  if (issued.call.op == Op::barrier) issued.call.mine = barrier_element(issued.stream);
  if (issued.call.mine.count > 0) batch.push_back(std::move(issued));
}

Elements NcclWorld::barrier_element(Stream stream) {
  const auto of_stream = [&](const auto& memory) { return memory->home() == stream; };
  auto found = std::find_if(barrier_memory_.begin(), barrier_memory_.end(), of_stream);
  if (found == barrier_memory_.end()) {
    barrier_memory_.push_back(std::make_unique<Buffer>(stream, sizeof(float)));
    found = std::prev(barrier_memory_.end());
  }
  return {(*found)->data(), 1, ElementType::f32};
}

void NcclWorld::launch(const Batch& batch) {
  const Call& first = batch.front().call;
  const bool alike = std::all_of(batch.begin(), batch.end(), [&](const IssuedCall& issued) {
    return issued.call.text() == first.text();
  });
  const std::string what = fmt::format("group {} of collectives ({}{})", recorder_.group(),
                                       first.text(), alike ? "" : ", ...");
  const std::vector<Stream> streams = arrive(batch, what);
  std::exception_ptr failed;  // not through enqueue_on(), which has operations to end
  enqueue_on(streams, alike ? name_of(first.op) : "collectives", [&] {
    try {
      nccl_.group([&] {
        for (const IssuedCall& issued : batch) {
          issue_to_nccl(issued.call, issued.rank, size(), nccl_.comm(issued.rank),
                        cuda_stream(issued.stream).raw(), recorder_.rank_name(issued.rank));
        }
      });
    } catch (const PeerLost& error) {
      failed = std::make_exception_ptr(PeerLost(fmt::format("{}: {}", what, error.what())));
    }
  });
  if (failed) std::rethrow_exception(failed);
  for (Part& part : pending_.back().parts) part.finished = part.stream.record();
}

/// Marks the point on every stream of the batch behind which NCCL waits for the peers. Returns the
/// streams.
std::vector<Stream> NcclWorld::arrive(const Batch& batch, const std::string& what) {
  pending_.push_back({what, {}});
  std::vector<Stream> streams;
  for (const IssuedCall& issued : batch) {
    if (std::find(streams.begin(), streams.end(), issued.stream) != streams.end()) continue;
    watch(issued.stream);
    const Event arrived = issued.stream.record();
    pending_.back().parts.push_back({issued.rank, issued.stream, arrived, arrived});
    streams.push_back(issued.stream);
  }
  const std::string failed = failure();
  if (!failed.empty()) throw PeerLost(failed);
  return streams;
}

// --- Waiting -------------------------------------------------------------------------------------

bool NcclWorld::Pending::finished() const {
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) {
    return part.finished.done() && !part.stream.backend().error();
  });
}

void NcclWorld::forget_finished() {
  const auto runs = [](const Pending& pending) { return !pending.finished(); };
  pending_.erase(pending_.begin(), std::find_if(pending_.begin(), pending_.end(), runs));
}

/// A host that is blocked on a stream, say for a loss, must not wait for ever because another rank
/// has failed behind whose back the stream waits.
void NcclWorld::watch(Stream stream) {
  if (std::find(watched_.begin(), watched_.end(), stream) != watched_.end()) return;
  watched_.push_back(stream);
  cuda_stream(stream).watch([this] {
    if (std::this_thread::get_id() != host_ || pending_.empty()) return;
    try {
      if (const std::string failed = failure(); !failed.empty()) give_up(failed);
    } catch (const PeerLost&) {  // the streams know it
    }
  });
}

void NcclWorld::wait(double timeout_seconds) {
  recorder_.refuse_if_broken();
  std::string failed;
  poll(timeout_seconds, [&] {
    forget_finished();
    failed = failure();
    return pending_.empty() || !failed.empty();
  });
  if (failed.empty() && !pending_.empty()) failed = lateness(timeout_seconds);
  if (!failed.empty()) give_up(failed);
}

/// What has gone wrong on a rank's stream, or with NCCL in the background; empty if nothing.
std::string NcclWorld::failure() const {
  for (const Pending& pending : pending_) {
    for (const Part& part : pending.parts) {
      part.finished.done();  // asks the GPU, so that the stream learns of an error there
      const std::exception_ptr error = part.stream.backend().error();
      if (!error) continue;
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& cause) {
        return fmt::format("{}: {} failed: {}", pending.what, recorder_.rank_name(part.rank),
                           cause.what());
      }
    }
  }
  const std::string noticed = nccl_.failure();
  if (noticed.empty() || pending_.empty()) return noticed;
  return fmt::format("{}: {}", pending_.front().what, noticed);
}

/// Who is missing from the first group that has not ended.
std::string NcclWorld::lateness(double timeout_seconds) const {
  const Pending& late = pending_.front();
  std::vector<std::string> missing;
  for (const Part& part : late.parts) {
    if (!part.arrived.done()) missing.push_back(recorder_.rank_name(part.rank));
  }
  if (missing.empty()) {
    return fmt::format("{}: all ranks came, but it has not ended within {} s", late.what,
                       timeout_seconds);
  }
  return fmt::format("{}: {} did not come within {} s", late.what, fmt::join(missing, ", "),
                     timeout_seconds);
}

/// Frees the ranks that wait for each other. What their collectives left is not to be used: their
/// streams report why, as this does.
void NcclWorld::give_up(const std::string& why) {
  recorder_.break_world(why);
  nccl_.abort();
  for (const Pending& pending : pending_) {
    for (const Part& part : pending.parts) {
      cuda_stream(part.stream).poison(std::make_exception_ptr(PeerLost(why)));
    }
  }
  pending_.clear();
  throw PeerLost(why);
}

extern "C" LocalWorld* lockstep_make_nccl_world(const std::vector<Device*>& devices,
                                                double deadline_seconds) {
  return new NcclWorld(devices, deadline_seconds);
}

}  // namespace lockstep
