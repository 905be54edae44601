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

#include "common/comm/peer_meeting.h"
#include "common/comm/shm_transport.h"
#include "common/rendezvous/agreement.h"
#include "common/rendezvous/unix_socket.h"

namespace lockstep {
namespace {

constexpr const char* kAllConnections = "all connections";

std::string name_of(const std::string& step) { return "shared memory: " + step; }

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
    const std::vector<std::string> names = step("a socket", [&] {
      name = random_name();
      listener_ = listen_under(name);
      meeting_.emplace(store_, listener_, name);
      if (store_.rank() == 0) create_memory();
      return name;
    });
    step("a connection", [&] { return connect_to_lower(names); });
    step(kAllConnections, [&] { return meet_all(); });
    step("the memory", [&] { return hand_round(); });
    return std::make_unique<ShmPeers>(memory_, store_.rank(), std::move(sockets_), timeout_seconds);
  }

 private:
  /// Returns the ranks' results of `work`, which throws EnvironmentError where it cannot be done.
  /// A peer that closed its connection may only have given up; one that has gone is missed below.
  std::vector<std::string> step(const std::string& what, const std::function<std::string()>& work) {
    std::string done, failure;
    try {
      done = work();
    } catch (const EnvironmentError& error) {
      failure = error.what();
    } catch (const ConnectionClosed& error) {
      failure = error.what();
    }
    if (!failure.empty()) close_all();
    const auto exchanged = [&](const std::string& mine) {
      return exchange(store_, name_of(what), mine, deadline_.seconds_left());
    };
    try {
      return together(exchanged, [&] {
        if (!failure.empty()) fail<EnvironmentError>("rank {}: {}", store_.rank(), failure);
        return done;
      });
    } catch (const EnvironmentError& error) {
      throw NoSharedMemory(error.what());
    }
  }

  /// Whoever waits at one of its sockets, or ours, does so no longer.
  void close_all() {
    meeting_.reset();
    sockets_.clear();
    listener_.close();
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
                      require_not_given_up(missing);
                    }});
    return "";
  }

  /// All have connected: who says that it could not come will not. Who says that it has is let in a
  /// moment later: this rank has answered it, and its proof waits here.
  void require_not_given_up(const std::vector<int>& missing) {
    const Meeting met = look(store_, name_of(kAllConnections));
    for (const int rank : missing) {
      const std::optional<std::string>& text = met.texts.at(size_t(rank));
      if (!text || !is_failure(*text)) continue;
      fail<EnvironmentError>("rank {} has not connected, or as another user", rank);
    }
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
