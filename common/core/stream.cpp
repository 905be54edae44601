#include "common/core/stream.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {

bool Event::done() const { return stream_->done(ticket_); }

void Event::synchronize() const {
  stream_->block(ticket_);
  if (std::exception_ptr error = stream_->error()) std::rethrow_exception(error);
}

double Event::seconds_since(const Event& earlier) const {
  require(stream_ == earlier.stream_,
          "the time between events of streams {} and {}: give two of one", earlier.stream_->name(),
          stream_->name());
  const uint64_t age = stream_->last_ticket() - std::min(ticket_, earlier.ticket_);
  require(age < StreamBackend::kEventRing,
          "the time of an event of stream {}, {} events ago: it keeps that of the last {}; ask "
          "earlier",
          stream_->name(), age, StreamBackend::kEventRing);
  stream_->block(ticket_);
  return stream_->seconds_between(earlier.ticket_, ticket_);
}

void StreamBackend::block_until_unawaited() const {
  while (awaited_.load(std::memory_order_acquire) > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

std::exception_ptr StreamBackend::failure_of(const StreamBackend& source,
                                             std::exception_ptr error) const {
  if (&source.device() == &device()) return error;
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost&) {
    return error;  // it names the device already
  } catch (const std::exception& cause) {
    return std::make_exception_ptr(
        PeerLost(fmt::format("{} failed: {}", source.device().name(), cause.what())));
  } catch (...) {
    return error;
  }
}

Kernels& Stream::kernels() const { return device().kernels(); }

}  // namespace lockstep
