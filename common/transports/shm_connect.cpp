// How the ranks of one host come to share memory. Each listens under a name that nobody can guess;
// the higher rank of two connects; then rank 0 sends all others the descriptor of the memory. That
// it arrives proves that they are on one host: a name or an address does not.

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "common/rendezvous/rank_texts.h"
#include "common/sockets/connect.h"
#include "common/sockets/transfer.h"
#include "common/sockets/unix_socket.h"
#include "common/sockets/wire.h"
#include "common/transports/shm_transport.h"

namespace lockstep {
namespace {

constexpr size_t kRankBytes = 4;  // bytes of a rank's number

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
      if (store_.rank() == 0) create_memory();
      return name;
    });
    together("a connection", [&] { return connect_to_lower(names); });
    together("all connections", [&] { return accept_higher(); });
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
      sockets_.clear();  // whoever waits at one of them does so no longer
    };
    try {
      done += work();
    } catch (const EnvironmentError& error) {
      give_up(error);
    } catch (const ConnectionClosed& error) {
      give_up(error);
    }
    std::vector<std::string> all =
        exchange_texts(store_, "shared memory: " + what, done, deadline_.seconds_left());
    for (std::string& text : all) {
      if (!text.starts_with('+')) throw NoSharedMemory(text);
      text.erase(0, 1);
    }
    return all;
  }

  void create_memory() {
    const size_t bytes = ShmLayout::bytes(store_.world_size());
    memory_ = std::make_shared<SharedMemory>(SharedMemory::create(bytes));
    ShmLayout(memory_->data(), store_.world_size()).begin();
  }

  std::string connect_to_lower(const std::vector<std::string>& names) {
    for (int lower = 0; lower < store_.rank(); ++lower) {
      Socket& socket = sockets_[size_t(lower)];
      socket = connect_under(names[size_t(lower)], fmt::format("rank {}", lower), deadline_);
      std::string introduction;
      put_number(introduction, uint64_t(store_.rank()), kRankBytes);
      send_all(socket, bytes_of(introduction), deadline_);
    }
    return "";
  }

  /// All higher ranks have connected, and introduced themselves: they wait in the listener's queue.
  std::string accept_higher() {
    while (std::optional<Socket> socket = accept_from(listener_)) {
      if (!has_same_user(*socket)) continue;  // another one's, who has seen the name
      std::string introduction(kRankBytes, '\0');
      receive_all(*socket, writable_bytes_of(introduction), deadline_);
      const uint64_t rank = WireReader(introduction).number(kRankBytes);
      if (rank <= uint64_t(store_.rank()) || rank >= sockets_.size()) continue;
      socket->name_peer(fmt::format("rank {}", rank));
      sockets_[rank] = std::move(*socket);
    }
    for (size_t rank = size_t(store_.rank()) + 1; rank < sockets_.size(); ++rank) {
      if (!sockets_[rank].is_open()) {
        fail<EnvironmentError>("rank {} has not connected, or as another user", rank);
      }
    }
    return "";
  }

  std::string hand_round() {
    if (store_.rank() > 0) {
      memory_ = std::make_shared<SharedMemory>(SharedMemory::open(
          receive_descriptor(sockets_[0], deadline_), ShmLayout::bytes(store_.world_size())));
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
  std::shared_ptr<SharedMemory> memory_;
  std::vector<Socket> sockets_;
};

}  // namespace

std::shared_ptr<HostTransport> connect_shm(Store& store, double timeout_seconds) {
  return make_shm_transport(ShmMeeting(store, timeout_seconds).meet(timeout_seconds));
}

}  // namespace lockstep
