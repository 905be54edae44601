#include "common/core/stream.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"

namespace lockstep {

std::string scope_within(const std::string* outer, std::string_view name) {
  if (outer == nullptr) return std::string(name);
  const size_t last = outer->rfind('/') + 1;  // npos + 1 is 0
  const std::string block = outer->substr(last) + ".";
  return (name.starts_with(block) ? outer->substr(0, last) : *outer + "/") + std::string(name);
}

bool Event::done() const { return stream_->done(ticket_); }

void Event::synchronize() const {
  stream_->block(ticket_);
  stream_->throw_error();
}

double TimedEvent::seconds_since(const TimedEvent& earlier) const {
  const StreamBackend &mine = *event_.stream_, &other = *earlier.event_.stream_;
  require(&mine == &other, "the time between events of streams {} and {}: give two of one",
          other.name(), mine.name());
  mine.block(std::max(event_.ticket_, earlier.event_.ticket_));
  return time_->seconds_since(*earlier.time_);
}

void StreamBackend::push_scope(std::string_view name) {
  scopes_.push_back(&*scope_names_.insert(scope_within(scope(), name)).first);
}

void StreamBackend::pop_scope() { scopes_.pop_back(); }

void StreamBackend::refuse_in_capture(const char* op) const {
  require(!is_capturing(), "{}: '{}' on stream {} cannot be part of a graph; do it before or after",
          device().name(), op, name());
}

void StreamBackend::block_until_unawaited() const {
  while (awaited_.load(std::memory_order_acquire) > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void StreamBackend::drain() noexcept {
  try {
    block(record());
  } catch (...) {  // of a failed device, or in a capture
    block(last_ticket_);
  }
}

void StreamBackend::throw_error() const {
  const std::exception_ptr failure = error();
  if (failure && owner_.empty()) std::rethrow_exception(failure);
  if (failure) std::rethrow_exception(failure_of(*this, failure));
}

std::exception_ptr StreamBackend::failure_of(const StreamBackend& source,
                                             std::exception_ptr error) const {
  if (&source.device() == &device() && source.owner_.empty()) return error;
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost&) {
    return error;  // it already names who failed
  } catch (const std::exception& cause) {
    const std::string& who = source.owner_.empty() ? source.device().name() : source.owner_;
    return std::make_exception_ptr(PeerLost(fmt::format("{} failed: {}", who, cause.what())));
  } catch (...) {
    return error;
  }
}

// --- What is enqueued ----------------------------------------------------------------------------

Device& Stream::device() const { return backend_->device(); }
Kernels& Stream::kernels() const { return device().kernels(); }
const std::string& Stream::name() const { return backend_->name(); }

Event Stream::record() const { return Event(*backend_, backend_->record()); }

TimedEvent Stream::record_time() const {
  std::shared_ptr<const EventTime> time = backend_->record_time();
  return TimedEvent(std::move(time), record());
}

void Stream::wait(const Event& event) const { backend_->wait(event); }

void Stream::copy(void* to, const void* from, size_t bytes) const {
  backend_->copy(to, from, bytes);
}

void Stream::begin_capture() const { backend_->begin_capture(); }
std::unique_ptr<Graph> Stream::end_capture() const { return backend_->end_capture(); }
void Stream::launch(Graph& graph) const { backend_->launch(graph); }

ScopedRange::ScopedRange(Stream stream, std::string_view name) : stream_(stream) {
  stream_.backend().push_scope(name);
}
ScopedRange::~ScopedRange() { stream_.backend().pop_scope(); }

}  // namespace lockstep
