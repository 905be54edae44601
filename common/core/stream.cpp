#include "common/core/stream.h"

#include <chrono>
#include <thread>

#include "common/core/device.h"

namespace lockstep {

bool Event::done() const { return stream_->done(ticket_); }

void Event::synchronize() const {
  stream_->block(ticket_);
  if (std::exception_ptr error = stream_->error()) std::rethrow_exception(error);
}

void StreamBackend::block_until_unawaited() const {
  while (awaited_.load(std::memory_order_acquire) > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Kernels& Stream::kernels() const { return device().kernels(); }

}  // namespace lockstep
