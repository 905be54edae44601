// How the ranks of one host come to share memory. Each listens under a name that nobody can guess;
// the higher rank of two connects, and both prove the job's key; then rank 0 sends all others the
// descriptor of the memory. That it arrives proves that they are on one host: a name or an address
// does not.

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "common/rendezvous/rank_texts.h"
#include "common/sockets/unix_socket.h"
#include "common/transports/peer_meeting.h"
#include "common/transports/shm_transport.h"

namespace lockstep {
namespace {

constexpr const char* kAllConnections = "all connections";

std::string text_of(const std::string& step) { return "shared memory: " + step; }

std::string random_name() {
  std::random_device random;
  std::string name = "lockstep";
  for (int i = 0; i < 4; ++i) name += fmt::format("-{:08x}", random());
  return name;
}

/// The steps by which one rank connects. Each runs on all ranks, and has failed on all if it has
/// failed on one.
class ShmMeeting {
 public:
  ShmMeeting(Store& store, double timeout_seconds)
      : store_(store), deadline_(timeout_seconds), sockets_(size_t(store.world_size())) {}

  std::unique_ptr<ShmPeers> meet(double timeout_seconds) {
    std::string name;
    const std::vector<std::string> names = together("a socket", [&] {
      name = random_name();
      listener_ = listen_under(name);
      meeting_.emplace(store_, listener_, name);
      if (store_.rank() == 0) create_memory();
      return name;
    });
    together("a connection", [&] { return connect_to_lower(names); });
    together(kAllConnections, [&] { return meet_all(); });
    together("the memory", [&] { return hand_round(); });
    return std::make_unique<ShmPeers>(memory_, store_.rank(), std::move(sockets_), timeout_seconds);
  }

 private:
  /// Returns the ranks' results of `work`, which throws EnvironmentError where it cannot be done.
  /// A peer that closed its connection may only have given up; one that has gone is missed below.
  std::vector<std::string> together(const std::string& what,
                                    const std::function<std::string()>& work) {
    std::string done = "+";
    const auto give_up = [&](const Error& error) {
      done = fmt::format("rank {}: {}", store_.rank(), error.what());
      meeting_.reset();  // whoever waits at one of its sockets, or ours, does so no longer
      sockets_.clear();
      listener_.close();
    };
    try {
      done += work();
    } catch (const EnvironmentError& error) {
      give_up(error);
    } catch (const ConnectionClosed& error) {
      give_up(error);
    }
    std::vector<std::string> all =
        exchange_texts(store_, text_of(what), done, deadline_.seconds_left());
    for (std::string& text : all) {
      if (!text.starts_with('+')) throw NoSharedMemory(text);
      text.erase(0, 1);
    }
    return all;
  }

  void create_memory() {
    const int ranks = store_.world_size();
    memory_ = std::make_shared<SharedMemory>(
        SharedMemory::create(ShmLayout::bytes(ranks), ShmLayout::used_bytes(ranks)));
    ShmLayout(memory_->data(), store_.world_size()).begin();
  }

  /// Without waiting for an answer: all have to know first whether all could connect.
  std::string connect_to_lower(const std::vector<std::string>& names) {
    for (int lower = 0; lower < store_.rank(); ++lower) {
      const std::string& name = names[size_t(lower)];
      meeting_->add(
          lower,
          [name, lower](const Deadline& until) {
            return connect_under(name, fmt::format("rank {}", lower), until);
          },
          name, deadline_);
    }
    return "";
  }

  std::string meet_all() {
    sockets_ = meeting_->meet(
        deadline_, {.own_user_only = true, .check_missing = [&](const std::vector<int>& missing) {
                      for (const int rank : missing) require_not_given_up(rank);
                    }});
    return "";
  }

  /// All have connected: who says that it could not come will not. Who says that it has is let in a
  /// moment later: this rank has answered it, and its proof waits here.
  void require_not_given_up(int rank) {
    const std::optional<std::string> text = text_left(store_, text_of(kAllConnections), rank);
    if (!text || text->starts_with('+')) return;
    fail<EnvironmentError>("rank {} has not connected, or as another user", rank);
  }

  std::string hand_round() {
    if (store_.rank() > 0) {
      const int ranks = store_.world_size();
      memory_ = std::make_shared<SharedMemory>(
          SharedMemory::open(receive_descriptor(sockets_[0], deadline_), ShmLayout::bytes(ranks),
                             ShmLayout::used_bytes(ranks)));
      return "";
    }
    for (size_t rank = 1; rank < sockets_.size(); ++rank) {
      send_descriptor(sockets_[rank], memory_->descriptor());
    }
    return "";
  }

  Store& store_;
  Deadline deadline_;
  Socket listener_;
  std::optional<PeerMeeting> meeting_;
  std::shared_ptr<SharedMemory> memory_;
  std::vector<Socket> sockets_;
};

}  // namespace

std::shared_ptr<HostTransport> connect_shm(Store& store, double timeout_seconds) {
  return make_shm_transport(ShmMeeting(store, timeout_seconds).meet(timeout_seconds));
}

}  // namespace lockstep
