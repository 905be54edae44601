#include "common/core/stream.h"

#include "common/core/device.h"

namespace lockstep {

bool Event::done() const { return stream_->done(ticket_); }

void Event::synchronize() const {
  stream_->block(ticket_);
  if (std::exception_ptr error = stream_->error()) std::rethrow_exception(error);
}

Kernels& Stream::kernels() const { return device().kernels(); }

}  // namespace lockstep
