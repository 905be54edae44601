#include "common/comm/process/transfer.h"

#include <array>

namespace lockstep {
namespace {

/// A transfer under way.
struct Progress {
  Sending out;
  Receiving in;
  size_t sent = 0, received = 0;

  bool sends() const { return sent < out.bytes.size(); }
  bool receives() const { return received < in.bytes.size(); }
  /// Moves what can be moved now; false if that is nothing.
  bool move() {
    const size_t before = sent + received;
    if (sends()) sent += out.socket->send_some(out.bytes.subspan(sent));
    if (receives()) received += in.socket->receive_some(in.bytes.subspan(received));
    return sent + received > before;
  }
  [[noreturn]] void fail_late(const Deadline& deadline) const {
    if (receives()) {
      fail<PeerLost>("{} did not answer within {:g} s: {} of {} bytes came", in.socket->peer(),
                     deadline.seconds(), received, in.bytes.size());
    }
    fail<PeerLost>("{} did not answer within {:g} s: it took {} of {} bytes", out.socket->peer(),
                   deadline.seconds(), sent, out.bytes.size());
  }
};

}  // namespace

void transfer(Sending out, Receiving in, const Deadline& deadline, const WakeUp* cancelled) {
  Progress progress{out, in};
  while (true) {
    const bool moved = progress.move();
    if (!progress.sends() && !progress.receives()) return;
    if (deadline.passed()) progress.fail_late(deadline);
    if (moved) continue;
    std::array<pollfd, 3> entries{
        pollfd{progress.sends() ? out.socket->fd() : -1, POLLOUT, 0},
        pollfd{progress.receives() ? in.socket->fd() : -1, POLLIN, 0},
        pollfd{cancelled != nullptr ? cancelled->fd() : -1, POLLIN, 0},
    };
    wait_ready(entries, deadline);
    if (entries[2].revents != 0) fail<PeerLost>("a transfer was cancelled");
  }
}

}  // namespace lockstep
