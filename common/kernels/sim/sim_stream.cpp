#include "common/kernels/sim/sim_stream.h"

#include <algorithm>
#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {

struct SimStream::Recording final : Graph {
  explicit Recording(SimStream& of) : stream(of) {}
  SimStream& stream;
  std::vector<Operation> operations;
};

struct SimStream::Time final : EventTime {
  explicit Time(int64_t when) : ns(when) {}
  double seconds_since(const EventTime& earlier) const override {
    return double(ns - static_cast<const Time&>(earlier).ns) * 1e-9;
  }
  int64_t ns;
};

SimStream::SimStream(Device& device, std::string name, SimHost& host, const Profile& profile)
    : StreamBackend(device, std::move(name)),
      host_(host),
      profile_(profile),
      tracing_(device.options().trace) {}

SimStream::~SimStream() = default;

void SimStream::enqueue(const char* op, int64_t ns, int64_t sent_bytes) {
  const Operation operation{op, scope(), ns, sent_bytes};
  if (recording_) {
    recording_->operations.push_back(operation);
    return;
  }
  host_.work(profile_.launch_ns);
  place(operation);
}

void SimStream::place(const Operation& operation) {
  const int64_t begin = next_begin();
  if (begin > free_at_) busy_since_ = begin;
  free_at_ = SimHost::counted(begin + operation.ns);
  if (tracing_) {
    spans_.push_back({operation.op, operation.scope, begin, free_at_, host_.now(),
                      operation.sent_bytes, std::exchange(awaited_, {})});
  }
}

// --- Events --------------------------------------------------------------------------------------

uint64_t SimStream::record() {
  refuse_in_capture("record");
  const uint64_t ticket = new_ticket();
  events_[ticket % kEventRing] = {next_begin(), spans_.size()};
  return ticket;
}

std::shared_ptr<const EventTime> SimStream::record_time() {
  refuse_in_capture("record");
  return std::make_shared<Time>(next_begin());
}

void SimStream::wait(const Event& event) {
  refuse_in_capture("wait");
  const auto& source = static_cast<const SimStream&>(stream_of(event));
  const auto [comes, operations] = source.point_of(ticket_of(event));
  wait_until(comes > next_begin() ? comes + profile_.wake_ns : comes);
  if (operations > 0 && &source != this) awaited_.push_back({&source, operations - 1});
}

void SimStream::wait_until(int64_t ns) {
  if (ns <= free_at_) return;
  free_at_ = busy_since_ = SimHost::counted(ns);
}

int64_t SimStream::operation_ns(const OperationCost& cost, double flops, double bytes) const {
  return profile_.operation_ns(cost, flops, bytes, device().id().beside);
}

// --- Memory --------------------------------------------------------------------------------------

void SimStream::copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const Device *source = host_.device_at(from), *target = host_.device_at(to);
  const bool stays = source == target;  // each byte is read and written there
  const Link link = source == nullptr || target == nullptr ? Link::host : Link::device;
  if (stays) {
    enqueue("copy", operation_ns(profile_.cost_of("copy"), 0, 2 * double(bytes)));
  } else {
    enqueue("copy", profile_.message_ns(link, double(bytes)),
            link == Link::device ? int64_t(bytes) : 0);
  }
  host_.copy(to, from, bytes);
}

void SimStream::host_task(const char* op, std::function<void()>) {
  fail<BadInput>(
      "{}: '{}' is work of the host, which a simulated device has nobody to do; give "
      "--devices cpu:0",
      device().name(), op);
}

void* SimStream::allocate(size_t bytes) {
  trace_memory(int64_t(bytes));
  return host_.allocate(bytes, device());
}

void SimStream::release(void* memory, size_t bytes) {
  trace_memory(-int64_t(bytes));
  host_.release(memory);
}

void SimStream::trace_memory(int64_t change) {
  if (tracing_) memory_changes_.push_back({next_begin(), change});
}

// --- Graphs --------------------------------------------------------------------------------------

void SimStream::begin_capture() {
  require(!recording_, "{}: stream {} is being captured already", device().name(), name());
  record();
  recording_ = std::make_unique<Recording>(*this);
}

std::unique_ptr<Graph> SimStream::end_capture() {
  require(recording_ != nullptr, "{}: stream {} is not being captured", device().name(), name());
  return std::move(recording_);
}

/// The host pays once for all.
void SimStream::launch(Graph& graph) {
  const Recording& recorded = dynamic_cast<Recording&>(graph);
  require(&recorded.stream == this, "{}: stream {} did not record this graph, {} did",
          device().name(), name(), recorded.stream.name());
  host_.work(profile_.launch_ns);
  for (const Operation& operation : recorded.operations) place(operation);
}

}  // namespace lockstep
