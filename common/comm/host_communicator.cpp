#include "common/comm/host_communicator.h"

#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"

namespace lockstep {

void HostCommunicator::Held::make(const std::vector<Call>& together, FlightCall& flight,
                                  const std::string& who) const {
  const Call& first = together[0];
  flight.start();
  try {
    const int64_t before = transport->bytes_sent();
    if (first.is_transfer()) {
      transport->transfer(together);
    } else {
      transport->run(first, flight.number());
    }
    sent->add(first.purpose, transport->bytes_sent() - before);
  } catch (...) {
    flight.give_up();
    within(first.is_transfer()
               ? fmt::format("{}: {}", who, first.text())
               : fmt::format("{}: collective {} ({})", who, flight.number(), first.text()),
           [] { throw; });
  }
  flight.complete();
}

std::function<void()> HostCommunicator::task(const std::vector<Call>& together,
                                             FlightCall flight) const {
  return
      [held = held_, together, me = who(), flight]() mutable { held->make(together, flight, me); };
}

void HostCommunicator::enqueue(Stream stream, const std::vector<Call>& together,
                               FlightCall flight) {
  if (last_) stream.wait(*last_);
  const char* op = together.size() == 1 ? name_of(together[0].op) : "transfers";
  if (stream.device().id().kind == DeviceId::Kind::cpu) {
    stream.backend().host_task(op, task(together, std::move(flight)));
  } else {
    const std::vector<Call> on_host = staging_.copy_down(stream, together);
    stream.backend().host_task(op, task(on_host, std::move(flight)));
    staging_.copy_up(stream, together, on_host);
  }
  last_ = stream.record();
}

}  // namespace lockstep
