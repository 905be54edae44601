#include "common/rendezvous/transfer.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

/// How long the thread looks for the next bytes before it sleeps: waking up takes longer.
constexpr std::chrono::microseconds kSpin{50};

size_t move_some(const Sending& message) { return message.socket->send_some(message.bytes); }
size_t move_some(const Receiving& message) { return message.socket->receive_some(message.bytes); }

/// The messages of one direction, and what is left of each.
template <class Message>
class Direction {
 public:
  explicit Direction(std::span<const Message> whole)
      : whole_(whole), left_(whole.begin(), whole.end()) {}

  bool done() const { return first_unfinished() == left_.end(); }
  /// Moves what can be moved now; false if that is nothing.
  bool move() {
    bool moved = false;
    for (Message& message : left_) {
      if (!is_next(message)) continue;
      const size_t bytes = move_some(message);
      message.bytes = message.bytes.subspan(bytes);
      moved = moved || bytes > 0;
    }
    return moved;
  }
  void add_to(std::vector<pollfd>& entries, short event) const {
    for (const Message& message : left_) {
      if (is_next(message)) entries.push_back({message.socket->fd(), event, 0});
    }
  }
  /// "rank 2 did not answer within 5 s: 100 of 4096 bytes came"
  [[noreturn]] void fail_late(const Deadline& deadline, const char* before,
                              const char* after) const {
    const Message& late = *first_unfinished();
    const size_t size = whole_[static_cast<size_t>(&late - left_.data())].bytes.size();
    fail<PeerLost>("{} did not answer within {:g} s: {}{} of {} bytes{}", late.socket->peer(),
                   deadline.seconds(), before, size - late.bytes.size(), size, after);
  }

 private:
  auto first_unfinished() const {
    return std::find_if(left_.begin(), left_.end(),
                        [](const Message& message) { return !message.bytes.empty(); });
  }
  /// True if it is not done, but all before it on its socket are.
  bool is_next(const Message& message) const {
    const auto first = std::find_if(left_.begin(), left_.end(), [&](const Message& other) {
      return other.socket == message.socket && !other.bytes.empty();
    });
    return first != left_.end() && &*first == &message;
  }

  std::span<const Message> whole_;
  std::vector<Message> left_;
};

}  // namespace

void transfer(std::span<const Sending> out, std::span<const Receiving> in,
              const Deadline& deadline) {
  Direction<Sending> sending(out);
  Direction<Receiving> receiving(in);
  Clock::time_point moved = Clock::now();
  while (true) {
    const bool sent = sending.move(), received = receiving.move();
    if (sending.done() && receiving.done()) return;
    if (deadline.passed()) {
      if (!receiving.done()) receiving.fail_late(deadline, "", " came");
      sending.fail_late(deadline, "it took ", "");
    }
    if (sent || received) moved = Clock::now();
    if (Clock::now() - moved < kSpin) {
      std::this_thread::yield();
      continue;
    }
    std::vector<pollfd> entries;
    sending.add_to(entries, POLLOUT);
    receiving.add_to(entries, POLLIN);
    wait_ready(entries, deadline);
  }
}

}  // namespace lockstep
