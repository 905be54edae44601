#include "common/transports/host_communicator.h"

#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"

namespace lockstep {

/// What the host does between the copies.
std::function<void()> HostCommunicator::task(const std::vector<Call>& together,
                                             FlightCall flight) const {
  if (is_transfer(together[0])) {
    return [held = held_, calls = together, me = who(), flight]() mutable {
      within(fmt::format("{}: {}", me, calls[0].text()), [&] {
        flight.run(
            [&] { held->counted(calls[0].purpose, [&] { held->transport->transfer(calls); }); });
      });
    };
  }
  return [held = held_, call = together[0], me = who(), flight]() mutable {
    within(fmt::format("{}: collective {} ({})", me, flight.number(), call.text()), [&] {
      flight.run([&] {
        held->counted(call.purpose, [&] { held->transport->run(call, flight.number()); });
      });
    });
  };
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
