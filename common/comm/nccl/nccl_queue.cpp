#include "common/comm/nccl/nccl_queue.h"

#include <algorithm>
#include <span>
#include <utility>

#include "common/comm/nccl/nccl_calls.h"
#include "common/core/error.h"
#include "common/core/listed.h"
#include "common/core/stream_backend.h"
#include "common/kernels/cuda/cuda_stream.h"

namespace lockstep {
namespace {

using Op = Call::Op;
using cuda::cuda_stream;

bool alike(const NcclQueue::CallList& batch) {
  return std::all_of(batch.begin(), batch.end(), [&](const IssuedCall& issued) {
    return issued.call.text() == batch.front().call.text();
  });
}

/// The name of a batch in a trace.
const char* operation(const NcclQueue::CallList& batch) {
  if (alike(batch)) return name_of(batch.front().call.op);
  const bool transfers = std::all_of(batch.begin(), batch.end(), [](const IssuedCall& issued) {
    return is_transfer(issued.call);
  });
  return transfers ? "transfers" : "collectives";
}

/// Runs `launch` as one operation, named `op`, of each of these streams.
void enqueue_on(std::span<const Stream> streams, const char* op,
                const std::function<void()>& launch) {
  if (streams.empty()) return launch();
  const Device& device = streams.front().device();
  cuda_stream(streams.front()).enqueue(op, [&](cudaStream_t) {
    enqueue_on(streams.subspan(1), op, launch);
    // The inner calls made their own GPUs current.
    cuda::check(cudaSetDevice(device.id().index), "cudaSetDevice", device.name());
  });
}

}  // namespace

NcclQueue::NcclQueue(NcclMembers members, double deadline_seconds, double patience_seconds,
                     std::function<void(const std::string&)> on_failure)
    : patience_seconds_(patience_seconds),
      on_failure_(std::move(on_failure)),
      nccl_(std::move(members), deadline_seconds) {}

NcclQueue::~NcclQueue() {
  for (cuda::DeviceState* device : watched_) device->watch(this, nullptr);
}

// --- Launching -----------------------------------------------------------------------------------

void NcclQueue::append(CallList& batch, IssuedCall issued) {
  if (issued.call.op == Op::barrier) issued.call.mine = barrier_element(issued.stream);
  if (issued.call.mine.count > 0) batch.push_back(std::move(issued));
}

Elements NcclQueue::barrier_element(Stream stream) {
  const auto of_stream = [&](const auto& memory) { return memory->home() == stream; };
  auto found = std::find_if(barrier_memory_.begin(), barrier_memory_.end(), of_stream);
  if (found == barrier_memory_.end()) {
    barrier_memory_.push_back(std::make_unique<Buffer>(stream, sizeof(float)));
    found = std::prev(barrier_memory_.end());
  }
  return {(*found)->data(), 1, ElementType::f32};
}

std::string NcclQueue::text_of(const CallList& batch) {
  return batch.front().call.text() + (alike(batch) ? "" : ", ...");
}

void NcclQueue::launch(const CallList& batch, const std::string& what, FlightCall flight) {
  forget_finished();
  try {
    try_to_launch(batch, what, std::move(flight));
  } catch (const BadInput&) {
    throw;  // for example, a stream is being captured: nothing has reached NCCL
  } catch (const Error& error) {
    give_up(error.what());
    throw PeerLost(error.what());
  }
}

void NcclQueue::try_to_launch(const CallList& batch, const std::string& what, FlightCall flight) {
  const std::vector<Stream> streams = arrive(batch, what, std::move(flight));
  std::exception_ptr failed;  // caught here, since enqueue_on() must end its operations
  enqueue_on(streams, operation(batch), [&] {
    try {
      nccl_.group([&] {
        for (const IssuedCall& issued : batch) {
          issue_to_nccl(issued.call, issued.rank, nccl_.world_size(), nccl_.comm(issued.rank),
                        cuda_stream(issued.stream).raw(), nccl_.name(issued.rank));
        }
      });
    } catch (const PeerLost& error) {
      failed = std::make_exception_ptr(PeerLost(fmt::format("{}: {}", what, error.what())));
    }
  });
  if (failed) std::rethrow_exception(failed);
  Pending& launched = pending_.back();
  if (launched.begin) launched.end = streams.front().record_time();
  for (Part& part : launched.parts) part.finished = part.stream.record();
}

/// Marks, on every stream of the batch, the point after which NCCL waits for the peers. Returns the
/// streams.
std::vector<Stream> NcclQueue::arrive(const CallList& batch, const std::string& what,
                                      FlightCall flight) {
  pending_.push_back({.what = what, .parts = {}, .flight = std::move(flight)});
  std::vector<Stream> streams;
  for (const IssuedCall& issued : batch) {
    if (std::find(streams.begin(), streams.end(), issued.stream) != streams.end()) continue;
    watch(cuda_stream(issued.stream).device_state());
    const Event arrived = issued.stream.record();
    pending_.back().parts.push_back({issued.rank, issued.stream, arrived, arrived});
    streams.push_back(issued.stream);
  }
  Pending& pending = pending_.back();
  if (pending.flight.is_recorded()) pending.begin = streams.front().record_time();
  std::string failed = failure();
  if (failed.empty()) failed = failure_of(pending_.back());  // a stream that takes no more work
  if (!failed.empty()) throw PeerLost(failed);
  return streams;
}

// --- Waiting -------------------------------------------------------------------------------------

bool NcclQueue::Pending::arrived() const {
  return std::all_of(parts.begin(), parts.end(),
                     [](const Part& part) { return part.arrived.done(); });
}

bool NcclQueue::Pending::finished() const {
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) {
    return part.finished.done() && !part.stream.backend().error();
  });
}

