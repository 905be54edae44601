#include "common/comm/shm_lanes.h"

#include <algorithm>
#include <cstring>

namespace lockstep {

/// Only lanes that are used take memory. Either side may be the first to touch a lane.
void ShmLanes::provide_lane(const Call& call) {
  const bool sends = call.op == Call::Op::send;
  std::vector<bool>& used = used_[size_t(sends)];
  const auto peer = size_t(call.peer);
  if (used[peer]) return;
  const int me = peers_.rank();
  peers_.set_lane_aside(sends ? me : call.peer, sends ? call.peer : me);
  used[peer] = true;
}

bool ShmLanes::can_move(const Message& message) const {
  if (message.sends) {
    const Lane& lane = peers_.memory().lane(peers_.rank(), message.peer);
    return lane.sent.load(std::memory_order_relaxed) - lane.taken.load(std::memory_order_acquire) <
           Lane::kBytes;
  }
  const Lane& lane = peers_.memory().lane(message.peer, peers_.rank());
  return lane.sent.load(std::memory_order_acquire) > lane.taken.load(std::memory_order_relaxed);
}

/// As much as there is room for, or as has come, up to the lane's end, where it begins again.
void ShmLanes::move_some(Message& message) {
  const int me = peers_.rank(), from = message.sends ? me : message.peer;
  Lane& lane = peers_.memory().lane(from, message.sends ? message.peer : me);
  const uint64_t sent = lane.sent.load(std::memory_order_acquire);
  const uint64_t taken = lane.taken.load(std::memory_order_acquire);
  const size_t at = (message.sends ? sent : taken) % Lane::kBytes;
  const size_t there = message.sends ? Lane::kBytes - (sent - taken) : sent - taken;
  const size_t n = std::min({message.left, there, Lane::kBytes - at});
  if (message.sends) {
    std::memcpy(&lane.bytes[at], message.bytes, n);
    lane.sent.store(sent + n, std::memory_order_release);
    bytes_sent_ += int64_t(n);
  } else {
    std::memcpy(message.bytes, &lane.bytes[at], n);
    lane.taken.store(taken + n, std::memory_order_release);
  }
  peers_.wake(message.peer);
  message.bytes += n;
  message.left -= n;
}

void ShmLanes::transfer(const std::vector<Call>& calls) {
  std::vector<Message> messages;
  for (const Call& call : calls) {
    const auto bytes = static_cast<size_t>(call.mine.count * size_of(call.mine.type));
    if (bytes > 0) provide_lane(call);
    messages.push_back(
        {call.op == Call::Op::send, call.peer, static_cast<std::byte*>(call.mine.data), bytes});
  }
  // Of the messages of one lane only the first that is not done may move.
  const auto is_next = [&](const Message& message) {
    const auto first = std::ranges::find_if(messages, [&](const Message& other) {
      return other.left > 0 && other.sends == message.sends && other.peer == message.peer;
    });
    return first != messages.end() && &*first == &message;
  };
  const auto movable = [&](const Message& message) {
    return is_next(message) && can_move(message);
  };
  const auto awaited = [&](int rank) {
    return std::ranges::any_of(
        messages, [&](const Message& message) { return message.left > 0 && message.peer == rank; });
  };
  while (std::ranges::any_of(messages, [](const Message& message) { return message.left > 0; })) {
    peers_.wait([&] { return std::ranges::any_of(messages, movable); }, awaited,
                ShmPeers::Concerns::awaiting);
    for (Message& message : messages) {
      if (movable(message)) move_some(message);
    }
  }
}

}  // namespace lockstep
