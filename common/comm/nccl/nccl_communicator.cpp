#include "common/comm/nccl/nccl_communicator.h"

#include <cstring>
#include <utility>

#include "common/core/error.h"

namespace lockstep {
namespace {

ncclUniqueId id_of(const std::string& text) {
  ncclUniqueId id;
  require(text.size() == sizeof id.internal,
          "NCCL: the id of a group has {} bytes, found {}: all ranks take what nccl_unique_id() "
          "gave to rank 0",
          sizeof id.internal, text.size());
  std::memcpy(id.internal, text.data(), sizeof id.internal);
  return id;
}

}  // namespace

NcclCommunicator::NcclCommunicator(Device& device, int rank, int world_size, const std::string& id,
                                   double timeout_seconds)
    : ProcessCommunicator(rank, world_size, std::make_shared<SentBytes>(kCountedInNcclCalls)),
      device_(device),
      queue_({{&device}, rank, world_size, id_of(id)}, timeout_seconds, timeout_seconds,
             [this](const std::string& why) { broken_ = why; }) {}

void NcclCommunicator::enqueue(Stream stream, const std::vector<Call>& together,
                               FlightCall flight) {
  if (!broken_.empty()) throw PeerLost(broken_);
  require(&stream.device() == &device_, "{}: {} on a stream of {}, the rank is on {}", who(),
          together[0].text(), stream.device().name(), device_.name());
  const bool transfers = is_transfer(together[0]);
  NcclQueue::CallList batch;
  for (const Call& call : together) queue_.append(batch, {rank(), stream, call});
  if (batch.empty()) return flight.complete(0);
  const std::string text =
      transfers ? NcclQueue::text_of(batch)
                : fmt::format("collective {} ({})", flight.number(), together[0].text());
  queue_.launch(batch, fmt::format("{}: {}", who(), text), std::move(flight));
  for (const Call& call : together) {
    sent()->add(call.purpose, call.ring_bytes(rank(), world_size()));
  }
}

}  // namespace lockstep