/// Tells the flight recorder what the device has come to.
void NcclQueue::Pending::note() {
  if (!end) return;
  if (!flight.has_started() && arrived()) flight.start();
  if (finished()) flight.complete(int64_t(1e9 * end->seconds_since(*begin)));
}

void NcclQueue::forget_finished() {
  const auto runs = [](Pending& pending) {
    pending.note();
    return !pending.finished();
  };
  pending_.erase(pending_.begin(), std::find_if(pending_.begin(), pending_.end(), runs));
}

/// A host that is blocked on a stream of the device, for example for a loss, must not wait for ever
/// because the stream waits for another rank that has failed or is gone.
void NcclQueue::watch(cuda::DeviceState& device) {
  if (std::find(watched_.begin(), watched_.end(), &device) != watched_.end()) return;
  watched_.push_back(&device);
  device.watch(this, [this] { look(); });
}

void NcclQueue::look() {
  if (std::this_thread::get_id() != host_) return;
  forget_finished();
  if (pending_.empty()) return;
  std::string failed = failure();
  if (failed.empty()) failed = silence();
  if (!failed.empty()) give_up(failed);
}

void NcclQueue::wait(double timeout_seconds) {
  std::string failed;
  poll(timeout_seconds, [&] {
    forget_finished();
    failed = failure();
    return pending_.empty() || !failed.empty();
  });
  if (failed.empty() && !pending_.empty()) failed = lateness(timeout_seconds);
  if (failed.empty()) return;
  give_up(failed);
  throw PeerLost(failed);
}

/// What has gone wrong, with the oldest group or with NCCL in the background; empty if nothing.
/// What keeps a later group waiting is seen when that one is the oldest: to ask for all of them at
/// every launch would take the host longer the further it is ahead of the GPU.
std::string NcclQueue::failure() const {
  if (pending_.empty()) return nccl_.failure();
  const Pending& oldest = pending_.front();
  const std::string failed = failure_of(oldest);
  if (!failed.empty()) return failed;
  const std::string noticed = nccl_.failure();
  return noticed.empty() ? "" : fmt::format("{}: {}", oldest.what, noticed);
}

/// What has gone wrong on the streams of a batch.
std::string NcclQueue::failure_of(const Pending& pending) const {
  for (const Part& part : pending.parts) {
    part.finished.done();  // asks the GPU, so that the stream learns of an error there
    const std::exception_ptr error = part.stream.backend().error();
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& cause) {
      return fmt::format("{}: {} failed: {}", pending.what, nccl_.name(part.rank), cause.what());
    }
  }
  return "";
}

/// Which other process has kept this one waiting for too long; empty if none has. The time begins
/// when every part of this process has arrived.
std::string NcclQueue::silence() {
  Pending& first = pending_.front();
  if (!first.arrived()) return "";
  if (!first.came) first.came = Clock::now();
  const std::chrono::duration<double> waited = Clock::now() - *first.came;
  if (waited.count() < patience_seconds_) return "";
  return fmt::format("{}: no answer from {} within {} s", first.what, nccl_.others(),
                     patience_seconds_);
}

/// Who is missing from the first group that has not ended.
std::string NcclQueue::lateness(double timeout_seconds) const {
  const Pending& late = pending_.front();
  std::vector<std::string> missing;
  for (const Part& part : late.parts) {
    if (!part.arrived.done()) missing.push_back(nccl_.name(part.rank));
  }
  if (missing.empty()) {
    return fmt::format("{}: all ranks came, but it has not ended within {} s", late.what,
                       timeout_seconds);
  }
  return fmt::format("{}: {} did not come within {} s", late.what, listed(missing),
                     timeout_seconds);
}

/// Frees the ranks that wait for each other. The results of their collectives must not be used: the
/// devices report why.
void NcclQueue::give_up(const std::string& why) {
  on_failure_(why);
  nccl_.abort();
  for (cuda::DeviceState* device : watched_) {
    device->fail(std::make_exception_ptr(PeerLost(why)));
  }
  for (Pending& pending : pending_) pending.flight.give_up();
  pending_.clear();
}

}  // namespace lockstep
