#include "common/transports/host_communicator.h"

#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"

namespace lockstep {
namespace {

/// Does `work`, and counts what it sends.
template <class Work>
void counted(const HostTransport& transport, SentBytes& sent, Purpose purpose, Work work) {
  const int64_t before = transport.bytes_sent();
  work();
  sent.add(purpose, transport.bytes_sent() - before);
}

}  // namespace

/// What the host does between the copies.
std::function<void()> HostCommunicator::task(const std::vector<Call>& together,
                                             FlightCall flight) const {
  if (is_transfer(together[0])) {
    return [transport = transport_, sent = sent().get(), calls = together, me = who(),
            flight]() mutable {
      within(fmt::format("{}: {}", me, calls[0].text()), [&] {
        flight.run([&] {
          counted(*transport, *sent, calls[0].purpose, [&] { transport->transfer(calls); });
        });
      });
    };
  }
  return [transport = transport_, sent = sent().get(), call = together[0], me = who(),
          flight]() mutable {
    within(fmt::format("{}: collective {} ({})", me, flight.number(), call.text()), [&] {
      flight.run([&] {
        counted(*transport, *sent, call.purpose, [&] { transport->run(call, flight.number()); });
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
