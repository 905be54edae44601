#include "common/comm/process/host_communicator.h"

#include <utility>

#include "common/comm/call_check.h"
#include "common/core/cpu_stream.h"
#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {

void HostCommunicator::issue(Stream stream, const Call& call) {
  const Device& device = stream.device();
  require(device.id().kind == DeviceId::Kind::cpu,
          "rank {}: {} through {} on {}, expected a CPU device", rank(), call.text(),
          transport_->description(), device.name());
  issued_.push_back({stream, call});
  if (!open_) close_group();
}

void HostCommunicator::open_group() {
  require(!open_, "rank {}: a group of calls is open already; close it before", rank());
  open_ = true;
}

void HostCommunicator::close_group() {
  open_ = false;
  const std::vector<Issued> issued = std::exchange(issued_, {});
  for (size_t i = 0; i < issued.size();) {
    if (!is_transfer(issued[i].call)) {
      enqueue_collective(issued[i++]);
      continue;
    }
    const Stream stream = issued[i].stream;
    std::vector<Call> transfers;
    for (; i < issued.size() && is_transfer(issued[i].call) && issued[i].stream == stream; ++i) {
      transfers.push_back(issued[i].call);
    }
    enqueue_transfers(stream, std::move(transfers));
  }
}

void HostCommunicator::enqueue_collective(const Issued& issued) {
  const auto run = [transport = transport_, call = issued.call, number = ++collectives_,
                    rank = rank()] {
    within(fmt::format("rank {}: collective {} ({})", rank, number, call.text()),
           [&] { transport->run(call, number); });
  };
  enqueue(issued.stream, name_of(issued.call.op), run);
}

void HostCommunicator::enqueue_transfers(Stream stream, std::vector<Call> calls) {
  const char* op = calls.size() == 1 ? name_of(calls[0].op) : "transfers";
  enqueue(stream, op, [transport = transport_, calls = std::move(calls), rank = rank()] {
    within(fmt::format("rank {}", rank), [&] { transport->transfer(calls); });
  });
}

void HostCommunicator::enqueue(Stream stream, const char* op, std::function<void()> body) {
  if (last_) stream.wait(*last_);
  static_cast<CpuStream&>(stream.backend()).enqueue(op, std::move(body));
  last_ = stream.record();
}

}  // namespace lockstep
